"""The report as one self-contained page: what its pictures are made of. Words and layout are in report.html.j2."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from slurm_gpushare.protocol.text import (
    cluster_name,
    counted,
    duration_text,
    hours,
    moment,
    natural,
    per_cent,
    period,
)
from slurm_gpushare.report.job_figures import lasted_s, measured, rates_of, span_s, spread, weighted_mean
from slurm_gpushare.report.job_view import GUEST, JOINED, ROLES, JobView
from slurm_gpushare.report.pages import cluster_key, render
from slurm_gpushare.report.summary import Report

if TYPE_CHECKING:
    from slurm_gpushare.store.store import Store

MAX_BARS = 4000
MAX_DOTS = 2000
SHADOW_TITLE = "In the shadow: what sharing would have done"
_EACH = {60: "minute", 300: "5 minutes", 3600: "hour", 21600: "6 hours", 86400: "day", 604800: "week"}
_ISD_EDGES = (0, 5, 10, 15, 20, 25, 30, 40, 50, 75, 100)
_LONG_WAITS = (
    (0, "< 1 min"), (60, "1-5 min"), (300, "5-15 min"), (900, "15-60 min"), (3600, "1-4 h"), (14400, "4-12 h"),
    (43200, "> 12 h"),
)  # fmt: skip
_SHORT_WAITS = (
    (0, "< 10 s"), (10, "10-30 s"), (30, "30-60 s"), (60, "1-2 min"), (120, "2-5 min"), (300, "5-15 min"),
)  # fmt: skip
Bars = list[tuple[str, list[float]]]
Dot = tuple[float, float, int | None, str]
"""Of a picture: where it is to the right and upwards, its cluster, its words."""
Cells = tuple[str, Sequence[Sequence[float | None]]]
"""Of which GPU model and from what, and predicted ISD in per cent by victim's and neighbour's cluster; or None."""


def profile_points(store: Store) -> list[Dot]:
    """Every profiled workload, for the picture of the clusters."""
    return [
        (profile.features["mgup"], profile.features["mgmap"], profile.cluster, cluster_name(profile.cluster))
        for profile in store.profiles.all()
        if {"mgup", "mgmap"} <= profile.features.keys()
    ]


def known_cells(store: Store | None, site_models: Sequence[str]) -> list[Cells]:
    """What clusters do to each other on each of the site's GPU models, for the heat maps: by this site's tokens, where
    the store may be read, and by the knowledge base that they started from. None where numpy is not installed."""
    try:
        from slurm_gpushare.helper.learner import of_base, of_site
        from slurm_gpushare.knowledge.kb import default_kb
        from slurm_gpushare.store.workloads import models_of
    except ModuleNotFoundError:
        return []
    models = models_of(store.database, site_models).values() if store else ()
    figures = [figure for model in models for figure in of_site(store, model)] if store else [of_base(default_kb())]
    return [(f.title, [[None if v != v else float(v) for v in row] for row in f.isd()]) for f in figures]


def render_report(
    report: Report,
    profiles: Sequence[Dot] = (),
    cells: Sequence[Cells] = (),
    slurm_cluster: str = "",
    shadow: Sequence[tuple[str, str]] = (),
) -> str:
    """The whole page. `shadow` are the lines about what sharing would have done."""
    judged = [job for job in report.jobs if job.measured_isd_pct is not None]
    spent = stretches(report)
    both = [job for job in judged if job.expected_isd_pct is not None]
    users = {job.raw_id: job.user for job in report.jobs}
    dots = [(job.expected_isd_pct, job.measured_isd_pct, job.cluster, f"job {job.key}") for job in both[-MAX_DOTS:]]
    return render(
        "report.html.j2",
        slurm_cluster,
        title=f"GPU sharing on {slurm_cluster}" if slurm_cluster else "GPU sharing",
        period=period(report.start_s, report.end_s),
        report=report,
        joined_wait=spread(job.wait_s for job in report.jobs if job.role in JOINED and job.wait_s is not None),
        other_wait=spread(job.wait_s for job in report.jobs if job.role not in JOINED and job.wait_s is not None),
        measured_pct=_measured_pct(report),
        shadow_title=SHADOW_TITLE,
        shadow=shadow,
        used=used_time(report, spent),
        saved=saved_time(report, spent),
        slow_down=_slow_downs(judged),
        marks=_promises(judged),
        broken=[
            (job, ", ".join(f"{n} ({users[n]})" if n in users else str(n) for n in job.neighbours if n))
            for job in sorted(report.past_promise, key=lambda job: job.measured_isd_pct or 0, reverse=True)
        ],
        waits=_waits(report),
        roles=[(role, report.waits_s[role]) for role in ROLES if report.waits_s[role].count],
        nodes=card_by_card(report),
        predictions=dots,
        furthest=max([10.0, *(max(x or 0.0, y or 0.0) for x, y, *_ in dots)]) * 1.05,
        cells=cells,
        profiles=profiles[-MAX_DOTS:],
        all_dots=(len(both), len(profiles)),
        owners=sorted(report.owners, key=lambda line: natural(line.user)),
        cluster_key=cluster_key,
    )  # fmt: skip


def _measured_pct(report: Report) -> float | None:
    """Of the time that two jobs had a card, the part that was measured."""
    return weighted_mean((100.0 * measured(span), span_s(span, report.end_s)) for span in report.spans)


def _unit(most_h: float) -> tuple[float, str]:
    """What to multiply hours by for an axis that goes so far, and its unit."""
    return (1.0, "hours") if abs(most_h) >= 1.0 else (60.0, "minutes")


def used_time(report: Report, found: Sequence[Stretch]) -> dict[str, Any] | None:
    """GPU time by hour, day or week: it stays readable however many jobs there are."""
    if not report.shared or not found:
        return None  # the page's opening says so, and what to do
    step_s = round(found[0].end_s - found[0].start_s)
    factor, unit = _unit(max(item.alone_h + item.shared_h for item in found))
    bins = []
    for item in found:
        when, with_one = moment(item.start_s, "%d %b %H:%M"), f"{hours(item.alone_h)} with one job"
        title = f"from {when}: {hours(item.shared_h)} shared, {with_one}"
        bins.append((item.start_s, item.end_s, factor * item.alone_h, factor * item.shared_h, title))
    return {
        "bins": bins, "unit": unit, "each": _EACH.get(step_s, duration_text(step_s)),
        "highest": max(low + high for _, _, low, high, _ in bins),
        "shared_h": sum(item.shared_h for item in found), "alone_h": sum(item.alone_h for item in found),
    }  # fmt: skip


def saved_time(report: Report, found: Sequence[Stretch]) -> dict[str, Any] | None:
    """GPU time saved so far, booked while jobs share."""
    points = accrued(report)
    if len(points) < 2 or not found:
        return None
    # From and to where the picture of GPU time goes, so that the two can be compared.
    points = [(min(found[0].start_s, points[0][0]), 0.0), *points, (max(found[-1].end_s, points[-1][0]), points[-1][1])]
    factor, unit = _unit(max(abs(value) for _, value in points))
    return {
        "points": [(at_s, factor * value) for at_s, value in points], "unit": unit, "cut": crosses_period(report)
    }  # fmt: skip


def _place(value: float) -> float:
    """Where a slow-down lies among the bars."""
    for i, (low, high) in enumerate(pairwise(_ISD_EDGES)):
        if value < high:
            return i + (value - low) / (high - low)
    return len(_ISD_EDGES) - 1


def _grouped(names: int, jobs: Iterable[JobView], bar_of: Callable[[JobView], int], titles: tuple[str, str]) -> Bars:
    """How many jobs are in each bar: those who joined a card, and all others."""
    groups: Bars = [(title, [0.0] * names) for title in titles]
    for job in jobs:
        groups[0 if job.role in JOINED else 1][1][bar_of(job)] += 1
    return groups


def _slow_downs(measured: Sequence[JobView]) -> dict[str, Any]:
    names = [f"{a}-{b}" for a, b in pairwise(_ISD_EDGES)] + [f"{_ISD_EDGES[-1]}+"]

    def bar_of(job: JobView) -> int:
        return min(int(_place(max(job.measured_isd_pct or 0.0, 0.0))), len(names) - 1)

    return {"names": names, "groups": _grouped(len(names), measured, bar_of, ("joined", "residents"))}


def _promises(measured: Sequence[JobView]) -> list[tuple[float, str]]:
    """Lines at the site's promises: the highest of each role, since an owner's own is less."""
    found = []
    for who, guests in (("residents", False), ("guests", True)):
        values = [job.promised_pct or 0.0 for job in measured if (job.role == GUEST) == guests]
        if values:
            found.append((_place(max(values)), f"{who}: {max(values):.0f} %"))
    return found


def _waits(report: Report) -> dict[str, Any]:
    """From submission to start, in per cent of the jobs: those who joined a card beside all others."""
    longest_s = max((wait.max or 0.0 for wait in report.waits_s.values()), default=0.0)
    bins = _SHORT_WAITS if longest_s < 900 else _LONG_WAITS
    waited = [job for job in report.jobs if job.wait_s is not None]

    def bar_of(job: JobView) -> int:
        return max(i for i, (least_s, _) in enumerate(bins) if (job.wait_s or 0) >= least_s)

    groups, told = [], []
    for name, counts in _grouped(len(bins), waited, bar_of, ("joined a card", "had a whole one")):
        total = sum(counts)
        shares = [100 * count / total if total else 0.0 for count in counts]
        groups.append((name, shares))
        told += [f"{per_cent(shares[0])} of the {total:,.0f} that {name}"] if total else []
    return {"names": [name for _, name in bins], "groups": groups, "told": " and ".join(told)}


def card_by_card(report: Report) -> list[dict[str, Any]]:
    """A node at a time: who was on which card when; of nodes with too many jobs to draw, how much they shared."""
    rows = stays_by_card(report)
    if not rows:
        return []
    indices: dict[str, list[int]] = defaultdict(list)
    for node, index in sorted(rows):
        indices[node].append(index)
    found, shares = shared_by_card(report)
    everybody = [stay for stays in rows.values() for stay in stays]
    start_s = max(report.start_s, min(stay.start_s for stay in everybody))
    end_s = max(min(report.end_s, max(stay.end_s for stay in everybody)), start_s + 1)
    drawn, blocks = 0, []
    for node in sorted(indices, key=natural):
        of_node = [(f"{node}:{index}", rows[node, index]) for index in indices[node]]
        jobs = sum(len(stays) for _, stays in of_node)
        fits = drawn + jobs <= MAX_BARS
        drawn += jobs if fits else 0
        blocks.append(
            {
                "words": f"Node {node}: {counted(jobs, 'job')} on {counted(len(of_node), 'shared GPU')}",
                "stays": of_node if fits else None,
                "shares": [(f"{node}:{index}", shares[node, index]) for index in indices[node]],
                "from_s": start_s if fits else found[0].start_s,
                "to_s": end_s if fits else found[-1].end_s,
                "clusters": {stay.job.cluster for _, stays in of_node for stay in stays},
            }
        )
    return blocks


# A report's figures over its period: GPU time by hour, day or week, savings as they accrue, cards one by one.


POINTS = 200


@dataclass(slots=True)
class Stretch:
    """GPU time between two moments, in hours: of cards with one job of ours, and of cards with two."""

    start_s: float
    end_s: float
    alone_h: float = 0.0
    shared_h: float = 0.0


def stretches(report: Report) -> list[Stretch]:
    """The period in hours, days or weeks, however many jobs there are."""
    found = _empty(report)
    if not found:
        return []
    for job in report.jobs:
        if job.start_s is not None:
            for at, spent_h in _spread(found, job.start_s, job.end_s or report.end_s):
                found[at].alone_h += job.cards * spent_h
    own = {job.raw_id for job in report.jobs}
    for span in report.spans:
        sides = (span.resident_job in own) + (span.guest_job in own)
        for at, spent_h in _spread(found, span.start_s, span.start_s + lasted_s(span, report.end_s)):
            found[at].alone_h = max(found[at].alone_h - sides * span.gpus * spent_h, 0.0)
            found[at].shared_h += sides / 2 * span.gpus * spent_h
    return found


def _empty(report: Report) -> list[Stretch]:
    """The stretches from the first start on."""
    begun = [job.start_s for job in report.jobs if job.start_s is not None]
    first_s = max(report.start_s, min(begun, default=report.start_s))
    return [Stretch(a, b) for a, b in _steps(first_s, report.end_s)]


def shared_by_card(report: Report) -> tuple[list[Stretch], dict[tuple[str, int], list[float]]]:
    """The stretches of the period, and for each card that was shared the part of each for which it was."""
    found = _empty(report)
    cards: dict[tuple[str, int], list[float]] = {}
    for span in report.spans:
        for at, spent_h in _spread(found, span.start_s, span.start_s + lasted_s(span, report.end_s)):
            for card in span.cards:
                shares = cards.setdefault(card, [0.0] * len(found))
                shares[at] += spent_h * 3600 / (found[at].end_s - found[at].start_s)
    return found, cards


_STEPS = (
    (1 / 12, timedelta(minutes=1)), (0.5, timedelta(minutes=5)), (3.0, timedelta(hours=1)),
    (10.0, timedelta(hours=6)), (150.0, timedelta(days=1)), (math.inf, timedelta(days=7)),
)  # fmt: skip
"""How long a period may be for its stretches to be so long."""


def _steps(start_s: float, end_s: float) -> Iterator[tuple[float, float]]:
    days = (end_s - start_s) / 86400
    step = next(step for most_days, step in _STEPS if days <= most_days)
    at = datetime.fromtimestamp(start_s).replace(second=0, microsecond=0)
    if step >= timedelta(hours=1):
        at = at.replace(hour=0 if days > 3 else at.hour, minute=0)
    elif step > timedelta(minutes=1):
        at = at.replace(minute=at.minute // 5 * 5)
    while at.timestamp() < end_s:
        yield at.timestamp(), (at + step).timestamp()
        at += step


def _spread(found: list[Stretch], start_s: float, end_s: float) -> Iterator[tuple[int, float]]:
    """The places of the stretches that lie between two moments, each with its hours of it."""
    size_s = found[0].end_s - found[0].start_s
    at = max(int((start_s - found[0].start_s) // size_s) - 1, 0)  # a day has 23 hours now and then
    while at < len(found) and found[at].start_s < end_s:
        spent_h = (min(end_s, found[at].end_s) - max(start_s, found[at].start_s)) / 3600
        if spent_h > 0:
            yield at, spent_h
        at += 1


def accrued(report: Report) -> list[tuple[float, float]]:
    """GPU hours saved up to each moment of the period: a span's saving is booked while it lasts, not when it ends."""
    own = {job.raw_id for job in report.jobs}
    slopes: list[tuple[float, float]] = []
    for span in report.spans:
        resident, guest = rates_of(span)
        begin_s = max(float(span.start_s), report.start_s)
        end_s = min(span.start_s + lasted_s(span, report.end_s), report.end_s)
        if resident is not None and guest is not None and end_s > begin_s:
            share = ((span.resident_job in own) + (span.guest_job in own)) / 2
            running = span_s(span, report.end_s) / lasted_s(span, report.end_s)
            slope = share * running * span.gpus * (resident + guest - 1) / 3600
            slopes += [(begin_s, slope), (end_s, -slope)]
    points = list(_integral(sorted(slopes)))
    return [*points[:: max(len(points) // POINTS, 1)], points[-1]] if points else []


def crosses_period(report: Report) -> bool:
    """Whether two jobs shared across the beginning or the end of the period."""
    return any(
        span.start_s < report.start_s or span.start_s + lasted_s(span, report.end_s) > report.end_s
        for span in report.spans
    )


def _integral(slopes: Iterable[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    total = slope = 0.0
    last_s: float | None = None
    for at_s, change in slopes:
        if last_s is not None:
            total += slope * (at_s - last_s)
        slope += change
        last_s = at_s
        yield at_s, total


@dataclass(frozen=True, slots=True)
class CardStay:
    """A job on a card, in one of its two lanes that nobody else has meanwhile."""

    start_s: float
    end_s: float
    lane: int
    job: JobView


def stays_by_card(report: Report) -> dict[tuple[str, int], list[CardStay]]:
    """By node and index: the card's jobs that shared, as they started."""
    jobs = {job.raw_id: job for job in report.jobs if job.stays and job.start_s}
    members: dict[tuple[str, int], set[int]] = defaultdict(set)
    for span in report.spans:
        for card in span.cards:
            members[card] |= {span.resident_job, span.guest_job} & jobs.keys()
    found: dict[tuple[str, int], list[CardStay]] = {}
    for card, here in members.items():
        free_at_s = [0.0, 0.0]
        for job in sorted((jobs[raw_id] for raw_id in here), key=lambda job: job.start_s or 0):
            start_s, end_s = float(job.start_s or 0), report.end_s if job.end_s is None else job.end_s
            lane = 0 if free_at_s[0] <= start_s else 1
            free_at_s[lane] = end_s
            found.setdefault(card, []).append(CardStay(start_s, end_s, lane, job))
    return found
