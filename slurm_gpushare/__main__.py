"""``python -m slurm_gpushare`` is the gpushare command."""

from slurm_gpushare.cli.main import main

main()
