"""What the helper writes into Slurm, and how each change is explained and taken back."""
