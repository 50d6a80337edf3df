"""What is there now: jobs and nodes from Slurm, facts from the store, joined into one snapshot."""
