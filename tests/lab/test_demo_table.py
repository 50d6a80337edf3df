"""The demo's table: what it says of the rounds, and of what was known."""

from __future__ import annotations

from gpushare_lab.cli.demo_table import shown
from gpushare_lab.paper.jobs import Queue, paper_jobs
from gpushare_lab.paper.rounds import PaperResult, PolicyOutcome, Taught

JOBS = paper_jobs(None, Queue(3))


def result(policy: str, slower: float, together: bool) -> PaperResult:
    """Three jobs one after the other on one card, or all at once, each `slower` times as long as alone."""
    outcomes, now_s = [], 0.0
    for job in JOBS:
        took_s = slower * job.work_s
        outcomes.append(PolicyOutcome(job, "gpu0", 0.0, now_s, now_s + took_s, took_s))
        now_s += 0.0 if together else took_s
    return PaperResult(policy, tuple(outcomes), Taught(((0, 1), (2, 2)), 0 if policy == "exclusive" else 4))


def test_each_row_has_its_sentence_and_nothing_was_known() -> None:
    text = shown([[result("exclusive", 1.0, False), result("fcfs", 1.5, True)]], "rates that were made up")
    assert "exclusive: nobody knew these workloads" in text
    assert "their numbers put 1 in cluster 0, 2 in cluster 2." in text
    assert "It saw 4 rates of one job beside another." in text
    assert "fcfs: they shared without asking who suits whom; 3 of 3 shared" in text
    assert " % sooner on average" in text
    assert "ran 50 % longer (50 % at worst)" in text
    assert "Emulated GPUs, rates that were made up." in text
    assert "Known beforehand: nothing." in text


def test_a_policy_under_which_jobs_end_later_is_said_to_be_later() -> None:
    text = shown([[result("exclusive", 1.0, False), result("random", 1.5, False)]], "")
    assert "jobs were done 50 % later on average" in text


def test_seeds_are_told_as_mean_and_range_with_differences_to_random() -> None:
    rounds = [
        [result("exclusive", 1.0, False), result("random", 1.4, True), result("gpushare", ours, True)]
        for ours in (1.1, 1.3)
    ]
    text = shown(rounds, "")
    row = next(line for line in text.splitlines() if line.startswith("gpushare "))
    assert "20.0 (10.0 to 30.0)" in row
    assert "gpushare against random: PS" in text
    assert "ISD -20.00 points" in text
    assert "The paper's own scheduler against random: PS +1.19 points, ISD -0.37 points." in text
