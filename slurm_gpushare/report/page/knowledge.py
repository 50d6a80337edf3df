"""The page's sections about what is known: pairs of clusters, expected slow-downs, measured workloads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from html import escape

from slurm_gpushare.report.charts.axes import at_both_widths
from slurm_gpushare.report.charts.compared import Point, heat_map, scatter
from slurm_gpushare.report.page.page_words import hours, per_cent
from slurm_gpushare.report.page.parts import cluster_key, data_table, section
from slurm_gpushare.report.summary import Report
from slurm_gpushare.report.words import cluster_name, counted

MAX_DOTS = 2000


@dataclass(frozen=True, slots=True)
class ProfilePoint:
    """A workload in the cluster picture."""

    mgup_pct: float
    mgmap_pct: float
    cluster: int | None


@dataclass(frozen=True, slots=True)
class KnowledgeCells:
    """Predicted ISD in per cent by (victim cluster, neighbour's cluster); None where nothing is known."""

    title: str
    """Of which GPU model, and from what."""
    isd_pct: Sequence[Sequence[float | None]]


def pairs(report: Report) -> str:
    """What each kind of pair cost and saved."""
    if not report.pairs:
        return ""
    rows = [
        (
            f"{cluster_name(pair.resident_cluster)} + {cluster_name(pair.guest_cluster)}", f"{pair.spans:,}",
            f"{pair.measured_spans:,}", hours(pair.hours), per_cent(pair.resident_isd_pct),
            per_cent(pair.guest_isd_pct), per_cent(pair.ps_pct),
        )
        for pair in report.pairs
    ]  # fmt: skip
    head = ("resident + guest", "stays", "measured", "time", "resident's ISD", "guest's ISD", "PS")
    note = (
        "ISD here is while two jobs share, not over the whole run. Stays that were not measured count as was expected."
    )
    return section("By pair of clusters", note, data_table(head, rows, "By pair of clusters"))


def cells(knowledge: Sequence[KnowledgeCells]) -> str:
    """What is expected of clusters."""
    pictures = []
    for known in knowledge:
        names = [cluster_name(i) for i in range(len(known.isd_pct))]
        label = f"Expected slow-down on {known.title}: " + "; ".join(
            f"{name} " + ", ".join(f"{per_cent(value)} beside {other}" for value, other in zip(row, names, strict=True))
            for name, row in zip(names, known.isd_pct, strict=True)
        )
        drawn = at_both_widths(partial(heat_map, known.isd_pct, names, label))
        pictures.append(f'<p class="note">{escape(known.title)}</p>{drawn}')
    note = (
        "Slow-down that is expected of jobs of one cluster beside another, on average; each job is predicted by itself."
    )
    return section("Knowledge", note, "".join(pictures)) if pictures else ""


def workloads(profiles: Sequence[ProfilePoint]) -> str:
    """Every measured workload, by cluster."""
    if not profiles:
        return ""
    shown = profiles[-MAX_DOTS:]
    points = [Point(p.mgup_pct, p.mgmap_pct, p.cluster, cluster_name(p.cluster)) for p in shown]

    def draw(width: float) -> str:
        axes = ("max GPU utilisation %", "max GPU memory allocated %")
        return scatter(points, *axes, x_high=100, y_high=100, width=width)

    last = f", the last {MAX_DOTS:,} drawn" if len(profiles) > MAX_DOTS else ""
    colours = cluster_key(point.cluster for point in shown)
    note = f"A dot a measured workload, {counted(len(profiles), 'workload')}{last}. {colours}"
    return section("Workloads by cluster", note, at_both_widths(draw))
