"""What holds of every plan, whatever the cluster and the queue look like."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from plan_scenes import NOW, Flat, card, decide, pending, running

from slurm_gpushare.coschedule.policy_settings import PolicySettings
from slurm_gpushare.coschedule.view.snapshot import Gpu, How, NodeRoom, Occupant, PendingJob, Plan

SETTINGS = PolicySettings()
MEM_MIB = 16_000
JOINS = (How.BESIDE, How.TOGETHER, How.SUCCEEDS)

SECONDS = st.sampled_from([60.0, 300.0, 900.0, 5000.0, 40_000.0])
MEMORY = st.sampled_from([500, 4000, 7900, 12_000, 15_900])
TOKENS = st.sampled_from(["gs-a", "gs-b", "gs-c", None])


@st.composite
def residents(draw: st.DrawFn, key: str) -> Occupant:
    expected_s = draw(SECONDS)
    begun_s = draw(st.sampled_from([0.0, 50.0, 4000.0]))
    limit_s = expected_s * draw(st.sampled_from([1.1, 3.0]))
    return running(
        key, token=draw(TOKENS), mem_used_mib=draw(MEMORY), start_s=NOW - begun_s, expected_s=expected_s,
        limit_s=max(limit_s, begun_s + 60), user=draw(st.sampled_from(["ann", "bob"])),
    )  # fmt: skip


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[Gpu], list[NodeRoom], list[PendingJob]]:
    gpus, nodes = [], []
    for n in range(draw(st.integers(1, 3))):
        nodes.append(NodeRoom(f"n{n}", draw(st.integers(0, 16)), draw(st.sampled_from([0, 3000, 100_000]))))
        for index in range(2):
            there = [draw(residents(f"r{n}{index}{i}")) for i in range(draw(st.integers(0, 2)))]
            gpus.append(card(*there, node=f"n{n}", index=index))
    jobs = []
    for i in range(draw(st.integers(0, 6))):
        expected_s = draw(SECONDS)
        jobs.append(
            pending(
                f"p{i}",
                token=draw(TOKENS),
                mem_used_mib=draw(MEMORY),
                expected_s=expected_s,
                limit_s=2 * expected_s,
                cpus=draw(st.sampled_from([1, 4, 8])),
                node_mem_mib=draw(st.sampled_from([100, 2000])),
                max_isd_pct=draw(st.sampled_from([None, 0.0, 10.0])),
                user=draw(st.sampled_from(["ann", "bob"])),
            )
        )
    return gpus, nodes, jobs


def occupied(gpus: list[Gpu], got: Plan, jobs: dict[str, PendingJob]) -> dict[tuple[str, int], list[int]]:
    """The memory of everybody on each card once the plan has happened."""
    there = {(gpu.node, gpu.index): [occupant.mem_used_mib or 0 for occupant in gpu.occupants] for gpu in gpus}
    for placement in got.placements:
        there[placement.node, placement.index].append(jobs[placement.key].mem_used_mib or 0)
    return there


def assert_room_for_all(gpus: list[Gpu], nodes: list[NodeRoom], got: Plan, jobs: dict[str, PendingJob]) -> None:
    """Nobody has two places, no card gets a third job or more memory than it has, no node more than is free."""
    keys = [placement.key for placement in got.placements]
    assert len(keys) == len(set(keys)), "a job has one place"
    before = {(gpu.node, gpu.index): len(gpu.occupants) for gpu in gpus}
    room = MEM_MIB * (1 - SETTINGS.memory_headroom_pct / 100)
    for where, memory in occupied(gpus, got, jobs).items():
        if len(memory) > before[where]:
            assert len(memory) <= 2, "never more than two on a card"
            assert len(memory) == 1 or sum(memory) <= room, "both fit, with headroom"
    for node in nodes:
        here = [jobs[placement.key] for placement in got.placements if placement.node == node.name]
        assert sum(job.cpus for job in here) <= node.cpus_free
        assert sum(job.node_mem_mib for job in here) <= node.mem_free_mib


@settings(max_examples=150)
@given(clusters(), st.sampled_from([0.4, 0.8, 0.97]))
def test_every_plan_keeps_its_bounds(scene: tuple[list[Gpu], list[NodeRoom], list[PendingJob]], rate: float) -> None:
    gpus, nodes, queue = scene
    jobs = {job.key: job for job in queue}
    got = decide(gpus, queue, nodes, Flat(rate))
    assert got == decide(gpus, queue, nodes, Flat(rate)), "the same view gives the same plan"
    assert_room_for_all(gpus, nodes, got, jobs)
    for placement in got.placements:
        job, isd_pct = jobs[placement.key], placement.reasons.guest_isd_pct
        assert job.token is not None, "only who opted in is placed"
        if placement.how in JOINS and isd_pct is not None and not placement.reasons.explored:
            cap_pct = SETTINGS.guest_cap_pct if placement.how is not How.SUCCEEDS else SETTINGS.resident_budget_pct
            assert isd_pct <= min(cap_pct, job.max_isd_pct if job.max_isd_pct is not None else cap_pct) + 1e-6
        if placement.reasons.resident_isd_pct is not None and placement.reasons.resident_budget_pct is not None:
            assert placement.reasons.resident_isd_pct <= placement.reasons.resident_budget_pct + 1e-6


@settings(max_examples=80)
@given(clusters())
def test_planning_on_its_own_result_keeps_its_bounds(
    scene: tuple[list[Gpu], list[NodeRoom], list[PendingJob]],
) -> None:
    """Jobs that were placed run, and may be joined now; those that were left are looked at again."""
    gpus, nodes, queue = scene
    jobs = {job.key: job for job in queue}
    first = decide(gpus, queue, nodes, Flat(0.8))
    placed = {placement.key: placement for placement in first.placements}
    later = [
        replace(gpu, occupants=(*gpu.occupants, *(
            running(key, token=jobs[key].token, mem_used_mib=jobs[key].mem_used_mib, start_s=NOW,
                    expected_s=jobs[key].expected_s, limit_s=jobs[key].limit_s, user=jobs[key].user)
            for key, place in placed.items() if (place.node, place.index) == (gpu.node, gpu.index)
        )))
        for gpu in gpus
    ]  # fmt: skip
    used = {node.name: [jobs[key] for key, place in placed.items() if place.node == node.name] for node in nodes}
    rooms = [
        replace(
            node,
            cpus_free=node.cpus_free - sum(job.cpus for job in used[node.name]),
            mem_free_mib=node.mem_free_mib - sum(job.node_mem_mib for job in used[node.name]),
        )
        for node in nodes
    ]
    again = decide(later, [job for job in queue if job.key not in placed], rooms, Flat(0.8))
    assert_room_for_all(later, rooms, again, jobs)
