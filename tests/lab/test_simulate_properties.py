"""What holds for every policy on every workload, and agreement with the slow simulator."""

from __future__ import annotations

import numpy as np
import pytest
import slow_simulator
from gpushare_lab.peers.registry import EXCLUSIVE, NAMES, PREEMPTIVE, make_policy
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_gpushare.whatif.our_policy import Gpushare, Options
from slurm_gpushare.whatif.simulate import run
from slurm_gpushare.whatif.traces import MeasuredPairs, SimulatedJobs


@st.composite
def workloads(draw: st.DrawFn, multi_gpu: bool = False) -> SimulatedJobs:
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    jobs, gpus, kinds = draw(st.integers(1, 25)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    rate = random.uniform(0.2, 1.0, (kinds, kinds))
    rate[(hole := random.random((kinds, kinds)) < 0.1) | hole.T] = np.nan
    return SimulatedJobs(
        gpus=gpus,
        submit_s=np.sort(random.uniform(0, 200, jobs).round(3)),
        duration_s=np.exp(random.normal(3, 1.5, jobs)).round(3) + 0.001,
        num_gpus=random.integers(1, gpus + 1, jobs) if multi_gpu else np.ones(jobs, np.int64),
        profile=random.integers(kinds, size=jobs),
        pairs=MeasuredPairs(tuple(f"p{i}" for i in range(kinds)), rate),
        seed=int(random.integers(1000)),
    )


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=12)
@given(work=workloads())
def test_invariants(name: str, work: SimulatedJobs) -> None:
    policy, _ = make_policy(name, work, Options())
    world = run(work, policy)
    assert np.isfinite(world.end_s).all(), "every job ends"
    assert (world.start_s >= work.submit_s - 1e-6).all(), "nothing starts before it is submitted"
    assert np.abs(world.remaining_s).max() < 1e-6 * work.duration_s.max(), "work is done in full"
    assert (world.ran_s >= work.duration_s - 1e-6).all(), "nobody runs faster than alone"
    if name in EXCLUSIVE:
        assert not world.shared.any()
        assert world.busy_s == pytest.approx(work.duration_s.sum())
    else:
        slowest = np.nanmin(work.pairs.rate) if np.isfinite(work.pairs.rate).any() else 1.0
        assert (world.ran_s <= work.duration_s / slowest + 1e-6).all(), "nobody runs slower than its worst pair"
    if name not in PREEMPTIVE:
        np.testing.assert_allclose(world.end_s - world.start_s, world.ran_s, atol=1e-6)
        alive = (world.start_s[:, None] <= world.start_s) & (world.end_s[:, None] > world.start_s + 1e-6)
        assert alive.sum(axis=0).max() <= 2 * work.gpus, "at most two a GPU"


@settings(max_examples=25)
@given(work=workloads())
def test_gpushare_keeps_both_promises_when_rates_and_durations_are_known(work: SimulatedJobs) -> None:
    policy, _ = make_policy("gpushare", work, Options(knowledge="oracle"))
    world = run(work, policy)
    isd_pct = (world.ran_s / work.duration_s - 1) * 100
    assert isinstance(policy, Gpushare)
    assert isd_pct[~world.guest | policy.successor].max(initial=0.0) <= 25 + 1e-6
    assert isd_pct[world.guest].max(initial=0.0) <= 50 + 1e-6


@pytest.mark.parametrize("name", ["fifo", "sjf", "fcfs-share", "gpushare", "srpt", "packed-share"])
@settings(max_examples=10)
@given(work=workloads(multi_gpu=True))
def test_jobs_of_several_gpus_run_to_their_end_too(name: str, work: SimulatedJobs) -> None:
    policy, _ = make_policy(name, work, Options())
    world = run(work, policy)
    assert np.isfinite(world.end_s).all()
    gang = work.num_gpus > 1
    np.testing.assert_allclose(world.ran_s[gang], work.duration_s[gang], atol=1e-6)


@pytest.mark.parametrize("name", ["fifo", "sjf", "fcfs-share", "packed-share", "sjf-ffs", "sjf-bsbf", "gavel-packing"])
@settings(max_examples=25)
@given(work=workloads())
def test_the_slow_simulator_agrees(name: str, work: SimulatedJobs) -> None:
    policy, _ = make_policy(name, work, Options())
    fast = run(work, policy)
    rows = zip(work.submit_s.tolist(), work.duration_s.tolist(), work.profile.tolist(), strict=True)
    jobs = [slow_simulator.Job(i, submit, duration, profile) for i, (submit, duration, profile) in enumerate(rows)]
    slow_simulator.simulate(name, work.gpus, jobs, work.pairs.rate.tolist())
    np.testing.assert_allclose(fast.start_s, [job.start_s for job in jobs], atol=1e-4)
    np.testing.assert_allclose(fast.end_s, [job.end_s for job in jobs], atol=1e-4)
