"""A real, throw-away Slurm on one machine whose only emulated part is the GPU."""
