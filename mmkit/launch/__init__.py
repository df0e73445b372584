"""Where a run executes: this process, child processes, SLURM, TPU hosts."""
