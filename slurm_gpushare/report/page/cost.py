"""The page's sections about what sharing cost: slow-down against the promise, who was slowed too much, by user."""

from __future__ import annotations

from itertools import pairwise

from slurm_gpushare.report.charts.axes import at_both_widths
from slurm_gpushare.report.charts.compared import Point, histogram, scatter
from slurm_gpushare.report.job_lines import JobLine
from slurm_gpushare.report.page.page_words import duration, hours, per_cent
from slurm_gpushare.report.page.parts import cluster_key, data_table, key, section
from slurm_gpushare.report.slow_down import GUEST, JOINED
from slurm_gpushare.report.summary import Report
from slurm_gpushare.report.words import counted, natural, number

SHOWN = 20
MAX_DOTS = 2000
_ISD = "Slow-down (ISD): how much longer a job ran than it would have alone"
_EDGES = (0, 5, 10, 15, 20, 25, 30, 40, 50, 75, 100)


def _place(value: float) -> float:
    """Where a slow-down lies among the bars."""
    for i, (low, high) in enumerate(pairwise(_EDGES)):
        if value < high:
            return i + (value - low) / (high - low)
    return len(_EDGES) - 1


def slow_down(report: Report) -> str:
    """How many jobs were slowed by how much, against what was promised."""
    measured = [line for line in report.jobs if line.isd_pct is not None]
    if not report.shared:
        return ""
    if not measured:
        expected = report.expected_isd_pct
        told = f" Expected of {counted(expected.count, 'job')}: median {per_cent(expected.median)}."
        note = "No job shared long enough to be measured."
        return section("Slow-down", f"{_ISD}. {note}{told if expected.count else ''}")
    names = [f"{a}-{b}" for a, b in pairwise(_EDGES)] + [f"{_EDGES[-1]}+"]
    groups = []
    for name, joined in (("joined", True), ("residents", False)):
        counts = [0.0] * len(names)
        for line in measured:
            if (line.role in JOINED) == joined:
                counts[min(int(_place(max(line.isd_pct or 0.0, 0.0))), len(names) - 1)] += 1
        groups.append((name, counts))
    expected_only = report.expected_isd_pct.count
    more = f" {expected_only:,} more shared too shortly to be measured." if expected_only else ""
    colours = key(("var(--good)", "who joined"), ("var(--rest)", "residents"))
    median, p95 = per_cent(report.isd_pct.median), per_cent(report.isd_pct.p95)
    of_all = f"{counted(len(measured), 'job')} measured: median {median}, 95 % of them at most {p95}"
    note = f"{_ISD}. {of_all}.{more} Dashed: what was promised. {colours}"
    marks = _promises(measured)
    body = at_both_widths(
        lambda width: histogram(names, groups, "slow-down in %", "jobs", f"Slow-down of {of_all}", marks, width)
    )
    return section("Slow-down against the promise", note, body)


def _promises(measured: list[JobLine]) -> list[tuple[float, str]]:
    """Lines at the site's promises: the highest of each role, since an owner's own is less."""
    found = []
    for who, guests in (("residents", False), ("guests", True)):
        values = [line.promised_pct or 0.0 for line in measured if (line.role == GUEST) == guests]
        if values:
            found.append((_place(max(values)), f"{who}: {max(values):.0f} %"))
    return found


def past_promise(report: Report) -> str:
    """Every job that was slowed by more than it was promised, with its owner and its neighbours."""
    if not report.isd_pct.count:
        return ""
    broken = sorted(report.past_promise, key=lambda line: line.isd_pct or 0, reverse=True)
    kept = _kept(report)
    if not broken:
        return section("Jobs past their promise", f"None of the {counted(report.isd_pct.count, 'job')} measured.{kept}")
    users = {line.job.raw_id: line.job.user for line in report.jobs}

    def row(line: JobLine) -> tuple[str, ...]:
        neighbours = ", ".join(f"{job} ({users[job]})" if job in users else str(job) for job in line.partners if job)
        return (
            line.job.key, line.job.user, line.role, per_cent(line.isd_pct), per_cent(line.promised_pct),
            duration(line.shared_s), neighbours or "---",
        )  # fmt: skip

    head = ("job", "owner", "role", "ISD", "promised", "shared", "beside")
    title = "Jobs past their promise"
    body = data_table(head, map(row, broken[:SHOWN]), title)
    if len(broken) > SHOWN:
        rest = data_table(head, map(row, broken[SHOWN:]), f"{title}, the others")
        body += f'<details class="all"><summary>{len(broken) - SHOWN:,} more</summary>{rest}</details>'
    note = f"{len(broken):,} of {counted(report.isd_pct.count, 'job')} measured were slowed by more than promised."
    return section(title, note + kept, body)


def _kept(report: Report) -> str:
    """What was done so that nobody loses more than promised."""
    words = []
    if report.pauses:
        times = counted(report.pauses, "time")
        words.append(f"neighbours were paused {times}, {duration(report.paused_s)} in all,")
    if report.given_back_jobs:
        jobs = counted(report.given_back_jobs, "job")
        words.append(f"{duration(report.given_back_s)} were added to the time limits of {jobs}")
    return f" To keep promises {' and '.join(words)}." if words else ""


def predictions(report: Report) -> str:
    """What was expected against what was measured."""
    both = [line for line in report.jobs if line.isd_pct is not None and line.predicted_isd_pct is not None]
    if not both:
        return ""
    shown = both[-MAX_DOTS:]
    points = [
        Point(line.predicted_isd_pct or 0, line.isd_pct or 0, line.cluster, f"job {line.job.key}") for line in shown
    ]
    high = max(10.0, *(max(point.x, point.y) for point in points)) * 1.05
    error = number(report.prediction_error_points, ".1f", " points")
    last = f", the last {MAX_DOTS:,} drawn" if len(both) > MAX_DOTS else ""
    colours = cluster_key(line.cluster for line in shown)
    note = (
        f"A dot a job, {counted(len(both), 'job')}{last}; on the dashed line the expectation was right. "
        f"Mean distance: {error}. {colours}"
    )
    body = at_both_widths(
        lambda width: scatter(
            points, "expected ISD %", "measured ISD %", x_high=high, y_high=high, diagonal=True, width=width
        )
    )
    return section("Expected against measured", note, body)


def owners(report: Report) -> str:
    """What each user saved and paid."""
    if len(report.owners) < 2 or not report.complete:
        return ""
    rows = [
        (
            line.user, f"{line.jobs:,}", f"{line.shared:,}", hours(line.gpu_hours_saved), per_cent(line.isd_mean_pct),
            f"{line.measured:,}",
        )
        for line in sorted(report.owners, key=lambda line: natural(line.user))
    ]  # fmt: skip
    head = ("user", "jobs", "shared", "saved", "mean ISD", "measured")
    note = "Of what two jobs save together, each is given half. The mean is over the jobs measured."
    return section("By user", note, data_table(head, rows, "By user"))
