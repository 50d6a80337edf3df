"""What the simulated helper expects of durations, as the real one does: from limits and a token's earlier runs."""

from __future__ import annotations

import numpy as np
import pytest
from gpushare_lab.peers.trace_jobs import Trace, make_workload

from slurm_gpushare.whatif.known_durations import Durations
from slurm_gpushare.whatif.traces import MeasuredPairs, SimulatedJobs


@pytest.fixture
def work() -> SimulatedJobs:
    """Jobs of one token, the third over at once."""
    trace = Trace(np.arange(4.0), np.array([100.0, 120.0, 10.0, 80.0]), np.ones(4, np.int64))
    return make_workload(trace, MeasuredPairs(("a",), np.ones((1, 1))), gpus=1, jobs=None, load=0.0, seed=0)


def test_before_the_first_run_only_the_limit_is_known(work: SimulatedJobs) -> None:
    durations = Durations(work, "history")
    assert ((durations.expected_s > 0.4 * durations.limit_s) & (durations.expected_s < 0.5 * durations.limit_s)).all()


def test_the_first_run_moves_what_to_expect_of_those_that_wait_already(work: SimulatedJobs) -> None:
    durations = Durations(work, "history")
    before_s = durations.expected_s.copy()
    durations.ended(0, shared=False)
    nearer = np.abs(np.log(durations.expected_s / 100.0)) < np.abs(np.log(before_s / 100.0))
    assert nearer[1:].all()


def test_runs_that_agree_count_more_than_the_limit(work: SimulatedJobs) -> None:
    durations = Durations(work, "history")
    for _ in range(4):
        durations.ended(0, shared=False)
        durations.ended(1, shared=False)
    assert durations.expected_s[3] == pytest.approx(110.0, rel=0.15)


@pytest.mark.parametrize(("job", "shared"), [(1, True), (2, False)], ids=["beside somebody", "over at once"])
def test_some_runs_say_nothing(work: SimulatedJobs, job: int, shared: bool) -> None:
    durations = Durations(work, "history")
    durations.ended(0, shared=False)
    before_s = durations.expected_s.copy()
    durations.ended(job, shared)
    assert durations.expected_s.tolist() == before_s.tolist()


def test_known_durations_stay_the_truth(work: SimulatedJobs) -> None:
    durations = Durations(work, "known")
    durations.ended(0, shared=False)
    assert durations.expected_s.tolist() == work.duration_s.tolist()
