"""Restarts on Slurm: why an attempt ended, and whether the job goes back into the queue."""
