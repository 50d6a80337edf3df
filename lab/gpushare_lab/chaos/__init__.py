"""Real faults on a throw-away Slurm while jobs of several users come and go, and the books afterwards."""
