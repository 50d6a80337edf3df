"""What can go wrong between us and Slurm, told apart because callers react differently."""

from __future__ import annotations

from slurm_gpushare.errors import GpushareError


class SlurmError(GpushareError):
    """A Slurm command failed."""


class SlurmMissing(SlurmError):
    """There is no Slurm here: no commands, or no configuration."""


class ControllerDown(SlurmError):
    """slurmctld does not answer. It will be back: wait and ask again."""


class AccountingDown(SlurmError):
    """sacct has nobody to ask: slurmdbd is down, or accounting is not set up."""


class UpdateRefused(SlurmError):
    """slurmctld did not take a change to a job."""


class JobMovedOn(UpdateRefused):
    """The job started, ended or vanished before our change arrived. News, not a fault."""
