"""The backend that always works: Slurm's own commands, one call a question."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property

from slurm_gpushare.slurm import runner
from slurm_gpushare.slurm.accounting import AccountedJob, AccountingQuery, parse_accounting, sacct_arguments
from slurm_gpushare.slurm.errors import JobMovedOn, SlurmError
from slurm_gpushare.slurm.limits import Limit, parse_limits, sacctmgr_arguments
from slurm_gpushare.slurm.nodes import Node, parse_nodes, sinfo_arguments
from slurm_gpushare.slurm.queue import Job, parse_queue, squeue_arguments
from slurm_gpushare.slurm.release import Release, parse_release
from slurm_gpushare.slurm.site import (
    Partition,
    Reservation,
    parse_config,
    parse_partitions,
    parse_reservations,
)
from slurm_gpushare.slurm.table import new_delimiter


class CommandSlurm:
    """Slurm through squeue, sinfo, sacct and scontrol. `run` is replaced only where a fault must be made."""

    name = "commands"

    def __init__(self, run: Callable[[Sequence[str]], str] = runner.run) -> None:
        self._run = run
        self._calls = 0

    @property
    def calls(self) -> int:
        return self._calls

    def _ask(self, argv: Sequence[str]) -> str:
        self._calls += 1
        return self._run(argv)

    @cached_property
    def release(self) -> Release:
        return parse_release(self._run(["sinfo", "--version"]))  # a local answer: no request to slurmctld

    def jobs(self, only: Iterable[str] = ()) -> list[Job]:
        delimiter, wanted = new_delimiter(), ",".join(only)
        try:
            output = self._ask(squeue_arguments(delimiter, wanted))
        except JobMovedOn:
            return []
        except SlurmError as error:
            # squeue calls it an error when the only job asked for is gone.
            if wanted and "invalid job id" in str(error).lower():
                return []
            raise
        return parse_queue(output, delimiter)

    def nodes(self) -> list[Node]:
        delimiter = new_delimiter()
        return parse_nodes(self._ask(sinfo_arguments(delimiter)), delimiter, self.release)

    def accounting(self, query: AccountingQuery) -> list[AccountedJob]:
        delimiter = new_delimiter()
        return parse_accounting(self._ask(sacct_arguments(query, delimiter)), delimiter)

    def config(self) -> Mapping[str, str]:
        return parse_config(self._ask(["scontrol", "show", "config"]))

    def partitions(self) -> list[Partition]:
        return parse_partitions(self._ask(["scontrol", "--all", "--oneliner", "show", "partition"]))

    def reservations(self) -> list[Reservation]:
        return parse_reservations(self._ask(["scontrol", "--all", "--oneliner", "show", "reservation"]))

    def limits(self) -> list[Limit]:
        return [limit for kind in ("qos", "assoc") for limit in parse_limits(kind, self._ask(sacctmgr_arguments(kind)))]

    def update_job(self, key: str, changes: Mapping[str, str]) -> None:
        # One argument a change: scontrol takes a value's spaces as they are.
        self._ask(["scontrol", "update", f"JobId={key}", *(f"{name}={value}" for name, value in changes.items())])

    def requeue(self, key: str) -> None:
        self._ask(["scontrol", "requeue", key])
