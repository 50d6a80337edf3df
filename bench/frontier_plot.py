"""Completion or saving, as a picture: a point a policy, GPU time saved against average completion time.

``python -m bench.frontier_plot docs/evaluation.md docs/frontier.png`` draws the table of objectives on that page.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

KEPT_PCT = 60.0
"""One job in a hundred may pass its promise (50 %) by exploring, not by more than this."""
OURS, OTHERS = "#c0392b", "#7f8c8d"


class Point(NamedTuple):
    """One row of the table."""

    name: str
    jct: float
    saved_pct: float
    slowed_pct: float
    """By at least so much one job in a hundred is slowed."""


def read_table(text: str) -> list[Point]:
    """The rows of the table whose last column says how much one job in a hundred is slowed."""
    head = re.search(r"^\| +\| JCT \|.*\| 1 in 100 slowed by \|$", text, re.MULTILINE)
    if head is None:
        raise SystemExit("no table with the column '1 in 100 slowed by'")
    points = []
    for line in text[head.end() :].strip().splitlines()[1:]:
        if not line.startswith("|"):
            break
        name, jct, _, saved, *_, slowed = (cell.strip(" `%") for cell in line.strip("| ").split("|"))
        points.append(Point(name.replace("`", ""), float(jct), float(saved), float(slowed)))
    return points


def draw(points: list[Point], out: Path) -> None:
    """Those that keep promises but for exploration in red. Words go to the side on which there is room."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed (pip install slurm-gpushare[plots])")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(8, 5))
    middle = (min(point.jct for point in points) + max(point.jct for point in points)) / 2
    for point in points:
        left = point.jct > middle
        panel.scatter(
            point.jct, point.saved_pct, s=80, color=OURS if point.slowed_pct <= KEPT_PCT else OTHERS, zorder=3
        )
        panel.annotate(
            f"{point.name}\n1 in 100 slowed by {point.slowed_pct:.0f} % or more", (point.jct, point.saved_pct),
            (-9 if left else 9, 7), textcoords="offset points", ha="right" if left else "left", fontsize=9.5,
        )  # fmt: skip
    panel.set_xlabel("average completion time as a part of the plain queue's (fifo): further left is sooner")
    panel.set_ylabel("GPU time saved (PS %)")
    panel.set_title("Load 1.2: completion or saving. Red: promises kept, but for 1 guest in 100 (exploration)")
    panel.margins(x=0.12, y=0.16)
    panel.grid(True, alpha=0.3)
    figure.tight_layout()
    figure.savefig(out, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    page, picture = sys.argv[1:]
    draw(read_table(Path(page).read_text()), Path(picture))
