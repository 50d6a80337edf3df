"""The lab of slurm-gpushare: what proves it, and no site installs."""

__version__ = "0.1.0"
