"""Which cards a job is on, where Slurm does not say.

The prolog of a job that starts just after slurmctld did has no SLURM_JOB_GPUS: the node has not registered yet.
"""

from __future__ import annotations

from slurm_gpushare.telemetry.bounded import Bounded, Stuck
from slurm_gpushare.telemetry.nvml import NvmlError, processes_by_card
from slurm_gpushare.telemetry.processes import Members

_NVML_LIMIT_S = 2.0


class CardSearch:
    """Looks for a job's processes on the node's cards."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._bounded = Bounded()

    def look(self) -> tuple[int, ...]:
        """The indices of the cards that a process of the job is on now; empty while there is none, or NVML fails."""
        self._members.refresh()
        try:
            found = self._bounded.call(processes_by_card, _NVML_LIMIT_S)
        except (Stuck, NvmlError):
            return ()
        return tuple(index for index, pids in sorted(found.items()) if any(self._members.owns(pid) for pid in pids))
