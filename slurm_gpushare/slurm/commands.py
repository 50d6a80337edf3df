"""What the rest of the package may ask of Slurm: its own commands, one call a question."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from slurm_gpushare.protocol.errors import SlurmError
from slurm_gpushare.protocol.release import Release, parse_release
from slurm_gpushare.slurm import accounting, nodes, queue, runner
from slurm_gpushare.slurm.accounting import AccountedJob, AccountingQuery, Limit, Qos, sacctmgr_arguments
from slurm_gpushare.slurm.nodes import Node, Partition, Reservation
from slurm_gpushare.slurm.queue import Job
from slurm_gpushare.slurm.runner import JobMovedOn, ScontrolSession, marked_rows, new_delimiter
from slurm_gpushare.slurm.values import duration_s, expand

BUSY_PAUSES_S = (0.1, 0.3, 1.0)
"""Before each further try of who is patient."""


def _identity(command: str) -> tuple[int, int] | None:
    """What changes when a command's file is replaced; None where there is none."""
    try:
        about = Path(shutil.which(command) or "").stat()
    except OSError:
        return None
    return about.st_mtime_ns, about.st_ino


class Slurm:
    """A Slurm cluster through squeue, sinfo, sacct and scontrol. Every method may raise `SlurmError`.

    `run` is replaced only where a fault must be made. With a `session` changes to jobs go through it. Who is `patient`
    asks a busy slurmctld again at once, not at the next look.
    """

    name = "commands"
    """Of the backend; ``pyslurm`` is the other."""

    def __init__(
        self, run: Callable[..., str] = runner.run, session: ScontrolSession | None = None, *, patient: bool = False
    ) -> None:
        self._run = run
        self.before_change: Callable[[], None] = lambda: None
        """Called before each change but one that lets a job go on; what it raises keeps the change from being made."""
        self._patient = patient
        self._session = session
        self.calls = 0
        """Requests made so far; the helper reports them per tick."""
        self._queue = queue.QueueReader()
        self._release: tuple[tuple[int, int] | None, Release] | None = None

    def _ask(self, argv: Sequence[str]) -> str:
        self.calls += 1
        return self._run(argv)

    @property
    def release(self) -> Release:
        """Asked again when Slurm's commands on this machine have become other files: it was upgraded under us."""
        made = _identity("sinfo")
        if self._release is None or self._release[0] != made:
            self._release = made, parse_release(self._run(["sinfo", "--version"]))  # no request to slurmctld
        return self._release[1]

    def _ask_queue(self, columns: Sequence[str], delimiter: str, *options: str, jobs: str = "") -> str:
        self.calls += 1
        argv = [*queue.squeue_arguments(jobs), *options]
        try:
            return self._run(argv, settings=queue.squeue_settings(columns, delimiter))
        except JobMovedOn:
            return ""
        except SlurmError as error:
            # squeue calls it an error when the only job asked for is gone.
            if jobs and "invalid job id" in str(error).lower():
                return ""
            raise

    def _texts(self, columns: Sequence[str], *options: str, only: Iterable[str] = ()) -> dict[str, str]:
        """The last of the columns, by key."""
        delimiter = new_delimiter()
        output = self._ask_queue(columns, delimiter, *options, jobs=",".join(only))
        return queue.parse_texts(output, columns, delimiter)

    def jobs(self, only: Iterable[str] = ()) -> list[Job]:
        """The queue, or those of the named jobs that slurmctld still knows. One request."""
        delimiter, wanted = new_delimiter(), list(only)
        output = self._ask_queue(queue.COLUMNS, delimiter, jobs=",".join(wanted))
        return queue.parse_queue(output, delimiter, wanted) if wanted else self._queue.parse(output, delimiter)

    def jobs_in(self, partitions: Iterable[str], qos: Iterable[str]) -> list[Job]:
        """The jobs of some partitions, or of some QOS where there are no partitions. One request."""
        delimiter = new_delimiter()
        where = f"--partition={','.join(partitions)}" if partitions else f"--qos={','.join(qos)}"
        return queue.parse_queue(self._ask_queue(queue.COLUMNS, delimiter, where), delimiter)

    def comments(self, only: Iterable[str] = ()) -> dict[str, str]:
        """What users wrote into the comments of all jobs, or of the named ones; by key. One request."""
        return self._texts(queue.COMMENT_COLUMNS, only=only)

    def batch_jobs(self, only: Iterable[str]) -> frozenset[str]:
        """Those of the named jobs that came from sbatch; by key. One request."""
        return frozenset(key for key, flag in self._texts(queue.BATCH_COLUMNS, only=only).items() if flag == "1")

    def own_job_names(self) -> dict[str, str]:
        """The caller's own jobs' names, for the caller's own screen and nothing else; by key."""
        return self._texts(queue.NAME_COLUMNS, "--me")

    def nodes(self, only: Iterable[str] = ()) -> list[Node]:
        """Every node, or the named ones. One request."""
        delimiter = new_delimiter()
        return nodes.parse_nodes(self._ask(nodes.sinfo_arguments(delimiter, ",".join(only))), delimiter, self.release)

    def node_reasons(self) -> dict[str, str]:
        """Why nodes are down or drained, in Slurm's or an administrator's words; by name. One request."""
        output = self._ask(["sinfo", "--all", "--local", "--list-reasons", "--noheader", "--format=%N|%E"])
        lines = (line.partition("|") for line in output.splitlines())
        return {name: why.strip() for names, bar, why in lines if bar for name in expand(names.strip())}

    def _ask_sacct(self, argv: Sequence[str], mark: str) -> str:
        self.calls += 1
        return self._run(argv, settings=runner.time_format(mark))

    def accounting(self, query: AccountingQuery) -> list[AccountedJob]:
        """One sacct call, however many jobs."""
        delimiter, mark = new_delimiter(), new_delimiter()
        output = self._ask_sacct(accounting.sacct_arguments(query, delimiter), mark)
        return accounting.parse_accounting(output, delimiter, mark)

    def cpu_used_s(self, jobs: Sequence[str]) -> dict[int, float]:
        """CPU time that accounting has gathered, by SLURM_JOB_ID; jobs of which it has none are absent."""
        output = self._ask(["sacct", "-X", "-n", "-P", "--format=JobIDRaw,TotalCPU", f"--jobs={','.join(jobs)}"])
        found = (line.partition("|") for line in output.splitlines())
        seconds = {int(job): duration_s(used) for job, _, used in found if job.isdecimal()}
        return {job: float(used) for job, used in seconds.items() if used}

    def accounted_comments(self, jobs: Sequence[str]) -> dict[int, str]:
        """The users' own comments, by SLURM_JOB_ID, where accounting keeps them (AccountingStoreFlags=job_comment)."""
        delimiter, mark, columns = new_delimiter(), new_delimiter(), ("Submit", "JobIDRaw", "Comment")
        argv = accounting.sacct_arguments(AccountingQuery(jobs=jobs), delimiter, columns)
        found = marked_rows(self._ask_sacct(argv, mark), columns, delimiter, mark)
        return {int(row["JobIDRaw"]): row["Comment"] for row in found if row["JobIDRaw"].isdecimal()}

    def set_accounted_comment(self, jobs: Iterable[int], admin_comment: str) -> None:
        """Write the AdminComment of jobs that have ended. One sacctmgr call."""
        ids = ",".join(map(str, jobs))
        self._ask(["sacctmgr", "--immediate", "modify", "job", "where", f"jobid={ids}",
                   "set", f"AdminComment={admin_comment}"])  # fmt: skip

    def config(self) -> Mapping[str, str]:
        """``scontrol show config``."""
        return nodes.parse_config(self._ask(["scontrol", "show", "config"]))

    def ping(self) -> str:
        """``scontrol ping``: which controllers are up. An error where none is."""
        return self._ask(["scontrol", "ping"])

    def partitions(self) -> list[Partition]:
        return nodes.parse_partitions(self._ask(["scontrol", "--all", "--oneliner", "show", "partition"]))

    def reservations(self) -> list[Reservation]:
        return nodes.parse_reservations(self._ask(["scontrol", "--all", "--oneliner", "show", "reservation"]))

    def limits(self) -> list[Limit]:
        """Limits of QOS and associations. Two sacctmgr calls."""
        return [
            limit
            for kind, (names, limits) in accounting.LIMIT_COLUMNS.items()
            for limit in accounting.parse_limits(kind, self._ask(sacctmgr_arguments(kind, [*names, *limits])))
        ]

    def qos(self) -> list[Qos]:
        """What each QOS says of preemption. One sacctmgr call."""
        return accounting.parse_qos(self._ask(sacctmgr_arguments("qos", accounting.QOS_COLUMNS)))

    def accounting_names(self, kind: str) -> frozenset[str]:
        """The names of all that accounting has of a kind, ``account`` or ``cluster``. One sacctmgr call."""
        return frozenset(self._ask(sacctmgr_arguments(kind, [kind])).split())

    def update_job(self, key: str, changes: Mapping[str, str]) -> None:
        """Change a job in one call. `JobMovedOn` if it started or ended meanwhile, `UpdateRefused` otherwise."""
        self.before_change()
        # One argument a change: scontrol takes a value's spaces as they are.
        words = ["update", f"JobId={key}", *(f"{name}={value}" for name, value in changes.items())]
        if self._session is not None and self._session.took(words):
            self.calls += 1
            return
        self._change(["scontrol", *words])

    def _change(self, argv: Sequence[str]) -> None:
        """Ask for a change; if patient, a slurmctld that has no time for this job just now is asked again."""
        for pause_s in BUSY_PAUSES_S if self._patient else ():
            try:
                self._ask(argv)
                return
            except JobMovedOn as why:
                if runner.BUSY not in str(why).lower():
                    raise
            time.sleep(pause_s)
        self._ask(argv)

    def resume(self, key: str) -> None:
        """Let a suspended job go on, with the CPUs that it had, whoever has them now."""
        self._change(["scontrol", "resume", key])

    def signal(self, name: str, *keys: str) -> None:
        """Send a signal to all processes of running jobs."""
        self._ask(["scancel", "--full", f"--signal={name}", *keys])

    def cancel(self, *keys: str) -> None:
        """End jobs, in one call."""
        self.before_change()
        self._ask(["scancel", *keys])

    def requeue(self, *keys: str) -> None:
        """Put running jobs back into the queue, in one call; the others too where one of them has ended."""
        self.before_change()
        self._ask(["scontrol", "requeue", ",".join(keys)])


def connect(backend: str = "", *, lasting: bool = False, patient: bool = False) -> Slurm:
    """The backend that ``GPUSHARE_SLURM_BACKEND`` names, else `backend` (gpushare.conf's Backend), else the commands.

    ``auto`` takes pyslurm where it fits the Slurm in use, for short queues: libslurm's interface changes with every
    release, so a pyslurm of another release would read garbage. `lasting`: for a process that changes many jobs, and
    keeps an scontrol open for it. `patient`: for one that looks once, and so asks a busy slurmctld again.
    """
    wanted = os.environ.get("GPUSHARE_SLURM_BACKEND") or backend or "commands"
    session = ScontrolSession() if lasting else None
    commands = Slurm(session=session, patient=patient)
    if wanted == "commands":
        return commands
    from slurm_gpushare.slurm.pyslurm_backend import PyslurmSlurm, why_not

    reason = why_not(commands.release, commands.config)
    if reason is None:
        return PyslurmSlurm(session=session)
    if wanted == "pyslurm":
        raise SlurmError(f"pyslurm cannot be used: {reason}", "Set Backend=commands in gpushare.conf.")
    return commands
