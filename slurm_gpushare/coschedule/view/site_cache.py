"""What changes rarely at a site: asked for when it matters, remembered in between."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from slurm_gpushare.slurm.configuration import Partition, Reservation
from slurm_gpushare.slurm.interface import Slurm
from slurm_gpushare.slurm.nodes import Node
from slurm_gpushare.slurm.queue import Job

PARTITIONS_FOR_S = 600.0
RESERVATIONS_FOR_S = 60.0


class SiteCache:
    """Partitions and reservations, so that most ticks ask for neither: at most one of them in one tick."""

    def __init__(self, slurm: Slurm) -> None:
        self._slurm = slurm
        self._partitions: list[Partition] = []
        self._partitions_at_s = float("-inf")
        self._reservations: list[Reservation] = []
        self._reservations_at_s = float("-inf")
        self._asked_at_s = float("-inf")

    def tiers(self, now_s: float) -> Mapping[str, int]:
        """Each partition's PriorityTier."""
        if now_s - self._partitions_at_s >= PARTITIONS_FOR_S and self._asked_at_s != now_s:
            self._partitions = self._slurm.partitions()
            self._partitions_at_s = self._asked_at_s = now_s
        return {partition.name: int(partition.fields.get("PriorityTier", "1")) for partition in self._partitions}

    def longest_limit_s(self) -> dict[str, float]:
        """MaxTime of the partitions that have one, as far as they were asked yet."""
        return {item.name: float(item.max_time_s) for item in self._partitions if item.max_time_s is not None}

    def most_s(self, partitions: Collection[str]) -> float:
        """The longest time limit that these partitions allow, as far as they were asked yet."""
        limits = [partition.max_time_s for partition in self._partitions if partition.name in partitions]
        return min((float(limit) for limit in limits if limit is not None), default=float("inf"))

    def reservations(self, nodes: Collection[Node], jobs: Collection[Job], now_s: float) -> list[Reservation]:
        """The reservations; asked for once a minute, and at once when a node or a job is seen in an unknown one."""
        known = {name for reservation in self._reservations for name in reservation.nodes}
        names = {reservation.name for reservation in self._reservations}
        unknown = any(node.reserved and node.name not in known for node in nodes) or any(
            job.reservation and job.reservation not in names for job in jobs
        )
        old = now_s - self._reservations_at_s >= RESERVATIONS_FOR_S
        recent = now_s - self._reservations_at_s < 5.0
        if (old or (unknown and not recent)) and self._asked_at_s != now_s:
            self._reservations = self._slurm.reservations()
            self._reservations_at_s = self._asked_at_s = now_s
        return self._reservations
