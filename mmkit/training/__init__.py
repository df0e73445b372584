"""The training loop and what it needs: loss, optimizer, adapters, checkpoints, stability."""
