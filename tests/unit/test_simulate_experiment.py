"""The small experiment that is also run on a real Slurm: every job is a kind of its own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from slurm_gpushare.cli.forecast import experiment, forecasts, furthest_off_pct
from slurm_gpushare.coschedule.settings import PolicySettings
from slurm_gpushare.errors import BadInput
from slurm_gpushare.knowledge.learning import LearnedKnowledge
from slurm_gpushare.simulate.experiment import Experiment, Job, mean_jct_s
from slurm_gpushare.testbed.paper import Outcome, Result
from slurm_gpushare.testbed.paper_jobs import paper_jobs

JOBS = [Job("a", 0, 0.0, 10.0, 600.0), Job("b", 2, 0.0, 10.0, 600.0), Job("c", 1, 0.0, 4.0, 600.0)]
TRIO = Experiment(JOBS, np.full((3, 3), 0.8), 1, LearnedKnowledge(), PolicySettings())


def ends(trio: Experiment, policy: str) -> list[float]:
    return [round(float(end_s), 6) for end_s in trio.run(policy).end_s]


def test_alone_they_take_turns_and_slurm_takes_its_time() -> None:
    assert ends(TRIO, "exclusive") == [10, 20, 24]
    assert ends(replace(TRIO, start_s=0.5), "exclusive") == [10.5, 21, 25.5]


def test_fcfs_shares_with_the_next_and_the_paper_with_the_complement() -> None:
    assert ends(TRIO, "fcfs") == [12.5, 12.5, 16.5]
    jobs = [JOBS[0], JOBS[2], JOBS[1]]  # light, middle, heavy: the light one takes the heavy one
    assert ends(replace(TRIO, jobs=jobs), "paper") == [12.5, 16.5, 12.5]


def test_a_job_whose_lease_has_ended_holds_its_card_whole() -> None:
    late = replace(TRIO, lease_s=12.0, rate=np.where(np.eye(3)[[1, 0, 2]] > 0, np.nan, 0.8))  # a and b cannot share
    # c joins a for 5 s; b starts at 11, within its lease, and after it nobody waits.
    assert ends(late, "fcfs") == [11, 21, 5]
    jobs = [*JOBS, Job("d", 0, 0.0, 4.0, 600.0)]
    four = replace(late, jobs=jobs, lease_s=10.0, rate=np.where(np.eye(4)[[1, 0, 3, 2]] > 0, np.nan, 0.8))
    # d joins a at 5 for 5 s; b is alone from 12 on.
    assert ends(four, "fcfs") == [12, 22, 5, 10]
    five = replace(four, jobs=[*jobs[:3], Job("d", 0, 11.0, 4.0, 600.0)])
    assert ends(five, "fcfs") == [11, 21, 5, 25]  # d finds b on a whole card
    assert ends(replace(five, lease_s=np.inf), "fcfs") == [11, 22, 5, 16]


def test_the_papers_jobs_gain_by_sharing() -> None:
    jobs = paper_jobs(None, 24, 9.0)
    exclusive, ours = (experiment(jobs, 4, 0.5).run(policy) for policy in ("exclusive", "gpushare"))
    assert mean_jct_s(ours) < mean_jct_s(exclusive)


def test_unknown_policy() -> None:
    with pytest.raises(BadInput, match="no policy 'srpt'"):
        TRIO.run("srpt")


def test_the_forecast_is_compared_with_what_was_run() -> None:
    jobs = paper_jobs(None, 3, 9.0)
    outcomes = tuple(Outcome(job, f"gpu{at}", 0.0, 0.0, job.work_s, job.work_s) for at, job in enumerate(jobs))
    results = [Result("exclusive", outcomes)]
    assert furthest_off_pct(results, forecasts(jobs, 3, results)) == (pytest.approx(0.0), pytest.approx(0.0))
    late = [Result("exclusive", tuple(replace(job, end_s=2.0 * job.end_s) for job in outcomes))]
    assert furthest_off_pct(late, forecasts(jobs, 3, late)) == (pytest.approx(50.0), pytest.approx(50.0))
