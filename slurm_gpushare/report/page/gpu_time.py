"""The page's sections about GPU time: how much, shared or not, saved, how busy, and card by card."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from html import escape

from slurm_gpushare.report.charts.axes import at_both_widths
from slurm_gpushare.report.charts.over_time import Bar, Stack, area, stacks, strips, timeline
from slurm_gpushare.report.job_lines import JobLine
from slurm_gpushare.report.page.page_words import duration, hours
from slurm_gpushare.report.page.parts import cluster_key, key, section
from slurm_gpushare.report.summary import Report, accrued, crosses_period, shared_by_card, stretches
from slurm_gpushare.report.words import cluster_name, counted, energy, natural

MAX_BARS = 4000
MAX_NODES = 12
"""More are folded up once more."""
TO_SHARE = (
    "A job shares once it carries a token whose workload has been measured: "
    "<code>sbatch --comment=gpushare:$(gpushare token NAME) ...</code>; "
    "administrators check the set-up with <code>gpushare doctor</code>."
)
_PS = "Packing saving (PS): the GPU time saved, of what the jobs that shared would have needed alone"
_EACH = {60: "minute", 300: "5 minutes", 3600: "hour", 21600: "6 hours", 86400: "day", 604800: "week"}


def over_time(report: Report) -> str:
    """GPU time by hour, day or week: it stays readable however many jobs there are."""
    found = stretches(report)
    if not report.shared or not found:
        return ""  # the page's opening says so, and what to do
    each = _EACH.get(round(found[0].end_s - found[0].start_s), duration(found[0].end_s - found[0].start_s))
    factor, unit = _unit(max(item.alone_h + item.shared_h for item in found))

    def when(at_s: float) -> str:
        return datetime.fromtimestamp(at_s).strftime("%d %b %H:%M")

    bins = [
        Stack(
            item.start_s, item.end_s, factor * item.alone_h, factor * item.shared_h,
            f"from {when(item.start_s)}: {hours(item.shared_h)} shared, {hours(item.alone_h)} with one job",
        )
        for item in found
    ]  # fmt: skip
    shared_h, alone_h = sum(item.shared_h for item in found), sum(item.alone_h for item in found)
    label = f"GPU time for each {each}: in all {hours(shared_h)} with two jobs on a card, {hours(alone_h)} with one"
    colours = key(("var(--good)", "two jobs on a card"), ("var(--rest)", "one job"))
    of_all = f"{hours(shared_h)} of {hours(shared_h + alone_h)} shared"
    note = f"GPU time of the jobs of this report, for each {each}: {of_all}."
    body = at_both_widths(lambda width: stacks(bins, f"GPU {unit}", label, width))
    return section("GPU time", f"{note} {colours}", body)


def _unit(most_h: float) -> tuple[float, str]:
    """What to multiply hours by for an axis that goes so far, and its unit."""
    return (1.0, "hours") if abs(most_h) >= 1.0 else (60.0, "minutes")


def savings(report: Report) -> str:
    """GPU time saved so far, booked while jobs share."""
    points, found = accrued(report), stretches(report)
    if len(points) < 2 or not found:
        return ""
    # From and to where the picture of GPU time goes, so that the two can be compared.
    points = [(min(found[0].start_s, points[0][0]), 0.0), *points, (max(found[-1].end_s, points[-1][0]), points[-1][1])]
    spans = len(report.spans)
    rest = "" if report.measured_spans == spans else "; for the others what was expected counts"
    note = f"{_PS}. {report.measured_spans:,} of {counted(spans, 'stay')} side by side measured{rest}."
    if crosses_period(report):
        note += " Only what accrued within the period is drawn; the figures count stays as a whole."
    factor, unit = _unit(max(abs(value) for _, value in points))
    scaled = [(at_s, factor * value) for at_s, value in points]
    body = at_both_widths(lambda width: area(scaled, f"GPU {unit} saved so far", width))
    return section("GPU time saved", note, body)


def utilisation(report: Report) -> str:
    """How busy cards are with one of these jobs, and how busy they were with two."""
    before, after = report.gpu_busy_pct, report.gpu_busy_shared_pct
    if before is None or after is None:
        return ""
    rows = (("one job on a card", before, "rest"), ("as they shared", after, ""))
    meters = "".join(
        f'<span>{name}</span><span aria-hidden="true"><b class="{css}" style="width:{value:.0f}%"></b></span>'
        f"<span>{value:.0f} %</span>"
        for name, value, css in rows
    )
    used = ""
    if report.energy_kwh is not None:
        used = f" All jobs with telemetry used about {energy(report.energy_kwh)}, by the power of their cards."
    note = (
        "How busy each of the jobs that shared keeps a GPU of its own, and how busy cards were as they shared. "
        f"There is telemetry of {report.measured_jobs:,} of {counted(len(report.jobs), 'job')}.{used}"
    )
    return section("Utilisation and energy", note, f'<div class="meter">{meters}</div>')


@dataclass(frozen=True, slots=True)
class _Stay:
    """A job on a card, in a lane that nobody else has meanwhile."""

    start_s: float
    end_s: float
    lane: int
    line: JobLine

    def bar(self) -> Bar:
        line = self.line
        title = f"job {line.job.key}, {line.role}, {cluster_name(line.cluster)}"
        return Bar(self.start_s, self.end_s, self.lane, line.cluster, title)


def _stays(report: Report) -> dict[tuple[str, int], list[_Stay]]:
    """By card: its jobs that shared, as they started."""
    lines = {line.job.raw_id: line for line in report.jobs if line.partners and line.job.start_s}
    members: dict[tuple[str, int], set[int]] = defaultdict(set)
    for span in report.spans:
        for card in span.cards:
            members[card] |= {span.resident_job, span.guest_job} & lines.keys()
    found: dict[tuple[str, int], list[_Stay]] = {}
    for card, jobs in members.items():
        free_at_s = [0.0, 0.0]
        for line in sorted((lines[job] for job in jobs), key=lambda line: line.job.start_s or 0):
            start_s, end_s = float(line.job.start_s or 0), report.end_s if line.job.end_s is None else line.job.end_s
            lane = 0 if free_at_s[0] <= start_s else 1
            free_at_s[lane] = end_s
            found.setdefault(card, []).append(_Stay(start_s, end_s, lane, line))
    return found


def cards(report: Report) -> str:
    """Who was on which card when, a node at a time; of nodes with too many jobs to draw, how much they shared."""
    rows = _stays(report)
    if not rows:
        return ""
    nodes: dict[str, list[int]] = defaultdict(list)
    for node, index in sorted(rows):
        nodes[node].append(index)
    found, shares = shared_by_card(report)
    everybody = [stay for stays in rows.values() for stay in stays]
    start_s = max(report.start_s, min(stay.start_s for stay in everybody))
    end_s = max(min(report.end_s, max(stay.end_s for stay in everybody)), start_s + 1)
    drawn, blocks, many = 0, [], False
    for node in sorted(nodes, key=natural):
        stays = [stay for index in nodes[node] for stay in rows[node, index]]
        words = f"{counted(len(stays), 'job')} on {counted(len(nodes[node]), 'shared GPU')}"
        if drawn + len(stays) <= MAX_BARS:
            drawn += len(stays)
            lanes = [(f"{node}:{index}", [stay.bar() for stay in rows[node, index]]) for index in nodes[node]]
            picture = at_both_widths(partial(timeline, lanes, start_s, end_s))
        else:
            many = True
            of_node = [(f"{node}:{index}", shares[node, index]) for index in nodes[node]]
            picture = at_both_widths(partial(strips, of_node, found[0].start_s, found[-1].end_s))
        is_open = " open" if len(nodes) <= 2 else ""
        blocks.append(f"<details{is_open}><summary>Node {escape(node)}: {words}</summary>{picture}</details>")
    more = " Nodes with very many jobs: the darker, the more of the time two jobs had the card." if many else ""
    colours = cluster_key(stay.line.cluster for stay in everybody)
    note = f"A line a card with two lanes: jobs one above the other shared it.{more} {colours}"
    body = "".join(blocks)
    if len(nodes) > MAX_NODES:
        body = f"<details><summary>All {len(nodes)} nodes</summary>{body}</details>"
    return f'<section><h2>Card by card</h2><p class="note">{note}</p>{body}</section>'
