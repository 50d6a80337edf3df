"""The backend that always works: Slurm's own commands, one call a question."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from slurm_gpushare.protocol.errors import SlurmError
from slurm_gpushare.protocol.release import Release, parse_release
from slurm_gpushare.slurm import runner
from slurm_gpushare.slurm.accounting import (
    AccountedJob,
    AccountingQuery,
    Limit,
    parse_accounting,
    parse_limits,
    sacct_arguments,
    sacct_format,
    sacctmgr_arguments,
)
from slurm_gpushare.slurm.configuration import (
    Partition,
    Reservation,
    parse_config,
    parse_partitions,
    parse_reservations,
)
from slurm_gpushare.slurm.nodes import Node, parse_nodes, sinfo_arguments
from slurm_gpushare.slurm.queue import (
    BATCH_COLUMNS,
    COLUMNS,
    COMMENT_COLUMNS,
    NAME_COLUMNS,
    Job,
    QueueReader,
    parse_cores,
    parse_queue,
    parse_texts,
    squeue_arguments,
    squeue_settings,
)
from slurm_gpushare.slurm.runner import JobMovedOn, marked_rows, new_delimiter, time_format
from slurm_gpushare.slurm.scontrol_session import ScontrolSession
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


class CommandSlurm:
    """Slurm through squeue, sinfo, sacct and scontrol. `run` is replaced only where a fault must be made.

    With a `session` changes to jobs go through it. Who is `patient` asks a busy slurmctld again at once, not at the
    next look.
    """

    name = "commands"

    def __init__(
        self, run: Callable[..., str] = runner.run, session: ScontrolSession | None = None, *, patient: bool = False
    ) -> None:
        self._run = run
        self._patient = patient
        self._session = session
        self._calls = 0
        self._queue = QueueReader()
        self._release: tuple[tuple[int, int] | None, Release] | None = None

    @property
    def calls(self) -> int:
        return self._calls

    def _ask(self, argv: Sequence[str]) -> str:
        self._calls += 1
        return self._run(argv)

    @property
    def release(self) -> Release:
        """Asked again when Slurm's commands on this machine have become other files: it was upgraded under us."""
        made = _identity("sinfo")
        if self._release is None or self._release[0] != made:
            self._release = made, parse_release(self._run(["sinfo", "--version"]))  # no request to slurmctld
        return self._release[1]

    def _ask_queue(self, columns: Sequence[str], delimiter: str, *options: str, jobs: str = "") -> str:
        self._calls += 1
        argv = [*squeue_arguments(jobs), *options]
        try:
            return self._run(argv, settings=squeue_settings(columns, delimiter))
        except JobMovedOn:
            return ""
        except SlurmError as error:
            # squeue calls it an error when the only job asked for is gone.
            if jobs and "invalid job id" in str(error).lower():
                return ""
            raise

    def jobs(self, only: Iterable[str] = ()) -> list[Job]:
        delimiter, wanted = new_delimiter(), list(only)
        output = self._ask_queue(COLUMNS, delimiter, jobs=",".join(wanted))
        return parse_queue(output, delimiter, wanted) if wanted else self._queue.parse(output, delimiter)

    def comments(self, only: Iterable[str] = ()) -> dict[str, str]:
        delimiter = new_delimiter()
        output = self._ask_queue(COMMENT_COLUMNS, delimiter, jobs=",".join(only))
        return parse_texts(output, COMMENT_COLUMNS, delimiter)

    def batch_jobs(self, only: Iterable[str]) -> frozenset[str]:
        delimiter = new_delimiter()
        flags = parse_texts(self._ask_queue(BATCH_COLUMNS, delimiter, jobs=",".join(only)), BATCH_COLUMNS, delimiter)
        return frozenset(key for key, flag in flags.items() if flag == "1")

    def nodes(self, only: Iterable[str] = ()) -> list[Node]:
        delimiter = new_delimiter()
        return parse_nodes(self._ask(sinfo_arguments(delimiter, ",".join(only))), delimiter, self.release)

    def node_reasons(self) -> dict[str, str]:
        output = self._ask(["sinfo", "--all", "--local", "--list-reasons", "--noheader", "--format=%N|%E"])
        lines = (line.partition("|") for line in output.splitlines())
        return {name: why.strip() for nodes, bar, why in lines if bar for name in expand(nodes.strip())}

    def _ask_sacct(self, argv: Sequence[str], mark: str) -> str:
        self._calls += 1
        return self._run(argv, settings=time_format(mark))

    def accounting(self, query: AccountingQuery) -> list[AccountedJob]:
        delimiter, mark = new_delimiter(), new_delimiter()
        return parse_accounting(self._ask_sacct(sacct_arguments(query, delimiter), mark), delimiter, mark)

    def cpu_used_s(self, jobs: Sequence[str]) -> dict[int, float]:
        output = self._ask(["sacct", "-X", "-n", "-P", "--format=JobIDRaw,TotalCPU", f"--jobs={','.join(jobs)}"])
        found = (line.partition("|") for line in output.splitlines())
        seconds = {int(job): duration_s(used) for job, _, used in found if job.isdecimal()}
        return {job: float(used) for job, used in seconds.items() if used}

    def accounted_comments(self, jobs: Sequence[str]) -> dict[int, str]:
        delimiter, mark, columns = new_delimiter(), new_delimiter(), ("Submit", "JobIDRaw", "Comment")
        argv = ["sacct", "--allocations", "--noheader", "--parsable", f"--delimiter={delimiter}",
                sacct_format(columns), "--allusers", f"--jobs={','.join(jobs)}"]  # fmt: skip
        found = marked_rows(self._ask_sacct(argv, mark), columns, delimiter, mark)
        return {int(row["JobIDRaw"]): row["Comment"] for row in found if row["JobIDRaw"].isdecimal()}

    def own_job_names(self) -> dict[str, str]:
        delimiter = new_delimiter()
        return parse_texts(self._ask_queue(NAME_COLUMNS, delimiter, "--me"), NAME_COLUMNS, delimiter)

    def config(self) -> Mapping[str, str]:
        return parse_config(self._ask(["scontrol", "show", "config"]))

    def partitions(self) -> list[Partition]:
        return parse_partitions(self._ask(["scontrol", "--all", "--oneliner", "show", "partition"]))

    def reservations(self) -> list[Reservation]:
        return parse_reservations(self._ask(["scontrol", "--all", "--oneliner", "show", "reservation"]))

    def limits(self) -> list[Limit]:
        return [limit for kind in ("qos", "assoc") for limit in parse_limits(kind, self._ask(sacctmgr_arguments(kind)))]

    def accounting_names(self, kind: str) -> frozenset[str]:
        words = ["sacctmgr", "--noheader", "--parsable2", "--readonly", "show", kind, f"format={kind}"]
        return frozenset(self._ask(words).split())

    def update_job(self, key: str, changes: Mapping[str, str]) -> None:
        # One argument a change: scontrol takes a value's spaces as they are.
        words = ["update", f"JobId={key}", *(f"{name}={value}" for name, value in changes.items())]
        if self._session is not None and self._session.took(words):
            self._calls += 1
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

    def suspend(self, key: str) -> None:
        self._change(["scontrol", "suspend", key])

    def resume(self, key: str) -> None:
        self._change(["scontrol", "resume", key])

    def signal(self, key: str, name: str) -> None:
        self._ask(["scancel", "--full", f"--signal={name}", key])

    def cores_of(self, keys: Iterable[str]) -> dict[str, frozenset[tuple[str, int]]]:
        found = {}
        for key in keys:
            try:
                found[key] = parse_cores(self._ask(["scontrol", "--details", "--oneliner", "show", "job", key]))
            except JobMovedOn:
                continue
        return found

    def requeue(self, key: str) -> None:
        self._ask(["scontrol", "requeue", key])
