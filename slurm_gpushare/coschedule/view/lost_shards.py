"""Shards that Slurm has lost: 22.05 forgets those in use when slurmctld restarts, and jobs for them wait for ever."""

from __future__ import annotations

from collections.abc import Iterable

from slurm_gpushare.coschedule import log
from slurm_gpushare.slurm.nodes import WITHOUT_SHARDS, Node


class LostShards:
    """Says it once, when shards go and when they are back."""

    def __init__(self) -> None:
        self._lost: dict[str, list[int]] = {}

    def look(self, nodes: Iterable[Node], shards_per_gpu: int) -> None:
        lost = {node.name: gpus for node in nodes if (gpus := node.lost_shards(shards_per_gpu))}
        for name, gpus in lost.items():
            if self._lost.get(name) != gpus:
                text = ",".join(map(str, gpus))
                log.warning(
                    "lost-shards",
                    node=name,
                    gpus=text,
                    error="jobs for them wait for ever or are refused",
                    hint=WITHOUT_SHARDS,
                )
        for name in self._lost.keys() - lost.keys():
            log.info("shards-back", node=name)
        self._lost = lost
