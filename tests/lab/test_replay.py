"""A replay's jobs, its figures, and what ``gpushare-lab replay`` says to unusable input."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from gpushare_lab.cli.main import main
from gpushare_lab.experiment.replay_jobs import ReplayJobs, rate_files, replay_jobs
from gpushare_lab.experiment.replay_outcome import JobStay, PolicyRun, cards_won_and_lost, start_s
from gpushare_lab.experiment.replay_run import KNOWLEDGE
from gpushare_lab.experiment.replay_simulation import simulated
from gpushare_lab.peers.trace_jobs import Trace, read_any_trace, read_rates
from gpushare_lab.testbed.testbed import Testbed

from slurm_gpushare.protocol.tokens import TOKEN
from slurm_gpushare.whatif.traces import MeasuredPairs

PAIRS = MeasuredPairs(("a", "b", "c"), np.array([[0.8, 0.6, 0.9], [0.7, np.nan, 0.9], [1.0, 0.9, 0.9]]))


def made(mean_s: float = 20.0, load: float = 1.2, count: int = 40) -> ReplayJobs:
    chance = np.random.default_rng(5)
    trace = Trace(np.sort(chance.uniform(0, 9000, count)), chance.lognormal(7, 2, count), np.ones(count, np.int64))
    return replay_jobs(trace, PAIRS, gpus=4, jobs=None, load=load, seed=1, mean_s=mean_s)


def test_durations_have_the_mean_that_was_asked_for_once_they_are_clipped() -> None:
    jobs = made(20.0)
    assert jobs.work.duration_s.mean() == pytest.approx(20.0)
    assert (jobs.work.duration_s.min(), jobs.work.duration_s.max()) == (3.0, 300.0)
    assert jobs.clipped_short == (jobs.work.duration_s == 3.0).sum()
    assert jobs.clipped_long == (jobs.work.duration_s == 300.0).sum()


def test_arrivals_follow_the_load_or_are_compressed_as_the_durations_are() -> None:
    offered = made(20.0, load=1.2).work
    assert offered.duration_s.sum() / (4 * offered.submit_s[-1]) == pytest.approx(1.2)
    traced, slower = made(20.0, load=0.0), made(40.0, load=0.0)
    ratio = slower.work.submit_s[1:] / traced.work.submit_s[1:]
    assert ratio == pytest.approx(np.full(39, ratio[0]))
    assert ratio[0] > 2.0


def test_time_limits_are_whole_minutes_that_no_job_needs_more_than() -> None:
    jobs = made()
    assert all(60 * limit >= work for limit, work in zip(jobs.limit_min, jobs.work.duration_s, strict=True))


def test_a_profile_is_a_token_and_what_cannot_share_does_not_fit(tmp_path: Path) -> None:
    jobs = made()
    assert len(set(jobs.tokens)) == 3
    assert all(TOKEN.fullmatch(token) for token in jobs.tokens)
    assert jobs.contradictions() == []  # b beside b: their memory alone keeps them apart
    assert rate_files(jobs, tmp_path)["b"].read_text() == "p0 0.700000\np1 0.000000\np2 0.900000\n"


def stay(job: int, submit_s: float, joined_s: float, ended_s: float, placed: bool = False) -> JobStay:
    return JobStay(job, "gpu0", (0,), submit_s, joined_s, ended_s, placed)


def test_figures_of_a_real_run_follow_from_who_was_on_which_card_when() -> None:
    jobs = made(count=3)
    alone_s = jobs.work.duration_s
    stays = (
        stay(0, 0.0, 1.0, 1.0 + 2 * alone_s[0], placed=True),
        stay(1, 0.0, 2.0, 2.0 + alone_s[1], placed=True),
        JobStay(2, "gpu0", (1,), 0.0, 5.0, 5.0 + alone_s[2], False),
    )
    run = PolicyRun("gpushare", stays, True, 99.0).figures(jobs.work)
    assert run["isd_max_pct"] == pytest.approx(100.0)
    assert run["isd_mean_pct"] == pytest.approx(100.0 / 3)
    assert run["shared_fraction"] == pytest.approx(2 / 3)
    assert run["guest_isd_p99_pct"] == pytest.approx(0.0, abs=1e-6)
    busy_s = max(stays[0].ended_s, stays[1].ended_s) - 1.0 + alone_s[2]
    assert run["ps_pct"] == pytest.approx(100 * (1 - busy_s / alone_s.sum()))


def test_a_card_is_won_where_the_helper_placed_the_next_of_those_who_waited() -> None:
    jobs = made(count=3)
    stays = (stay(0, 0.0, 1.0, 10.0), stay(1, 2.0, 11.0, 20.0, placed=True), stay(2, 3.0, 20.5, 30.0))
    run = PolicyRun("gpushare", stays, True, 30.0).figures(jobs.work)
    assert (run["cards_won"], run["cards_lost"]) == (1, 1)
    assert start_s(stays) == pytest.approx(0.75)
    late = (stay(0, 0.0, 1.0, 10.0), stay(1, 12.0, 13.0, 20.0))
    run = PolicyRun("gpushare", late, False, 30.0).figures(jobs.work)
    assert (run["cards_won"], run["cards_lost"]) == (0, 0)
    assert PolicyRun("exclusive", late, False, 30.0).figures(jobs.work)["cards_won"] is None


def wide(widths: Sequence[int], node_gpus: int = 4, load: float = 2.0) -> ReplayJobs:
    """Jobs of 20 s, a second apart, for so many GPUs each."""
    trace = Trace(np.arange(len(widths)) * 1.0, np.full(len(widths), 20.0), np.array(widths, np.int64))
    return replay_jobs(trace, PAIRS, gpus=8, jobs=None, load=load, seed=1, mean_s=20.0, node_gpus=node_gpus)


def test_without_nodes_only_jobs_of_one_gpu_are_taken() -> None:
    jobs = wide([1, 2, 4, 8, 1], node_gpus=0)
    assert jobs.work.num_gpus.tolist() == [1, 1]
    assert (jobs.narrowed, list(jobs.tokens_by_width)) == (0, [1])


def test_jobs_as_wide_as_a_node_or_wider_are_gangs_with_tokens_of_their_own() -> None:
    jobs = wide([1, 2, 4, 8, 1])
    assert jobs.work.num_gpus.tolist() == [1, 2, 4, 4, 1]
    assert jobs.gangs.tolist() == [False, False, True, True, False]
    assert jobs.narrowed == 1
    assert jobs.work.duration_s @ jobs.work.num_gpus / (8 * jobs.work.submit_s[-1]) == pytest.approx(2.0)
    assert jobs.token(2) == jobs.gang_tokens[jobs.work.profile[2]]
    assert jobs.token(1) == jobs.tokens[jobs.work.profile[1]]
    assert not set(jobs.tokens_by_width[1]) & set(jobs.tokens_by_width[4])


def test_a_gangs_time_counts_on_each_of_its_cards() -> None:
    jobs, four = wide([4, 4, 1]), (0, 1, 2, 3)
    stays = (
        JobStay(0, "gpu0", four, 0.0, 0.0, 25.0, True),
        JobStay(1, "gpu0", four, 0.0, 5.0, 30.0, True),
        JobStay(2, "gpu1", (0,), 0.0, 0.0, 20.0, False),
    )
    run = PolicyRun("gpushare", stays, True, 30.0).figures(jobs.work)
    assert run["ps_pct"] == pytest.approx(100 * (1 - (4 * 30 + 20) / (4 * 40 + 20)))
    assert run["shared_fraction"] == pytest.approx(2 / 3)
    assert run["guest_isd_p99_pct"] == pytest.approx(25.0)


def test_a_gang_could_not_start_before_its_last_card_was_empty() -> None:
    stays = (
        JobStay(0, "gpu0", (0,), 0.0, 0.0, 5.0, False),
        JobStay(1, "gpu0", (1,), 0.0, 0.0, 20.0, False),
        JobStay(2, "gpu0", (0, 1), 1.0, 21.0, 30.0, True),
    )
    assert cards_won_and_lost(stays) == (1, 0)
    assert start_s(stays) == pytest.approx(1.0)


def test_gangs_share_in_the_simulation_beside_a_replay() -> None:
    jobs = wide([4] * 6 + [1, 1])
    together, alone = simulated("gpushare", jobs, "oracle", 0.0), simulated("exclusive", jobs, "oracle", 0.0)
    assert together["shared_fraction"] > 0
    assert alone["ps_pct"] == pytest.approx(0.0, abs=1e-9)
    assert together["ps_pct"] > 5


@pytest.mark.parametrize("policy", ["exclusive", "packed", "fcfs", "random", "paper", "gpushare"])
def test_every_policy_of_a_replay_can_be_simulated(policy: str) -> None:
    jobs = made(count=12)
    plain, slow = simulated(policy, jobs, "learned", 0.0), simulated(policy, jobs, "learned", 2.0)
    assert slow["avg_jct_s"] > plain["avg_jct_s"]


@pytest.mark.parametrize("knowledge", KNOWLEDGE)
def test_every_kind_of_knowledge_can_be_simulated(knowledge: str) -> None:
    assert simulated("gpushare", made(count=12), knowledge, 0.5)["avg_jct_s"] > 0


TRACE_FILE = "submit_s,duration_s,num_gpus\n0,20,1\n5,10,1\n7,30,4\n"
PAIRS_FILE = "profile_a,profile_b,gpu_model,rate_a,rate_b\na,a,V100,0.9,0.7\na,b,V100,0.6,1.2\nb,b,V100,,\n"


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    (tmp_path / "trace.csv").write_text(TRACE_FILE)
    (tmp_path / "pairs.csv").write_text(PAIRS_FILE)
    return ["--trace", str(tmp_path / "trace.csv"), "--pairs", str(tmp_path / "pairs.csv")]


def test_the_files_of_simulate_are_taken(files: list[str]) -> None:
    jobs = replay_jobs(
        read_any_trace(Path(files[1])), read_rates(Path(files[3])), gpus=2, jobs=None, load=1.0, seed=0, mean_s=5.0
    )
    assert jobs.work.jobs == 2
    assert len(jobs.demands) == 2


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--gpus", "0"], "--gpus 0: at least one is needed"),
        (["--gpus", "257"], "--gpus 257: a testbed has at most 64 nodes"),
        (["--gpus", "2", "--jobs", "0"], "--jobs 0: at least one is needed"),
        (["--gpus", "2", "--jobs", "9"], "--jobs 9: the trace has only 2 jobs that fit"),
        (["--gpus", "2", "--load", "-1"], "--load -1: must be a number from 0"),
        (["--gpus", "2", "--seed", "-1"], "--seed -1: must be a number from 0"),
        (["--gpus", "2", "--mean-seconds", "1"], "--mean-seconds 1: must be from 3 to 300"),
        (["--gpus", "2", "--policy", "best"], "--policy: no policy 'best'. There are: exclusive, packed"),
        (["--gpus", "2", "--json", "/nowhere/out.json"], "--json /nowhere/out.json: no directory /nowhere"),
        (["--gpus", "2", "--json", "/proc/out.json"], "--json /proc/out.json: cannot be written: "),
        (["--gpus", "2", "--html", "/proc/out.html"], "--html /proc/out.html: cannot be written: "),
        (["--gpus", "2", "--picture", "x.txt"], "--picture x.txt: no kind of picture. Let the name end in .png,"),
    ],
)
def test_unusable_input_is_one_line_before_anything_starts(
    files: list[str],
    more: list[str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(Testbed, "up")
    with pytest.raises(SystemExit) as stop:
        main(["replay", *files, "--dir", str(tmp_path / "bed"), *more])
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert error.count("\n") == 1
    assert said in error
    assert not (tmp_path / "bed").exists()


def test_without_matplotlib_a_picture_is_refused_before_anything_starts(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Testbed, "up")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit) as stop:
        main(["replay", *files, "--gpus", "2", "--dir", str(tmp_path / "bed"), "--picture", str(tmp_path / "x.png")])
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert "x.png: matplotlib is not installed. Install it with: pip install" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "bed").exists()
