"""What holds of every plan, whatever the cluster and the queue look like."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from world import NEW, NOW, TOKEN_A, TOKEN_B, TOKEN_C, Flat, card, decide, job, node, occupant, pending, running

from slurm_gpushare.helper.changes import place
from slurm_gpushare.helper.observe import View, observe
from slurm_gpushare.helper.occupancy import GpuAddress
from slurm_gpushare.helper.plan import plan
from slurm_gpushare.helper.queue_facts import QueueFacts, TokenFacts
from slurm_gpushare.helper.snapshot import Gpu, How, NodeRoom, Occupant, PendingJob, Plan
from slurm_gpushare.protocol.policy import PolicySettings
from slurm_gpushare.protocol.settings import parse_config
from slurm_gpushare.protocol.tag import parse_tag
from slurm_gpushare.slurm.nodes import Node
from slurm_gpushare.slurm.queue import Job

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
    return occupant(
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
    there = {(gpu.node, gpu.index): [occupant.workload.mem_used_mib or 0 for occupant in gpu.occupants] for gpu in gpus}
    for placement in got.placements:
        there[placement.place.node, placement.place.first].append(jobs[placement.key].workload.mem_used_mib or 0)
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
    for room_there in nodes:
        here = [jobs[placement.key] for placement in got.placements if placement.place.node == room_there.name]
        assert sum(job.cpus for job in here) <= room_there.cpus_free
        assert sum(job.node_mem_mib for job in here) <= room_there.mem_free_mib


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
        assert job.workload.token is not None, "only who opted in is placed"
        if placement.how in JOINS and isd_pct is not None and not placement.reasons.explored:
            cap_pct = SETTINGS.guest_cap_pct if placement.how is not How.SUCCEEDS else SETTINGS.resident_budget_pct
            own_pct = job.workload.max_isd_pct
            assert isd_pct <= min(cap_pct, own_pct if own_pct is not None else cap_pct) + 1e-6
        if placement.reasons.resident_isd_pct is not None and placement.reasons.resident_budget_pct is not None:
            assert placement.reasons.resident_isd_pct <= placement.reasons.resident_budget_pct + 1e-6


def after(
    scene: tuple[list[Gpu], list[NodeRoom], list[PendingJob]], got: Plan, start_s: float | None
) -> tuple[list[Gpu], list[NodeRoom], list[PendingJob]]:
    """The cluster once a plan has happened; its jobs started at `start_s`, or (None) Slurm has yet to start them."""
    gpus, nodes, queue = scene
    jobs = {job.key: job for job in queue}
    placed = {placement.key: placement for placement in got.placements}
    later = [
        replace(gpu, occupants=(*gpu.occupants, *(
            replace(occupant(key), workload=jobs[key].workload, start_s=start_s, joined=place.how in JOINS)
            for key, place in placed.items() if (place.place.node, place.place.first) == (gpu.node, gpu.index)
        )))
        for gpu in gpus
    ]  # fmt: skip
    used = {node.name: [jobs[key] for key, place in placed.items() if place.place.node == node.name] for node in nodes}
    rooms = [
        replace(
            node,
            cpus_free=node.cpus_free - sum(job.cpus for job in used[node.name]),
            mem_free_mib=node.mem_free_mib - sum(job.node_mem_mib for job in used[node.name]),
        )
        for node in nodes
    ]
    return later, rooms, [job for job in queue if job.key not in placed]


@settings(max_examples=80)
@given(clusters(), st.sampled_from([0.4, 0.8, 0.97]), st.sampled_from([NOW, None]))
def test_planning_on_its_own_results_moves_nobody_and_comes_to_an_end(
    scene: tuple[list[Gpu], list[NodeRoom], list[PendingJob]], rate: float, start_s: float | None
) -> None:
    """Jobs that were placed may be joined in the next plan, so that it may place others; but not for ever."""
    gpus, nodes, queue = scene
    jobs, where = {job.key: job for job in queue}, {}
    for _ in range(len(queue) + 1):
        got = decide(gpus, queue, nodes, Flat(rate))
        assert_room_for_all(gpus, nodes, got, jobs)
        assert not where.keys() & {placement.key for placement in got.placements}, "nobody is placed again"
        where |= {placement.key: (placement.place.node, placement.place.first) for placement in got.placements}
        gpus, nodes, queue = after((gpus, nodes, queue), got, start_s)
        there = {occupant.key: (gpu.node, gpu.index) for gpu in gpus for occupant in gpu.occupants}
        assert {key: there[key] for key in where} == where, "nor moved"
        if not got.placements:
            return
    raise AssertionError("each plan places somebody else")


@st.composite
def queues(draw: st.DrawFn) -> tuple[list[Job], list[Node]]:
    """Jobs as squeue shows them, on nodes as sinfo does: some run and share, some wait with a lease."""
    nodes = [node(f"n{n}", cpus=draw(st.sampled_from([4, 64]))) for n in range(draw(st.integers(1, 3)))]
    jobs = []
    for number in range(draw(st.integers(1, 8))):
        tag = f"GS1:c=1;t={draw(st.sampled_from([TOKEN_A, TOKEN_B, TOKEN_C]))};o=gpu:1"
        priority, limit_s = draw(st.integers(1, 50)), draw(st.sampled_from([300, 3600, 36_000]))
        changes = {"priority": priority, "limit_s": limit_s, "cpus": draw(st.sampled_from([1, 4]))}
        if number < len(nodes) and draw(st.booleans()):
            there = f"n{number}"
            gres = f"gres/shard:v100_{number % 2}:1"
            jobs.append(running(str(number + 1), there, gres, tag=f"{tag};g={there}:{number % 2}", **changes))
            nodes[number] = node(there, used=f"shard:v100_{number % 2}:1(1/2,0/2)", cpus=64, cpus_alloc=4)
        else:
            jobs.append(job(str(number + 1), tag=f"{tag};l=1", per_node="gres/shard:2", **changes))
    return jobs, nodes


def written(view: View, got: Plan) -> list[Job]:
    """The queue as Slurm shows it once the plan's changes are in it and nobody has started yet."""
    found = dict(view.jobs)
    for item in got.placements:
        where = view.nodes[item.place.node]
        total = where.shards_per_gpu[item.place.first]
        shards = total if item.how is How.UNSHARED else total // 2
        card_there, guest = GpuAddress(item.place.node, item.place.first), item.how in (How.BESIDE, How.TOGETHER)
        change = place(found[item.key], card_there, where.gpus[item.place.first], shards, NEW, NOW, guest,
                       item.how is How.SUCCEEDS)  # fmt: skip
        assert change is not None
        fields = change.fields
        found[item.key] = replace(
            found[item.key], per_node=f"gres/{fields['Gres']}", wanted_nodes=fields["ReqNodeList"],
            admin_comment=fields["AdminComment"], tag=parse_tag(fields["AdminComment"]),
            nice=int(fields.get("Nice", found[item.key].nice)),
        )  # fmt: skip
    return list(found.values())


@settings(max_examples=80)
@given(queues(), st.sampled_from([0.5, 0.8, 0.97]))
def test_what_a_plan_wrote_into_slurm_the_next_one_leaves_where_it_is(
    scene: tuple[list[Job], list[Node]], rate: float
) -> None:
    """From squeue's rows to the changes and back: a tick that comes before Slurm has started anybody."""
    jobs, nodes = scene
    known = {token: TokenFacts(1, 2000, 1000.0, None, 3) for token in (TOKEN_A, TOKEN_B, TOKEN_C)}
    facts = QueueFacts(workloads={"V100": known}, card_mem_mib={item.name: 16_000 for item in nodes})
    config = parse_config("Partitions=gpu\nGpusPerNode=2\n")
    first = observe(jobs, nodes, config, facts, NOW)
    got = plan(first.snapshot, Flat(rate), SETTINGS)
    second = observe(written(first, got), nodes, config, facts, NOW)
    again = plan(second.snapshot, Flat(rate), SETTINGS)
    placed = {item.key: (item.place.node, item.place.first) for item in got.placements}
    there = {occupant.key: (gpu.node, gpu.index) for gpu in second.snapshot.gpus for occupant in gpu.occupants}
    assert {key: there.get(key) for key in placed} == placed, "they are expected where they were sent"
    assert not placed.keys() & {item.key for item in (*again.placements, *again.left)}, "and not looked at again"
    everybody = {**there, **{item.key: (item.place.node, item.place.first) for item in again.placements}}
    assert max(Counter(everybody.values()).values(), default=0) <= 2, "nor given a third neighbour"
