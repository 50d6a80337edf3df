"""Limits on GPUs as the helper counts them: cards that are held, halves as halves."""

from __future__ import annotations

from typing import Any

import pytest
from test_reasons import only
from world import TOKEN_A, TOKEN_B, card, decide, job, node, occupant, pending, places, running

from slurm_gpushare.helper.explain import Code
from slurm_gpushare.helper.gpu_limits import SiteLimits
from slurm_gpushare.helper.observe import observe
from slurm_gpushare.helper.queue_facts import QueueFacts
from slurm_gpushare.helper.snapshot import LimitRoom
from slurm_gpushare.protocol.settings import parse_config
from slurm_gpushare.slurm.accounting import parse_limits

CONFIG = parse_config("Partitions=gpu\nGpuModel=v100\n", generated="GpusPerNode=2\nSlurmVersion=24.11.5\n")
ENFORCED = {"AccountingStorageEnforce": "associations,limits,qos"}
TAG = f"GS1:c=1;t={TOKEN_A};o=gpu:1"


def qos(**tres: str) -> list[Any]:
    names = ("GrpTRES", "GrpTRESMins", "GrpTRESRunMins", "MaxTRES", "MaxTRESPerNode", "MaxTRESMins", "MaxTRESPerUser",
             "MaxTRESPerAccount", "MinTRES")  # fmt: skip
    return parse_limits("qos", "|".join(["normal", *(tres.get(name, "") for name in names)]))


def left(*jobs: Any, limits: Any, **config: str) -> dict[str, LimitRoom]:
    facts = QueueFacts(limits=SiteLimits.of(ENFORCED | config, limits))
    return dict(observe(jobs, [node()], CONFIG, facts, 1_800_000_000).snapshot.limits)


def sharer(key: str, index: int, **changes: Any) -> Any:
    return running(key, "n0", f"gres/shard:v100_{index}:1", tag=TAG, **changes)


def test_a_half_counts_half_and_one_that_sits_alone_whole() -> None:
    jobs = [sharer("1", 0), sharer("2", 0), sharer("3", 1)]
    assert left(*jobs, limits=qos(GrpTRES="gres/gpu=4,gres/shard=8")) == {"GrpTRES of qos name=normal": (2.0, 5.0)}
    (user,) = left(*jobs, limits=qos(MaxTRESPerUser="gres/gpu=4")).values()
    assert user.cards == 2.0


def test_only_the_jobs_of_the_limits_own_count() -> None:
    jobs = [sharer("1", 0), sharer("2", 0, uid=7, account="other")]
    found = left(*jobs, limits=qos(MaxTRESPerUser="gres/gpu=2", MaxTRESPerAccount="gres/gpu=3"))
    assert found["MaxTRESPerUser of qos name=normal 7"].cards == 1.5
    assert found["MaxTRESPerAccount of qos name=normal science"].cards == 2.5
    account = parse_limits("assoc", "science|||gres/gpu=1|||||")
    assert left(*jobs, limits=account) == {"GrpTRES of assoc account=science": (0.5, float("inf"))}


def test_what_slurm_does_not_enforce_binds_nobody() -> None:
    limits = qos(GrpTRES="gres/gpu=1")
    assert left(sharer("1", 0), limits=limits, AccountingStorageEnforce="none") == {}
    assert left(job("1"), limits=qos(GrpTRES="cpu=1")) == {}


LIMITED = {"limits": {"q": LimitRoom(1.0, 4.0)}}


def test_no_card_is_given_past_the_limit_and_its_other_half_costs_nothing() -> None:
    jobs = [pending(f"p{i}", limits=("q",), token=TOKEN_B, expected_s=300 + i) for i in range(3)]
    got = places(decide([card(index=0), card(index=1)], jobs, **LIMITED))
    assert {key: gpu for key, (_, gpu, _) in got.items()} in ({"p0": 0}, {"p0": 0, "p1": 0}, {"p0": 0, "p2": 0})
    free = places(decide([card(index=0), card(index=1)], [pending("p0"), pending("p1"), pending("p2")]))
    assert len({gpu for _, gpu, _ in free.values()}) == 2


@pytest.mark.parametrize(
    ("room", "mine", "code"),
    [
        (LimitRoom(0.0, 4.0), (), Code.LIMIT),
        (LimitRoom(0.0, 4.0), ("q",), None),
        (LimitRoom(4.0, 0.0), ("q",), Code.LIMIT),
        (LimitRoom(0.5, 1.0), (), None),
    ],
)
def test_a_guest_counts_half_a_card_unless_its_resident_counts_for_the_same_limit(
    room: LimitRoom, mine: tuple[str, ...], code: Code | None
) -> None:
    gpus, jobs = [card(occupant(limits=mine))], [pending(limits=("q",))]
    if code is None:
        assert decide(gpus, jobs, limits={"q": room}).placements
    else:
        assert only(gpus=gpus, jobs=jobs, limits={"q": room}).code is code
