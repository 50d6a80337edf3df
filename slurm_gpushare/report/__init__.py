"""What people see: status, jobs, reports, metrics. Reads Slurm's accounting and the store, changes nothing."""
