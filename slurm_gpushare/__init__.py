"""Two training jobs on one GPU under Slurm, paired by opaque telemetry alone."""

__version__ = "0.1.0"
