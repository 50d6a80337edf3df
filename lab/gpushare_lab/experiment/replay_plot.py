"""A replay as a picture: who was on which card when, and what each job's completion cost it in slow-down."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gpushare_lab.experiment.replay_jobs import ReplayJobs
from gpushare_lab.experiment.replay_outcome import JobStay, PolicyRun, by_card
from gpushare_lab.paper.plots import pyplot

COLOURS = ("#4c9f70", "#e0a030", "#c0504d")  # light, middle, heavy neighbours


def draw_replay(runs: Sequence[PolicyRun], jobs: ReplayJobs, path: Path) -> Path:
    """Write the picture; its kind follows from the name (.png, .svg, .pdf)."""
    plt = pyplot()
    figure, axes = plt.subplots(
        len(runs), 2, figsize=(14, 1.0 + 3.6 * len(runs)), layout="constrained", width_ratios=[2.6, 1.0], squeeze=False
    )
    longest_s = max(stay.ended_s for run in runs for stay in run.stays)
    for (timeline, scatter), run in zip(axes, runs, strict=True):
        _timeline(timeline, run, jobs, longest_s)
        _scatter(scatter, run, jobs)
    axes[-1][0].set_xlabel("seconds since the first submission")
    axes[-1][1].set_xlabel("completion time of a job (s)")
    figure.suptitle(f"{jobs.work.jobs} jobs on {jobs.work.gpus} GPUs; colour: how hard a job presses on its neighbour")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _timeline(axis, run: PolicyRun, jobs: ReplayJobs, longest_s: float) -> None:  # type: ignore[no-untyped-def]  # matplotlib is optional
    rows = by_card(run.stays)
    for place, row in enumerate(rows.values()):
        free_s = [0.0, 0.0]
        for stay in row:
            half = 0 if free_s[0] <= stay.joined_s else 1
            free_s[half] = stay.ended_s
            axis.barh(
                place + 0.22 * (2 * half - 1), stay.ended_s - stay.joined_s, left=stay.joined_s, height=0.42,
                color=_colour(stay, jobs), edgecolor="white", linewidth=0.3,
            )  # fmt: skip
    axis.set_xlim(0, longest_s * 1.01)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.set_yticks(range(len(rows)), [f"{node}:{gpu}" for node, gpu in rows], fontsize=5)
    axis.set_title(run.policy + ("" if run.complete else " (interrupted)"), loc="left", fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)


def _scatter(axis, run: PolicyRun, jobs: ReplayJobs) -> None:  # type: ignore[no-untyped-def]
    jct_s = [stay.ended_s - stay.submit_s for stay in run.stays]
    isd_pct = [
        100 * max(0.0, (stay.ended_s - stay.joined_s) / jobs.work.duration_s[stay.job] - 1) for stay in run.stays
    ]
    axis.scatter(jct_s, isd_pct, s=9, c=[_colour(stay, jobs) for stay in run.stays], alpha=0.8)
    axis.set_ylim(-2, max(50.0, 1.05 * max(isd_pct)))
    axis.set_ylabel("slow-down (%)")
    axis.spines[["top", "right"]].set_visible(False)


def _colour(stay: JobStay, jobs: ReplayJobs) -> str:
    return COLOURS[jobs.clusters[int(jobs.work.profile[stay.job])]]
