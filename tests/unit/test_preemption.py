"""Preemption: whom the helper puts back into the queue for whom, and when it does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from test_reasons import only
from world import NOW, card, job, node, occupant, pending, running

from slurm_gpushare.helper.explain import Code
from slurm_gpushare.helper.observe import View, observe
from slurm_gpushare.helper.preemption import STARTS_WITHIN_S, PreemptionRules, Preemptors
from slurm_gpushare.helper.queue_facts import QueueFacts
from slurm_gpushare.protocol.settings import parse_config
from slurm_gpushare.slurm.accounting import parse_qos
from slurm_gpushare.slurm.nodes import parse_partitions

CONFIG = parse_config("Partitions=gpu\nGpuModel=v100\n", generated="GpusPerNode=2\nSlurmVersion=24.11.5\n")
PARTITIONS = parse_partitions("PartitionName=gpu PriorityTier=1\nPartitionName=urgent PriorityTier=9 GraceTime=0\n")
QOS = "normal||cluster|00:00:00|\nhigh|normal|cluster|00:00:00|\nsafe||off|00:00:00|\n"
SHARER = {"per_node": "gres/shard:v100_0:1", "cpus": 4}


def rules(qos: str = QOS, by: str = "qos", mode: str = "REQUEUE", **config: str) -> PreemptionRules:
    given = {"PreemptType": f"preempt/{by}", "PreemptMode": mode} | config
    return PreemptionRules.of(given, PARTITIONS, parse_qos(qos))


def sharer(key: str, index: int, **changes: Any) -> Any:
    return running(key, "n0", f"gres/shard:v100_{index}:1", **changes)


def view(*jobs: Any, by: PreemptionRules, now_s: int = NOW) -> View:
    facts = QueueFacts(preemption=by, own_names={"v100": "V100"})
    return observe(jobs, [node(partitions=("gpu", "urgent"))], CONFIG, facts, now_s)


def evicted(preemptors: Preemptors, *jobs: Any, by: PreemptionRules, now_s: int = NOW) -> list[str]:
    seen = view(*jobs, by=by, now_s=now_s)
    found = preemptors.look(by, seen.jobs, seen.cards, seen.snapshot, float(now_s))
    return [f"{'warn ' if item.warn else ''}{item.victim.job.key}" for item in found]


FULL = (sharer("1", 0), sharer("2", 1), sharer("3", 0, start_s=NOW - 50), sharer("4", 1, start_s=NOW - 30))
HIGH = job("9", qos="high", priority=1, eligible_s=NOW - 1)


def after_patience(*jobs: Any, by: PreemptionRules) -> list[str]:
    preemptors = Preemptors()
    assert evicted(preemptors, *jobs, by=by) == [], "Slurm first"
    return evicted(preemptors, *jobs, by=by, now_s=NOW + 2)


def test_the_card_that_costs_least_is_freed_guests_first() -> None:
    assert after_patience(*FULL, HIGH, by=rules()) == ["4", "2"]
    half = (*FULL[:2], FULL[2])
    assert after_patience(*half, HIGH, by=rules()) == ["2"], "where one half is empty already"
    two = job("9", qos="high", per_node="gres/gpu:2")
    assert after_patience(*FULL, two, by=rules()) == ["4", "2", "3", "1"]


def test_partitions_preempt_by_their_tier() -> None:
    urgent = job("9", partitions=("urgent",))
    assert after_patience(*FULL, urgent, by=rules(by="partition_prio")) == ["4", "2"]
    assert after_patience(*FULL, job("9"), by=rules(by="partition_prio")) == []


@pytest.mark.parametrize(
    ("first", "by"),
    [
        (job("9"), rules()),
        (HIGH, rules(mode="OFF")),
        (HIGH, rules(mode="SUSPEND,GANG")),
        (HIGH, rules(QOS.replace("normal||cluster", "normal||off"))),
        (HIGH, rules(PreemptExemptTime="00:05:00")),
        (HIGH, rules(QOS.replace("normal||cluster|00:00:00|", "normal||cluster|00:00:00|00:05:00"))),
        (HIGH, rules(by="none")),
        (replace(HIGH, state="PENDING", reason="QOSGrpGRES"), rules()),
        (replace(HIGH, dependency="afterok:1"), rules()),
        (replace(HIGH, per_node="gres/gpu:3"), rules()),
        (replace(HIGH, cpus=500), rules()),
    ],
)
def test_nobody_is_lost_where_slurm_would_not_preempt_or_the_job_not_start(first: Any, by: PreemptionRules) -> None:
    assert after_patience(*FULL, first, by=by) == []


def test_who_has_another_qos_or_a_whole_card_stays() -> None:
    jobs = [replace(item, qos="safe") if item.key == "4" else item for item in FULL]
    assert after_patience(*jobs, HIGH, by=rules()) == ["3", "1"]
    stranger = running("5", "n0", "gres/gpu:v100_0:1")
    assert after_patience(stranger, FULL[1], HIGH, by=rules()) == ["2"], "whole cards are Slurm's to free"


def test_grace_is_given_first() -> None:
    by = rules(QOS.replace("normal||cluster|00:00:00|", "normal||cluster|00:00:30|"))
    preemptors = Preemptors()
    evicted(preemptors, *FULL, HIGH, by=by)
    assert evicted(preemptors, *FULL, HIGH, by=by, now_s=NOW + 2) == ["warn 4", "warn 2"]
    assert evicted(preemptors, *FULL, HIGH, by=by, now_s=NOW + 20) == []
    assert evicted(preemptors, *FULL, HIGH, by=by, now_s=NOW + 33) == ["4", "2"]


def test_who_does_not_start_costs_nobody_else() -> None:
    preemptors, by = Preemptors(), rules()
    evicted(preemptors, *FULL, HIGH, by=by)
    assert evicted(preemptors, *FULL, HIGH, by=by, now_s=NOW + 2)
    others = FULL[:1]
    for later in (5, 20, 10 + int(STARTS_WITHIN_S), 90):
        assert evicted(preemptors, *others, HIGH, by=by, now_s=NOW + later) == []
    assert preemptors.hopeless == {"9"}
    assert not any(
        gpu.vacating for gpu in view(*FULL, HIGH, by=replace(by, hopeless=preemptors.hopeless)).snapshot.gpus
    )


def test_who_may_preempt_comes_first_and_nobody_joins_what_is_being_vacated() -> None:
    seen = view(*FULL[:2], job("8", priority=10**6), HIGH, by=rules())
    assert [item.key for item in seen.snapshot.pending] == ["9", "8"], "as Slurm sorts them"
    assert sum(gpu.vacating for gpu in seen.snapshot.gpus) == 1, "one is enough: the other may still be shared"
    vacated = view(*FULL[:3], HIGH, by=rules()).snapshot.gpus
    assert [gpu.vacating for gpu in vacated] == [False, True], "that of which one half is empty already"
    two = job("9", qos="high", per_node="gres/gpu:2")
    assert all(gpu.vacating for gpu in view(*FULL, two, by=rules()).snapshot.gpus)
    later = rules(PreemptExemptTime="10:00")
    assert all(gpu.vacating for gpu in view(*FULL, HIGH, by=later).snapshot.gpus), "nobody knows yet which it will be"
    reason = only(gpus=[card(occupant(), vacating=True)], jobs=[pending()])
    assert reason.code is Code.PREEMPTION
