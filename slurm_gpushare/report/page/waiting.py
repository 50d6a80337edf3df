"""The page's section about waiting: those who joined a card beside all others."""

from __future__ import annotations

from slurm_gpushare.report.charts.axes import at_both_widths
from slurm_gpushare.report.charts.compared import histogram
from slurm_gpushare.report.page.page_words import duration, hours, per_cent
from slurm_gpushare.report.page.parts import data_table, key, section
from slurm_gpushare.report.slow_down import JOINED, ROLES
from slurm_gpushare.report.summary import Report
from slurm_gpushare.report.words import counted

_LONG = (
    (0, "< 1 min"), (60, "1-5 min"), (300, "5-15 min"), (900, "15-60 min"), (3600, "1-4 h"), (14400, "4-12 h"),
    (43200, "> 12 h"),
)  # fmt: skip
_SHORT = (
    (0, "< 10 s"), (10, "10-30 s"), (30, "30-60 s"), (60, "1-2 min"), (120, "2-5 min"), (300, "5-15 min"),
)  # fmt: skip


def waits(report: Report) -> str:
    """From submission to start, by role."""
    rows = [
        (role, f"{wait.count:,}", *(duration(value) for value in (wait.mean, wait.median, wait.p95)))
        for role in ROLES
        if (wait := report.waits_s[role]).count
    ]
    if not rows:
        return ""
    longest_s = max(wait.max or 0.0 for wait in report.waits_s.values())
    bins = _SHORT if longest_s < 900 else _LONG
    groups, told = [], []
    for name, joined in (("joined a card", True), ("had a whole one", False)):
        found = [line.wait_s for line in report.jobs if line.wait_s is not None and (line.role in JOINED) == joined]
        counts = [0.0] * len(bins)
        for wait_s in found:
            counts[max(i for i, (least_s, _) in enumerate(bins) if wait_s >= least_s)] += 100 / len(found)
        groups.append((name, counts))
        told.append(f"{per_cent(counts[0])} of the {len(found):,} that {name}" if found else "")
    spared = ""
    if report.waits_avoided:
        jobs = counted(report.waits_avoided, "job")
        spared = f" {jobs} that joined a card were expected to wait {hours(report.wait_avoided_h)} more for whole GPUs."
    colours = key(("var(--good)", "joined a card"), ("var(--rest)", "all others"))
    label = f"Waits in per cent of jobs; {bins[0][1]} waited " + " and ".join(filter(None, told))
    names = [text for _, text in bins]
    picture = at_both_widths(lambda width: histogram(names, groups, "waited", "% of jobs", label, (), width))
    table = data_table(("role", "jobs", "mean", "median", "p95"), rows, "Waits by role")
    return section("Waiting", f"From submission to start.{spared} {colours}", picture + table)
