"""What the rest of the package may ask of Slurm, and the choice between the two ways to ask it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Protocol

from slurm_gpushare.slurm.accounting import AccountedJob, AccountingQuery
from slurm_gpushare.slurm.errors import SlurmError
from slurm_gpushare.slurm.limits import Limit
from slurm_gpushare.slurm.nodes import Node
from slurm_gpushare.slurm.queue import Job
from slurm_gpushare.slurm.release import Release
from slurm_gpushare.slurm.site import Partition, Reservation


class Slurm(Protocol):
    """A Slurm cluster. Every method may raise `SlurmError`."""

    name: str
    """Of the backend: ``commands`` or ``pyslurm``."""

    @property
    def calls(self) -> int:
        """Requests made so far; the helper reports them per tick."""

    @property
    def release(self) -> Release:
        """Asked once, then remembered."""

    def jobs(self, only: Iterable[str] = ()) -> list[Job]:
        """The queue, or those of the named jobs that slurmctld still knows. One request."""

    def nodes(self) -> list[Node]:
        """Every node. One request."""

    def accounting(self, query: AccountingQuery) -> list[AccountedJob]:
        """One sacct call, however many jobs."""

    def config(self) -> Mapping[str, str]:
        """``scontrol show config``."""

    def partitions(self) -> list[Partition]: ...

    def reservations(self) -> list[Reservation]: ...

    def limits(self) -> list[Limit]:
        """Limits of QOS and associations. Two sacctmgr calls."""

    def update_job(self, key: str, changes: Mapping[str, str]) -> None:
        """Change a job in one call. `JobMovedOn` if it started or ended meanwhile, `UpdateRefused` otherwise."""

    def requeue(self, key: str) -> None:
        """Put a running job back into the queue."""


def connect(backend: str = "") -> Slurm:
    """The backend named by `backend` or ``GPUSHARE_SLURM_BACKEND``; by default commands.

    ``auto`` takes pyslurm where it is installed and made for the Slurm in use: libslurm's interface changes
    with every release, so a pyslurm of another release would read garbage.
    """
    from slurm_gpushare.slurm.commands import CommandSlurm

    wanted = backend or os.environ.get("GPUSHARE_SLURM_BACKEND", "commands")
    commands = CommandSlurm()
    if wanted == "commands":
        return commands
    from slurm_gpushare.slurm.pyslurm_backend import PyslurmSlurm, why_not

    reason = why_not(commands.release)
    if reason is None:
        return PyslurmSlurm(commands)
    if wanted == "pyslurm":
        raise SlurmError(f"pyslurm cannot be used: {reason}", "Unset GPUSHARE_SLURM_BACKEND to use Slurm's commands.")
    return commands
