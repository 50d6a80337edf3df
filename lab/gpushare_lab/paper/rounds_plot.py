"""The experiment as a picture: saving and slow-down by policy, and who was on which GPU when."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gpushare_lab.paper.plots import pyplot
from gpushare_lab.paper.rounds import PaperResult
from slurm_gpushare.protocol.text import CLUSTER_NAMES

COLOURS = ("#4c9f70", "#e0a030", "#c0504d")  # light, middle, heavy


def draw(results: Sequence[PaperResult], path: Path) -> Path:
    """Write the picture; its kind follows from the name (.png, .svg, .pdf)."""
    plt = pyplot()
    rows = 1 + len(results)
    figure, axes = plt.subplots(rows, 1, figsize=(9, 3.2 + 1.3 * len(results)), layout="constrained",
                                   height_ratios=[2.4] + [1.0] * len(results))  # fmt: skip
    _bars(axes[0], results)
    longest_s = max(result.makespan_s for result in results)
    for axis, result in zip(axes[1:], results, strict=True):
        _timeline(axis, result, longest_s)
    axes[-1].set_xlabel("seconds since the first submission")
    kinds = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS]
    words = [f"{name} workload" for name in CLUSTER_NAMES.values()]
    title = "a bar a job; one above the other: they share"
    figure.legend(kinds, words, loc="outside lower center", ncols=3, frameon=False, fontsize=8, title=title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def _bars(axis, results: Sequence[PaperResult]) -> None:  # type: ignore[no-untyped-def]  # matplotlib is optional
    places = range(len(results))
    for shift, values, label, colour in (
        (-0.2, [result.ps_pct for result in results], "packing saving", "#3b6ea5"),
        (0.2, [result.isd_pct for result in results], "mean slow-down of a job", "#b5651d"),
    ):
        bars = axis.bar([place + shift for place in places], values, width=0.38, label=label, color=colour)
        axis.bar_label(bars, fmt="%.1f", fontsize=8)
    axis.set_xticks(list(places), [result.policy for result in results])
    axis.set_ylabel("per cent")
    axis.axhline(0, color="black", linewidth=0.6)
    axis.set_title(f"{len(results[0].jobs)} jobs, {len({job.node for job in results[0].jobs})} GPUs")
    axis.legend(frameon=False, fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def _timeline(axis, result: PaperResult, longest_s: float) -> None:  # type: ignore[no-untyped-def]
    cards = sorted({job.node for job in result.jobs})
    halves: dict[tuple[str, int], float] = {}
    for job in sorted(result.jobs, key=lambda job: job.start_s):
        half = 0 if halves.get((job.node, 0), -1.0) <= job.start_s else 1
        halves[job.node, half] = job.end_s
        axis.barh(
            cards.index(job.node) + 0.21 * (2 * half - 1), job.end_s - job.start_s, left=job.start_s, height=0.4,
            color=COLOURS[job.training.cluster], edgecolor="white", linewidth=0.6,
        )  # fmt: skip
    axis.set_xlim(0, longest_s * 1.02)
    axis.set_yticks(range(len(cards)), [f"GPU {number}" for number in range(len(cards))], fontsize=7)
    axis.set_title(f"{result.policy}: {result.makespan_s:.0f} s", fontsize=9, loc="left")
    axis.spines[["top", "right"]].set_visible(False)
