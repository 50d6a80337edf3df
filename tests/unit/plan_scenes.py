"""Cards, running and waiting jobs for tests of the plan, each a plain case with what the test changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from slurm_gpushare.helper.plan import plan
from slurm_gpushare.helper.snapshot import Gpu, How, NodeRoom, Occupant, PendingJob, Placement, Plan, Snapshot
from slurm_gpushare.knowledge.rates import RateTable
from slurm_gpushare.protocol.policy import PolicySettings

NOW = 1_000_000.0
SETTINGS = PolicySettings()


class Flat:
    """Every rate is the same; `low` is the pessimistic end."""

    def __init__(self, mean: float = 0.8, low: float | None = None) -> None:
        self.mean, self.low = mean, mean if low is None else low

    def rates(self, victims: Sequence[str], neighbours: Sequence[str]) -> RateTable:
        shape = (len(victims), len(neighbours))
        return RateTable(np.full(shape, self.mean), np.full(shape, self.low))

    def observe(self, victim: str, neighbour: str, rate: float, weight: float = 1.0) -> None:
        raise AssertionError("the plan never learns")


def running(key: str = "r", **changes: Any) -> Occupant:
    """A resident of 10 000 s that has run for 1000."""
    usual = Occupant(
        key,
        "gs-r",
        cluster=2,
        user="ann",
        account="physics",
        mem_used_mib=8000,
        start_s=NOW - 1000,
        limit_s=30_000,
        expected_s=10_000,
    )
    return replace(usual, **changes)


def pending(key: str = "p", **changes: Any) -> PendingJob:
    """A short job that fits everywhere."""
    usual = PendingJob(
        key,
        "gs-p",
        cluster=0,
        user="bob",
        account="biology",
        mem_used_mib=4000,
        cpus=4,
        node_mem_mib=1000,
        limit_s=600,
        expected_s=300,
        eligible_s=NOW - 60,
    )
    return replace(usual, **changes)


def card(*occupants: Occupant, node: str = "n1", index: int = 0, **changes: Any) -> Gpu:
    return replace(Gpu(node, index, "v100", 16_000, occupants=tuple(occupants)), **changes)


def decide(
    gpus: Sequence[Gpu],
    jobs: Sequence[PendingJob],
    nodes: Sequence[NodeRoom] = (NodeRoom("n1", 32, 100_000),),
    knowledge: Flat | None = None,
    settings: PolicySettings = SETTINGS,
    **changes: Any,
) -> Plan:
    snapshot = Snapshot(NOW, tuple(gpus), {node.name: node for node in nodes}, tuple(jobs), mean_duration_s=2000.0)
    return plan(replace(snapshot, **changes), knowledge or Flat(), settings)


def places(got: Plan) -> dict[str, tuple[str, int, How]]:
    return {p.key: (p.node, p.index, p.how) for p in got.placements}


def only(got: Plan) -> Placement:
    assert len(got.placements) == 1, got
    return got.placements[0]


BESIDE_RESIDENT = {"p": ("n1", 0, How.BESIDE)}
NOWHERE: dict[str, tuple[str, int, How]] = {}
