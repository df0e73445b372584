"""Published checkpoints read into our names and written back under the original ones."""
