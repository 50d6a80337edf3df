"""The throw-away Slurm itself: its files, daemons, processes and root file systems."""
