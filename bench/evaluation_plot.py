"""The evaluation's table as a picture: a line a policy, completion time on the left, slow-down on the right.

``python -m bench.evaluation_plot docs/evaluation.md docs/evaluation.png`` draws the table of policies on that page.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

Cells = Mapping[float, tuple[float, float]]
"""By load: average completion time as a part of fifo's, mean slow-down in per cent."""
OURS, WHOLE_GPUS, PEERS = "#c0392b", "#6b7680", "#2c6fbb"
MARKS = "osD^v"


def read_table(text: str) -> dict[str, Cells]:
    """The policies of the table that `bench_simulate.table` writes."""
    head = re.search(r"^\| policy \|.*$", text, re.MULTILINE)
    if head is None:
        raise SystemExit("no table that starts with '| policy |'")
    loads = [float(load) for load in re.findall(r"JCT at ([\d.]+)", head[0])]
    found: dict[str, Cells] = {}
    for line in text[head.end() :].strip().splitlines()[1:]:
        if not line.startswith("|"):
            break
        name, *cells = (cell.strip() for cell in line.strip("| ").split("|"))
        numbers = [float(cell.split()[0]) for cell in cells]
        found[name] = {load: (numbers[2 * i], numbers[2 * i + 1]) for i, load in enumerate(loads)}
    return found


def draw(policies: Mapping[str, Cells], title: str, out: Path) -> None:
    """Policies from the shortest completion time down, those that share nothing in grey, ours in red."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed (pip install slurm-gpushare[plots])")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    loads = sorted(next(iter(policies.values())))
    middle = loads[len(loads) // 2]
    names = sorted(policies, key=lambda name: policies[name][middle][0], reverse=True)
    figure, panels = pyplot.subplots(1, 2, figsize=(11, 0.34 * len(names) + 1.7), sharey=True, width_ratios=(3, 2))
    for row, name in enumerate(names):
        shares = any(isd_pct > 0 for _, isd_pct in policies[name].values())
        colour = OURS if name.startswith("gpushare") else PEERS if shares else WHOLE_GPUS
        for panel, side in zip(panels, (0, 1), strict=True):
            values = [policies[name][load][side] for load in loads]
            panel.plot([min(values), max(values)], [row, row], color=colour, alpha=0.35, lw=2.5, zorder=2)
            for value, mark in zip(values, MARKS, strict=False):
                panel.scatter(value, row, s=34, marker=mark, color=colour, zorder=3)
    panels[0].set_yticks(range(len(names)), names, fontsize=11)
    for label, name in zip(panels[0].get_yticklabels(), names, strict=True):
        label.set_color(OURS if name.startswith("gpushare") else "black")
        label.set_fontweight("bold" if name == "gpushare" else "normal")
    panels[0].set_xscale("log")
    ticks = [0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0]
    panels[0].set_xticks(ticks, [f"{tick:g}" for tick in ticks], fontsize=10)
    panels[0].minorticks_off()
    panels[0].set_xlabel("average completion time as a part of the plain queue's (fifo); log scale", fontsize=11)
    panels[1].set_xlabel("mean slow-down of all jobs (ISD), %", fontsize=11)
    panels[1].tick_params(axis="x", labelsize=10)
    for panel in panels:
        panel.grid(True, axis="both", alpha=0.25)
        panel.set_axisbelow(True)
        for side in ("top", "right", "left"):
            panel.spines[side].set_visible(False)
        panel.tick_params(axis="y", length=0)
    keys = [
        pyplot.Line2D([], [], ls="", marker=mark, color="black", label=f"load {load:g}")
        for mark, load in zip(MARKS, loads, strict=False)
    ]
    kinds = (("ours", OURS), ("other ways to share", PEERS), ("no sharing", WHOLE_GPUS))
    keys += [pyplot.Line2D([], [], ls="", marker="o", color=colour, label=name) for name, colour in kinds]
    figure.suptitle(title, fontsize=12)
    figure.legend(handles=keys, loc="lower center", ncols=len(keys), frameon=False, fontsize=10.5)
    figure.tight_layout(rect=(0, 0.045, 1, 1))
    figure.savefig(out, dpi=130)
    pyplot.close(figure)


if __name__ == "__main__":
    page, picture = sys.argv[1:]
    title = "8,000 jobs of the Philly trace on 64 GPUs, measured V100 pairs: left is better on both sides"
    draw(read_table(Path(page).read_text()), title, Path(picture))
