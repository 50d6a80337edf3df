"""Placements that came to nothing: how long they have, why they are taken back, and which nodes are avoided then."""

from __future__ import annotations

import pytest
from world import NOW, TOKEN_A, job, node

from slurm_gpushare.helper.placements import Placements
from slurm_gpushare.slurm.queue import Job

TAG = f"GS1:c=1;t={TOKEN_A};o=gpu:1"
NODES = {name: node(name=name) for name in ("n0", "n1", "n2")}


def placed(key: str = "5", **changes: object) -> Job:
    values = {"tag": f"{TAG};g=n0:1", "per_node": "gres/shard:v100_1:1", "wanted_nodes": "n0"} | changes
    return job(key, **values)


def test_a_placement_has_its_time_to_start() -> None:
    placements = Placements()
    placements.sent(placed(), NOW)
    nodes = {"n0": node()}
    assert placements.overdue([placed()], nodes, NOW + 29, 30.0) == []
    behind_another = placed(reason="ReqNodeNotAvail, May be reserved for other job")
    assert placements.overdue([behind_another], nodes, NOW + 29, 30.0) == [], "it waits for the same epilog"
    for reason in (
        "ReqNodeNotAvail, UnavailableNodes:n0",
        "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions",
    ):
        assert placements.overdue([placed(reason=reason)], nodes, NOW + 29, 30.0) == [], (
            "slurmctld has just been started"
        )
    ((_, why),) = placements.overdue([placed()], nodes, NOW + 31, 30.0)
    assert "within 30 s" in why


@pytest.mark.parametrize(
    ("now", "reason"),
    [
        (placed(priority=0), "held"),
        (placed(reason="QOSMaxGRESPerUser"), "QOSMaxGRESPerUser"),
        (placed(reason="ReqNodeNotAvail, Reserved for maintenance"), "maintenance"),
        (placed(dependency="afterok:1(unfulfilled)"), "holds it back"),
        (placed(restarts=1), "requeued"),
        (placed(wanted_nodes="n7"), "changed"),
    ],
)
def test_what_will_not_start_is_taken_back_at_once(now: Job, reason: str) -> None:
    placements = Placements()
    placements.sent(placed(), NOW)
    ((_, why),) = placements.overdue([now], {"n0": node()}, NOW + 1, 30.0)
    assert reason in why


def test_a_node_out_of_service_gives_its_placements_back() -> None:
    placements = Placements()
    placements.sent(placed(), NOW)
    drained = node(states=frozenset({"idle", "drain"}))
    assert placements.overdue([placed()], {"n0": drained}, NOW + 1, 30.0)
    assert placements.overdue([placed()], {}, NOW + 1, 30.0)
    placements.failed(placed(), {"n0": drained}, NOW + 1)
    placements.failed(placed(), {}, NOW + 1)
    assert placements.avoid(["n0"], NOW + 2) == {}, "once it is back, it may do"


def test_a_node_that_failed_a_job_is_avoided_and_two_are_enough() -> None:
    placements = Placements()
    placements.failed(placed(), NODES, NOW)
    assert placements.avoid(["n0", "n1", "n2"], NOW + 1) == {"5": frozenset({"n0"})}
    other = placed(tag=f"{TAG};g=n1:1", wanted_nodes="n1")
    placements.failed(other, NODES, NOW)
    assert placements.avoid(["n0", "n1", "n2"], NOW + 1) == {"5": frozenset({"n0", "n1", "n2"})}
    assert placements.avoid(["n0"], NOW + 10_000) == {}


def test_two_failed_nodes_are_enough_for_every_job() -> None:
    placements = Placements()
    for key in ("5", "6"):
        for name in ("n0", "n1"):
            placements.failed(placed(key=key, tag=f"{TAG};g={name}:1", wanted_nodes=name), NODES, NOW)
    everywhere = frozenset({"n0", "n1", "n2"})
    nodes = (name for name in ("n0", "n1", "n2"))
    assert placements.avoid(nodes, NOW + 1) == {"5": everywhere, "6": everywhere}


def test_jobs_that_are_gone_are_forgotten() -> None:
    placements = Placements()
    placements.failed(placed(), NODES, NOW)
    placements.overdue([], {}, NOW, 30.0)
    assert placements.avoid(["n0"], NOW + 1) == {}
