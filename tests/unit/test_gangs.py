"""Gangs in the helper: jobs that have all cards of a node, seen, planned, written and undone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from world import (
    NEW,
    NOW,
    NOWHERE,
    OLD,
    SETTINGS,
    TOKEN_A,
    TOKEN_B,
    Flat,
    card,
    decide,
    job,
    node,
    occupant,
    pending,
    places,
)

from slurm_gpushare.helper.changes import place, restore
from slurm_gpushare.helper.explain import Code
from slurm_gpushare.helper.observe import View, observe
from slurm_gpushare.helper.occupancy import GpuAddress, occupancy, placed_card
from slurm_gpushare.helper.pairs import pairs_now
from slurm_gpushare.helper.queue_facts import QueueFacts, TokenFacts
from slurm_gpushare.helper.snapshot import Gpu, How, LeftToSlurm, NodeRoom, Occupant, PendingJob, Snapshot
from slurm_gpushare.helper.why_left import why_left
from slurm_gpushare.knowledge.interference import GANG_DOUBT, Telemetry
from slurm_gpushare.knowledge.kb import default_kb
from slurm_gpushare.knowledge.learning import LearnedKnowledge
from slurm_gpushare.protocol.settings import parse_config
from slurm_gpushare.report.job_figures import gpu_s
from slurm_gpushare.slurm.nodes import missing_for_gangs
from slurm_gpushare.slurm.queue import Job

TAG = f"GS1:c=1;t={TOKEN_A};o=shard:2;k=2;l=1"
HALVES = "gpu:v100_0:0(IDX:N/A),gpu:v100_1:0(IDX:N/A),shard:v100_0:1(1/2,0/2),shard:v100_1:1(0/2,1/2)"
FULL = HALVES.replace(":1(1/2", ":2(2/2").replace(":1(0/2,1/2", ":2(0/2,2/2")


def gang(key: str = "1", shards: int = 2, **changes: Any) -> Job:
    """A pending gang of two GPUs, as the hook writes it."""
    return job(key, **({"per_node": "", "per_task": f"gres/shard:{shards}", "tag": TAG} | changes))


def on_node(key: str, shards: int = 1, **changes: Any) -> Job:
    """A gang that runs on n0."""
    tag = f"GS1:c=1;t={TOKEN_B};o=shard:2;k=2;g=n0:0"
    return gang(key, shards, **({"state": "RUNNING", "nodes": ("n0",), "start_s": NOW - 60, "tag": tag} | changes))


# -- seen -------------------------------------------------------------------------------------------------------


def test_a_gang_is_on_every_card_of_its_node() -> None:
    use = occupancy([node(used=HALVES)], [on_node("7")])
    for index in (0, 1):
        (share,) = use[GpuAddress("n0", index)].occupants
        assert (share.job.key, share.shards, share.whole) == ("7", 1, False)
        assert not use[GpuAddress("n0", index)].stranger


def test_a_gang_on_whole_cards_has_the_node_to_itself() -> None:
    use = occupancy([node(used=FULL)], [on_node("7", shards=2)])
    assert all(use[GpuAddress("n0", index)].occupants[0].whole for index in (0, 1))


def test_a_gang_that_was_sent_somewhere_is_expected_on_every_card() -> None:
    sent = gang("7", 1, tag=TAG.replace(";l=1", ";g=n0:0"), wanted_nodes="n0")
    assert placed_card(sent) == GpuAddress("n0", 0)
    use = occupancy([node()], [sent])
    assert [len(use[GpuAddress("n0", index)].coming) for index in (0, 1)] == [1, 1]


def test_on_a_node_of_another_width_nobody_knows_which_cards_a_gang_has() -> None:
    use = occupancy([node(used=HALVES)], [on_node("7", tag=f"GS1:c=1;t={TOKEN_B};o=shard:2;k=3")])
    assert all(use[GpuAddress("n0", index)].stranger for index in (0, 1))


def view(*jobs: Job, used: str = HALVES) -> View:
    config = parse_config("Partitions=gpu\nGpusPerNode=2\nShareGangs=yes\n")
    facts = QueueFacts(
        workloads={"V100": {token: TokenFacts(1, 2000, 1000.0, None, 1) for token in (TOKEN_A, TOKEN_B)}},
        card_mem_mib={"n0": 16_000},
    )
    return observe(jobs, [node(used=used)], config, facts, NOW)


def test_the_snapshot_says_who_is_a_gang() -> None:
    snapshot = view(on_node("7"), gang("8")).snapshot
    assert [(gpu.occupants[0].key, gpu.occupants[0].workload.width) for gpu in snapshot.gpus] == [("7", 2), ("7", 2)]
    (waiting,) = snapshot.pending
    assert (waiting.workload.width, waiting.gpus, waiting.workload.token) == (2, 2, TOKEN_A)


def test_cpus_of_a_gang_that_is_on_its_way_are_booked_once() -> None:
    sent = gang("7", 1, tag=TAG.replace(";l=1", ";g=n0:0"), wanted_nodes="n0", cpus=8)
    assert view(sent, used="").snapshot.nodes["n0"].cpus_free == 64 - 8


# -- planned ----------------------------------------------------------------------------------------------------

NODES = (NodeRoom("n1", 64, 100_000), NodeRoom("n2", 64, 100_000))


def waiting_gang(key: str = "p", **changes: Any) -> PendingJob:
    return pending(key, **({"width": 2, "gpus": 2} | changes))


def gang_on(name: str, *occupants: Occupant, **changes: Any) -> list[Gpu]:
    return [card(*occupants, node=name, index=index, **changes) for index in (0, 1)]


def lone(**changes: Any) -> Occupant:
    return occupant(**({"width": 2} | changes))


def test_a_gang_joins_a_gang_on_all_its_cards() -> None:
    assert places(decide(gang_on("n1", lone()), [waiting_gang()], NODES)) == {"p": ("n1", 0, How.BESIDE)}


def test_a_gang_gets_an_empty_node_and_only_an_entirely_empty_one() -> None:
    gpus = [card(occupant("x", token=None, whole=True)), card(index=1), *gang_on("n2")]
    assert places(decide(gpus, [waiting_gang()], NODES)) == {"p": ("n2", 0, How.ALONE)}
    assert places(decide(gpus[:2], [waiting_gang()], NODES)) == NOWHERE


def test_two_gangs_start_together_on_one_node() -> None:
    jobs = [waiting_gang("a", token="gs-a", expected_s=3000, limit_s=9000), waiting_gang("b")]
    found = places(decide(gang_on("n1"), jobs, NODES))
    assert found == {"a": ("n1", 0, How.ALONE), "b": ("n1", 0, How.TOGETHER)}


def test_a_job_for_one_card_never_joins_a_gang() -> None:
    assert places(decide(gang_on("n1", lone()), [pending()], NODES)) == NOWHERE


def test_a_gang_never_joins_jobs_for_one_card() -> None:
    gpus = [card(occupant("a")), card(occupant("b"), index=1)]
    assert places(decide(gpus, [waiting_gang()], NODES)) == NOWHERE


def test_nobody_joins_two_gangs() -> None:
    gpus = gang_on("n1", lone(), lone(key="s", joined=True))
    assert places(decide(gpus, [waiting_gang(), pending("q")], NODES)) == NOWHERE


@pytest.mark.parametrize("changes", [{"usable": False}, {"exclusive_process": True}])
def test_one_card_that_cannot_be_shared_keeps_the_node_from_it(changes: dict[str, Any]) -> None:
    gpus = [card(lone()), card(lone(), index=1, **changes)]
    assert places(decide(gpus, [waiting_gang()], NODES)) == NOWHERE


def test_the_promises_hold_for_gangs() -> None:
    gpus = gang_on("n1", lone(expected_s=1200.0, lost_s=250.0))
    assert places(decide(gpus, [waiting_gang()], NODES, Flat(0.5))) == NOWHERE
    assert places(decide(gang_on("n1", lone(max_isd_pct=0.0)), [waiting_gang()], NODES)) == NOWHERE


def test_memory_of_both_must_fit_on_a_card() -> None:
    assert places(decide(gang_on("n1", lone()), [waiting_gang(mem_used_mib=9000)], NODES)) == NOWHERE


def test_a_gang_of_higher_priority_keeps_a_long_guest_off_single_cards() -> None:
    """It needs them all; a guest that outlasts its resident would make it wait longer."""
    gpus = [card(occupant(limit_s=1500, expected_s=1400)), card(occupant("y", token=None, whole=True), index=1)]
    guest = pending("q", limit_s=3000)
    assert places(decide(gpus, [guest], NODES)) == {"q": ("n1", 0, How.BESIDE)}
    assert "q" not in places(decide(gpus, [waiting_gang(), guest], NODES))


def test_a_gang_that_waits_is_told_why() -> None:
    jobs = (waiting_gang(mem_used_mib=9000),)
    snapshot = Snapshot(NOW, tuple(gang_on("n1", lone())), {n.name: n for n in NODES}, jobs)
    reasons = why_left(snapshot, Flat(), SETTINGS, [LeftToSlurm("p", 100.0)])
    assert reasons["p"].code is Code.MEMORY


# -- written and undone -----------------------------------------------------------------------------------------


def test_a_placement_of_a_gang_is_half_of_every_card_of_a_node() -> None:
    change = place(gang("8", eligible_s=NOW + 20), GpuAddress("n0", 0), "v100_0", 1, NEW, NOW, guest=True)
    assert change is not None
    assert change.fields == {
        "Account": "science",
        "TresPerTask": "gres/shard:1",
        "ReqNodeList": "n0",
        "AdminComment": f"GS1:c=1;t={TOKEN_A};o=shard:2;k=2;g=n0:0;n=0",
        "Nice": "-1000000",
        "StartTime": "now",
    }
    assert place(gang("8"), GpuAddress("n0", 0), "v100_0", 1, OLD, NOW) is None


def test_a_gang_gets_all_shards_of_every_card_back() -> None:
    placed = gang("8", 1, tag=TAG.replace(";l=1", ";w=n5;g=n0:0;n=3"), wanted_nodes="n0")
    change = restore(placed, NEW, NOW)
    assert change is not None
    assert change.fields == {
        "Account": "science",
        "TresPerTask": "gres/shard:2",
        "ReqNodeList": "n5",
        "Nice": "3",
        "AdminComment": f"GS1:c=1;t={TOKEN_A};o=shard:2;k=2",
    }


def test_what_slurm_lacks_for_gangs_is_named() -> None:
    assert missing_for_gangs({"SelectTypeParameters": "CR_CPU_MEMORY,MULTIPLE_SHARING_GRES_PJ"}) == [
        "ONE_TASK_PER_SHARING_GRES"
    ]
    both = "CR_CPU_MEMORY,ONE_TASK_PER_SHARING_GRES,MULTIPLE_SHARING_GRES_PJ"
    assert missing_for_gangs({"SelectTypeParameters": both}) == []


# -- paired -----------------------------------------------------------------------------------------------------


def test_two_gangs_are_one_pair_on_all_their_cards() -> None:
    first, second = on_node("7"), on_node("8", start_s=NOW - 10, tag=f"GS1:c=1;t={TOKEN_A};o=shard:2;k=2;g=n0:0")
    cards = occupancy([node(used=FULL)], [first, second])
    (pair,) = pairs_now(cards, Flat(), NOW).values()
    assert (pair.resident.key, pair.guest.key, pair.card, pair.gpus) == ("7", "8", GpuAddress("n0", 0), 2)
    span = pair.span()
    assert span.cards == (("n0", 0), ("n0", 1))
    assert gpu_s(replace(span, end_s=span.start_s + 100), NOW) == 200.0


def test_the_rates_of_a_gang_are_those_of_one_card_with_more_doubt() -> None:
    shares = [np.array([value, value]) for value in (0.6, 0.3, 0.2)]
    single, gangs = (LearnedKnowledge(default_kb().knowledge().general) for _ in range(2))
    single.profiled(["a", "b"], Telemetry(*shares))
    gangs.profiled(["a", "b"], Telemetry(*shares, np.full(2, GANG_DOUBT)))
    one, many = (knowledge.rates(["a"], ["b"]) for knowledge in (single, gangs))
    assert many.low[0, 0] < one.low[0, 0] < one.mean[0, 0]
    for _ in range(20):  # what was seen of the two themselves counts alike
        single.observe("a", "b", 0.9)
        gangs.observe("a", "b", 0.9)
    assert gangs.rates(["a"], ["b"]).mean[0, 0] == pytest.approx(single.rates(["a"], ["b"]).mean[0, 0], abs=0.03)
