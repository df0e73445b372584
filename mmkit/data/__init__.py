"""From files on disk to batches of static shape, with an exact position."""
