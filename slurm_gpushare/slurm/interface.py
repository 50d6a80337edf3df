"""What the rest of the package may ask of Slurm, and the choice between the two ways to ask it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from slurm_gpushare.protocol.errors import SlurmError
from slurm_gpushare.protocol.release import Release
from slurm_gpushare.slurm.accounting import AccountedJob, AccountingQuery, Limit
from slurm_gpushare.slurm.configuration import Partition, Reservation
from slurm_gpushare.slurm.nodes import Node
from slurm_gpushare.slurm.queue import Job


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

    def comments(self, only: Iterable[str] = ()) -> dict[str, str]:
        """What users wrote into the comments of all jobs, or of the named ones; by key. One request."""

    def batch_jobs(self, only: Iterable[str]) -> frozenset[str]:
        """Those of the named jobs that came from sbatch; by key. One request."""

    def nodes(self, only: Iterable[str] = ()) -> list[Node]:
        """Every node, or the named ones. One request."""

    def node_reasons(self) -> dict[str, str]:
        """Why nodes are down or drained, in Slurm's or an administrator's words; by name. One request."""

    def accounting(self, query: AccountingQuery) -> list[AccountedJob]:
        """One sacct call, however many jobs."""

    def cpu_used_s(self, jobs: Sequence[str]) -> dict[int, float]:
        """CPU time that accounting has gathered, by SLURM_JOB_ID; jobs of which it has none are absent."""

    def accounted_comments(self, jobs: Sequence[str]) -> Mapping[int, str]:
        """The users' own comments, by SLURM_JOB_ID, where accounting keeps them (AccountingStoreFlags=job_comment)."""

    def own_job_names(self) -> dict[str, str]:
        """The caller's own jobs' names, for the caller's own screen and nothing else; by key."""

    def config(self) -> Mapping[str, str]:
        """``scontrol show config``."""

    def partitions(self) -> list[Partition]: ...

    def reservations(self) -> list[Reservation]: ...

    def limits(self) -> list[Limit]:
        """Limits of QOS and associations. Two sacctmgr calls."""

    def accounting_names(self, kind: str) -> frozenset[str]:
        """The names of all that accounting has of a kind, ``account`` or ``cluster``. One sacctmgr call."""

    def update_job(self, key: str, changes: Mapping[str, str]) -> None:
        """Change a job in one call. `JobMovedOn` if it started or ended meanwhile, `UpdateRefused` otherwise."""

    def suspend(self, key: str) -> None:
        """Stop a running job's processes and its clock; it keeps its shards and memory, not its CPUs."""

    def resume(self, key: str) -> None:
        """Let a suspended job go on, with the CPUs that it had, whoever has them now."""

    def signal(self, key: str, name: str) -> None:
        """Send a signal (``STOP``, ``CONT``) to all processes of a running job."""

    def cores_of(self, keys: Iterable[str]) -> dict[str, frozenset[tuple[str, int]]]:
        """Nodes and CPU numbers that jobs hold, or held when they were suspended. One request a job."""

    def requeue(self, key: str) -> None:
        """Put a running job back into the queue."""


def connect(backend: str = "", *, lasting: bool = False, patient: bool = False) -> Slurm:
    """The backend that ``GPUSHARE_SLURM_BACKEND`` names, else `backend` (gpushare.conf's Backend), else the commands.

    ``auto`` takes pyslurm where it fits the Slurm in use: libslurm's interface changes with every release, so a
    pyslurm of another release would read garbage. `lasting`: for a process that changes many jobs, and keeps an
    scontrol open for it. `patient`: for one that looks once, and so asks a busy slurmctld again.
    """
    from slurm_gpushare.slurm.commands import CommandSlurm
    from slurm_gpushare.slurm.scontrol_session import ScontrolSession

    wanted = os.environ.get("GPUSHARE_SLURM_BACKEND") or backend or "commands"
    session = ScontrolSession() if lasting else None
    commands = CommandSlurm(session=session, patient=patient)
    if wanted == "commands":
        return commands
    from slurm_gpushare.slurm.pyslurm_backend import PyslurmSlurm, why_not

    reason = why_not(commands.release)
    if reason is None:
        return PyslurmSlurm(session=session)
    if wanted == "pyslurm":
        raise SlurmError(f"pyslurm cannot be used: {reason}", "Set Backend=commands in gpushare.conf.")
    return commands
