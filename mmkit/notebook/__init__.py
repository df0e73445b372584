"""What makes a notebook more than a script: checked parameters, live progress, records, and a runner that tells failure from success."""
