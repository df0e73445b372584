"""The one folder that knows about processes, devices and distributed packages."""
