"""The report as one self-contained HTML page: no script, no network, readable on a phone and in the dark."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape
from itertools import accumulate

from slurm_gpushare.report import charts
from slurm_gpushare.report.summary import GUEST, OTHER, RESIDENT, UNSHARED, JobLine, Report, span_s

_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1c1f23; --soft: #5d6673; --rule: #dfe3e8; --card: #f6f7f9;
  --accent: #0b6bcb; --heat: #d1495b; --grey: #9aa4b1;
  --c0: #0072b2; --c1: #e69f00; --c2: #009e73; --c3: #cc79a7; --c4: #56b4e9; --c5: #d55e00; }
@media (prefers-color-scheme: dark) { :root { --paper: #15181c; --ink: #e8eaed; --soft: #a3adba; --rule: #333a43;
  --card: #1d2228; --accent: #6db3f8; --heat: #e5697a; --c0: #4ba3dd; } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 64rem; padding: 1.5rem 1rem 3rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif }
h1 { font-size: 1.5rem; margin: 0 } h2 { font-size: 1.1rem; margin: 2.2rem 0 .4rem }
p.note, header p { color: var(--soft); margin: .2rem 0 1rem }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .6rem }
.figures div { background: var(--card); border-radius: .5rem; padding: .7rem .9rem }
.figures b { display: block; font-size: 1.45rem; font-variant-numeric: tabular-nums }
.figures span { color: var(--soft); font-size: .85rem }
.wide { overflow-x: auto } .wide svg { min-width: 34rem; width: 100%; height: auto; display: block }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: .9rem }
th, td { padding: .35rem .6rem; border-bottom: 1px solid var(--rule); text-align: right; white-space: nowrap }
th { color: var(--soft); font-weight: 600 } th:first-child, td:first-child { text-align: left }
svg text { fill: var(--ink); font: 11px system-ui, sans-serif } svg .tick { fill: var(--soft) }
svg .label { font-size: 12px } svg .cell { font-size: 12px; font-weight: 600 }
svg .grid { stroke: var(--rule) } svg .guide { stroke: var(--soft); stroke-dasharray: 4 4 }
svg .dot { fill-opacity: .8 } svg .area { fill: var(--accent); fill-opacity: .15 }
svg .line { fill: none; stroke: var(--accent); stroke-width: 2 }
.key i { display: inline-block; width: .8rem; height: .8rem; border-radius: .2rem; margin: 0 .35rem 0 .9rem }
"""

MAX_ROWS = 200
MAX_BARS = 4000


@dataclass(frozen=True, slots=True)
class ProfilePoint:
    """A workload in the cluster picture."""

    mgup_pct: float
    mgmap_pct: float
    cluster: int | None


@dataclass(frozen=True, slots=True)
class KnowledgeCells:
    """Predicted ISD in per cent by (victim cluster, neighbour's cluster); None where nothing is known."""

    gpu_model: str
    isd_pct: Sequence[Sequence[float | None]]


def number(value: float | None, form: str = ".1f", unit: str = "") -> str:
    """A figure for people; the unknown is ``---``."""
    return "---" if value is None else f"{value:{form}}{unit}"


def render(report: Report, profiles: Sequence[ProfilePoint] = (), knowledge: Sequence[KnowledgeCells] = ()) -> str:
    """The whole page."""
    period = " to ".join(datetime.fromtimestamp(t).strftime("%Y-%m-%d %H:%M") for t in (report.start_s, report.end_s))
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>GPU sharing, {escape(period)}</title><style>{_STYLE}</style></head><body>",
        f"<header><h1>GPU sharing</h1><p>{escape(period)}</p></header>",
        _figures(report),
        _timeline(report),
        _savings(report),
        _predictions(report),
        _pairs(report),
        _knowledge(knowledge),
        _clusters(profiles),
        _waits(report),
        _owners(report),
        _broken(report),
        "</body></html>",
    ]
    return "\n".join(part for part in parts if part)


def _section(title: str, note: str, body: str) -> str:
    return f'<section><h2>{escape(title)}</h2><p class="note">{note}</p><div class="wide">{body}</div></section>'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{lines}</tbody></table>"


def _figures(report: Report) -> str:
    values = (
        (f"{len(report.jobs)}", "GPU jobs"),
        (f"{report.shared}", "shared a card"),
        (f"{report.profiled}", "were profiled"),
        (number(report.saved_gpu_h, ".1f", " h"), "GPU time saved"),
        (number(report.ps_pct, ".1f", " %"), "packing saving (PS)"),
        (number(report.isd_pct.mean, ".1f", " %"), "mean slow-down (ISD)"),
        (f"{len(report.past_promise)}", "jobs past their promise"),
    )
    return '<div class="figures">' + "".join(f"<div><b>{v}</b><span>{t}</span></div>" for v, t in values) + "</div>"


def _bars(report: Report) -> dict[tuple[str, int], list[charts.Bar]]:
    lines = {line.job.raw_id: line for line in report.jobs}
    guests = {(span.node, span.gpu_index, span.guest_job) for span in report.spans}
    residents = {(span.node, span.gpu_index, span.resident_job) for span in report.spans}
    rows: dict[tuple[str, int], list[charts.Bar]] = defaultdict(list)
    for places, lane in ((residents - guests, 0), (guests, 1)):
        for node, index, job_id in places:
            job = lines[job_id].job
            if job.start_s is not None:
                end_s = report.end_s if job.end_s is None else job.end_s
                cluster = lines[job_id].cluster
                title = f"job {job_id}, cluster {'---' if cluster is None else cluster}"
                rows[node, index].append(charts.Bar(job.start_s, end_s, lane, cluster, title))
    return rows


def _timeline(report: Report) -> str:
    rows = _bars(report)
    if not rows:
        return _section("Who shared which GPU when", "No GPU was shared in this period.", "")
    labelled = [(f"{node} : {index}", bars) for (node, index), bars in sorted(rows.items())][:MAX_ROWS]
    bars = [bar for _, group in labelled for bar in group]
    if len(bars) > MAX_BARS:
        note = f"{len(bars)} jobs were on shared cards; a picture shows {MAX_BARS} at most. Choose a shorter period."
        return _section("Who shared which GPU when", note, "")
    clusters = sorted({bar.cluster for bar in bars}, key=lambda c: -1 if c is None else c)
    key = "".join(
        f'<i style="background:{charts.cluster_colour(c)}"></i>{"no cluster" if c is None else f"cluster {c}"}'
        for c in clusters
    )
    start_s = max(report.start_s, min(bar.start_s for bar in bars))
    end_s = min(report.end_s, max(bar.end_s for bar in bars))
    note = f'Upper lane: the resident, lower lane: its guests. <span class="key">{key}</span>'
    return _section("Who shared which GPU when", note, charts.timeline(labelled, start_s, max(end_s, start_s + 1)))


def _savings(report: Report) -> str:
    gains = []
    for span in report.spans:
        resident = span.resident_rate_seen if span.resident_rate_seen is not None else span.resident_rate
        guest = span.guest_rate_seen if span.guest_rate_seen is not None else span.guest_rate
        if resident is not None and guest is not None:
            seconds = span_s(span, report.end_s)
            gains.append((span.start_s + seconds, seconds * (resident + guest - 1) / 3600))
    if len(gains) < 2:
        return ""
    gains.sort()
    totals = accumulate(gain for _, gain in gains)
    points = [(when, total) for (when, _), total in zip(gains, totals, strict=True)]
    measured = f"{report.measured_spans} of {len(report.spans)}"
    note = f"{measured} spans of sharing were measured; for the others the prediction counts."
    return _section("GPU time saved", note, charts.area(_thinned(points), "GPU hours saved so far"))


def _thinned(points: list[tuple[float, float]], most: int = 600) -> list[tuple[float, float]]:
    step = max(len(points) // most, 1)
    return [*points[::step], points[-1]]


def _predictions(report: Report) -> str:
    both = [line for line in report.jobs if line.isd_pct is not None and line.predicted_isd_pct is not None]
    if not both:
        return ""
    points = [
        charts.Point(line.predicted_isd_pct or 0, line.isd_pct or 0, line.cluster, f"job {line.job.raw_id}")
        for line in both[-2000:]
    ]
    high = max(10.0, *(max(point.x, point.y) for point in points)) * 1.05
    error = number(report.prediction_error_points, ".1f", " points")
    note = f"A dot a job; on the dashed line the prediction was right. Mean distance: {error}."
    picture = charts.scatter(points, "predicted ISD %", "measured ISD %", x_high=high, y_high=high, diagonal=True)
    return _section("Predicted against measured", note, picture)


def _cluster_name(cluster: int | None) -> str:
    return "---" if cluster is None else f"cluster {cluster}"


def _pairs(report: Report) -> str:
    if not report.pairs:
        return ""
    rows = [
        (
            f"{_cluster_name(pair.resident_cluster)} + {_cluster_name(pair.guest_cluster)}",
            f"{pair.spans}",
            number(pair.hours),
            number(pair.resident_isd_pct, ".1f", " %"),
            number(pair.guest_isd_pct, ".1f", " %"),
            number(pair.ps_pct, ".1f", " %"),
        )
        for pair in report.pairs
    ]
    head = ("resident + guest", "times", "hours", "resident's ISD", "guest's ISD", "PS")
    return _section("By pair of clusters", "ISD here is while sharing, not over the whole run.", _table(head, rows))


def _knowledge(knowledge: Sequence[KnowledgeCells]) -> str:
    pictures = []
    for cells in knowledge:
        names = [f"cluster {i}" for i in range(len(cells.isd_pct))]
        high = max((value for row in cells.isd_pct for value in row if value is not None), default=1.0)
        caption = f"{cells.gpu_model}: slow-down of the row beside the column"
        pictures.append(charts.heat_map(cells.isd_pct, names, names, caption, high))
    note = "What is predicted for two jobs of which only the clusters are known."
    return _section("Knowledge base", note, "".join(pictures)) if pictures else ""


def _clusters(profiles: Sequence[ProfilePoint]) -> str:
    if not profiles:
        return ""
    points = [charts.Point(p.mgup_pct, p.mgmap_pct, p.cluster, f"{_cluster_name(p.cluster)}") for p in profiles[-2000:]]
    picture = charts.scatter(points, "max GPU utilisation %", "max GPU memory allocated %", x_high=100, y_high=100)
    return _section("Workloads by cluster", "A dot a profiled workload, coloured by its cluster.", picture)


def _waits(report: Report) -> str:
    rows = []
    for role in (GUEST, RESIDENT, UNSHARED, OTHER):
        wait = report.waits_s[role]
        minutes = (None if value is None else value / 60 for value in (wait.mean, wait.median, wait.p95))
        rows.append((role, f"{wait.count}", *(number(value) for value in minutes)))
    avoided = number(report.wait_avoided_h, ".1f", " h")
    note = f"Minutes from submission to start. Waiting that guests were expected to be spared: {avoided}."
    return _section("Waiting", note, _table(("", "jobs", "mean", "median", "p95"), rows))


def _owners(report: Report) -> str:
    if len(report.owners) < 2:
        return ""
    rows = [
        (
            line.user,
            f"{line.jobs}",
            f"{line.shared}",
            number(line.gpu_hours_saved),
            number(line.isd_mean_pct, ".1f", " %"),
        )
        for line in report.owners
    ]
    head = ("user", "jobs", "shared", "GPU hours saved", "mean ISD")
    return _section("By user", "Of what two jobs save together, each is given half.", _table(head, rows))


def _broken(report: Report) -> str:
    def row(line: JobLine) -> tuple[str, ...]:
        return (
            f"{line.job.key}",
            line.role,
            number(line.isd_pct, ".1f", " %"),
            number(line.promised_pct, ".0f", " %"),
            ", ".join(map(str, line.partners)),
        )

    if not report.past_promise:
        return ""
    worst = sorted(report.past_promise, key=lambda line: line.isd_pct or 0, reverse=True)[:MAX_ROWS]
    head = ("job", "role", "ISD", "promised", "beside")
    return _section(
        "Jobs past their promise",
        "Slowed by more than they were promised.",
        _table(head, [row(line) for line in worst]),
    )
