"""Jobs of several GPUs on nodes: where they fit, and two that are as wide as a node on its cards together."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from gpushare_lab.peers.registry import make_policy
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_gpushare.whatif.our_policy import Options
from slurm_gpushare.whatif.simulate import run
from slurm_gpushare.whatif.traces import MeasuredPairs, SimulatedJobs
from slurm_gpushare.whatif.world import NOBODY, World, metrics

Job = tuple[float, float, int]
"""When it is submitted, how long it runs alone, and its GPUs."""
ORACLE = Options(knowledge="oracle", share_gangs=True)


def workload(*jobs: Job, nodes: int = 1, per_node: int = 4, rate: float = 0.9) -> SimulatedJobs:
    submit_s, duration_s, num_gpus = zip(*jobs, strict=True)
    pairs = MeasuredPairs(("p",), np.array([[rate]]))
    gpus, profile = np.array(num_gpus, np.int64), np.zeros(len(jobs), np.int64)
    return SimulatedJobs(
        nodes * per_node, np.array(submit_s, float), np.array(duration_s, float), gpus, profile, pairs, 0, per_node
    )


def simulate(work: SimulatedJobs, name: str = "gpushare", options: Options = ORACLE) -> World:
    policy, _ = make_policy(name, work, options)
    return run(work, policy)


def test_two_jobs_as_wide_as_a_node_share_it() -> None:
    world = simulate(workload((0, 1000, 4), (10, 100, 4)))
    assert world.start_s[1] == 10
    assert world.end_s[1] == pytest.approx(10 + 100 / 0.9)
    assert world.end_s[0] == pytest.approx(1000 + 0.1 * 100 / 0.9)
    assert world.busy_s == pytest.approx(4 * world.end_s[0])
    assert metrics(world)["ps_pct"] == pytest.approx(100 * (1 - world.end_s[0] / 1100))


def test_who_stays_has_the_node_and_the_next_joins() -> None:
    world = simulate(workload((0, 1000, 4), (10, 100, 4), (20, 100, 4)))
    assert world.start_s[2] == pytest.approx(world.end_s[1])


def test_without_gangs_the_second_waits() -> None:
    world = simulate(workload((0, 1000, 4), (10, 100, 4)), options=Options(knowledge="oracle"))
    assert world.start_s[1] == 1000


def test_no_promise_is_broken_for_a_gang() -> None:
    assert simulate(workload((0, 1000, 4), (10, 100, 4), rate=0.6)).start_s[1] == 1000


@pytest.mark.parametrize("widths", [(4, 1), (1, 4), (4, 2), (2, 4)])
def test_only_equal_gangs_share(widths: tuple[int, int]) -> None:
    assert simulate(workload((0, 1000, widths[0]), (10, 100, widths[1]))).start_s[1] == 1000


def test_a_job_of_several_gpus_has_them_on_one_node() -> None:
    world = simulate(workload((0, 1000, 3), (0, 500, 2), (1, 10, 2), nodes=2, per_node=4), "fifo")
    assert world.start_s[2] == 1, "two cards of the second node are free"
    world = simulate(workload((0, 1000, 3), (0, 500, 3), (1, 10, 2), nodes=2, per_node=4), "fifo")
    assert world.start_s[2] == 500, "one card of each node is free"


def test_single_gpus_leave_nodes_empty() -> None:
    work = workload((0, 1000, 1), (0, 1000, 1), (0, 1000, 1), (1, 10, 4), nodes=2)
    assert simulate(work, "fifo").start_s[3] == 1


def test_behind_a_job_that_waits_for_a_node_only_those_start_that_end_in_time_or_elsewhere() -> None:
    first = (0, 100, 3), (1, 50, 4)
    assert simulate(workload(*first, (2, 98, 1)), "fifo").start_s[2] == 2
    assert simulate(workload(*first, (2, 99, 1)), "fifo").start_s[2] == pytest.approx(150)
    assert simulate(workload(*first, (0, 200, 3), (2, 99, 1), nodes=2), "fifo").start_s[3] == 2


@st.composite
def workloads(draw: st.DrawFn) -> SimulatedJobs:
    random = np.random.default_rng(draw(st.integers(0, 10_000)))
    jobs, nodes, kinds = draw(st.integers(1, 40)), draw(st.integers(1, 3)), 3
    return SimulatedJobs(
        gpus=4 * nodes,
        submit_s=np.sort(random.uniform(0, 300, jobs)),
        duration_s=np.exp(random.normal(4, 1.2, jobs)),
        num_gpus=random.choice([1, 2, 4, 4], jobs),
        profile=random.integers(kinds, size=jobs),
        pairs=MeasuredPairs(("a", "b", "c"), random.uniform(0.4, 1.0, (kinds, kinds))),
        seed=0,
        gpus_per_node=4,
    )


@settings(max_examples=25, deadline=None)
@given(work=workloads(), saving=st.booleans())
def test_work_is_conserved_and_both_promises_hold(work: SimulatedJobs, saving: bool) -> None:
    aim = replace(ORACLE.settings, objective="saving" if saving else "completion")
    options = replace(ORACLE, settings=aim)
    policy, _ = make_policy("gpushare", work, options)
    world = run(work, policy)
    assert np.isfinite(world.end_s).all()
    np.testing.assert_allclose(world.remaining_s, 0.0, atol=1e-6)
    assert (world.first == NOBODY).all()
    assert not world.gang
    assert world.busy_s <= np.sum(world.ran_s * work.num_gpus) + 1e-6
    isd_pct = (world.ran_s / work.duration_s - 1) * 100
    resident = ~world.guest | policy.successor  # type: ignore[attr-defined]
    assert isd_pct[resident].max(initial=0.0) <= 25 + 1e-6
    assert isd_pct.max() <= 50 + 1e-6
