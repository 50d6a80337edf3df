"""The only code that talks to Slurm: commands out, frozen dataclasses in."""
