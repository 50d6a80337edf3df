"""What ``gpushare assess`` found, as one self-contained page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from slurm_gpushare.helper.reasons import duration_text
from slurm_gpushare.report import words
from slurm_gpushare.report.charts.axes import at_both_widths
from slurm_gpushare.report.charts.compared import bands
from slurm_gpushare.report.page.parts import Origin, data_table, section
from slurm_gpushare.report.page.parts import document as page
from slurm_gpushare.report.words import counted

Partition = Mapping[str, Any]
"""One entry of the JSON document's ``partitions``."""


def span(band: Mapping[str, float], form: str = ".0f", unit: str = "") -> str:
    """``12 to 17 %``; one number where the draws agree."""
    low, high = format(band["low"], form), format(band["high"], form)
    return f"{low}{unit}" if low == high else f"{low} to {high}{unit}"


def durations(band: Mapping[str, float]) -> str:
    """The same of times."""
    low, high = duration_text(band["low"]), duration_text(band["high"])
    return low if low == high else f"{low} to {high}"


def hours(band: Mapping[str, float]) -> str:
    """The same of GPU time, in a unit that fits."""
    return span(band, ",.0f", " h") if band["high"] >= 10 else durations({k: 3600 * v for k, v in band.items()})


def why_nobody_shares(item: Partition) -> str:
    """Why nothing would be gained; empty where something would."""
    if item["shared_pct"]["high"] > 0:
        return ""
    waits = "nobody waits" if item["plain_wait_s"] < 1 else "hardly anybody waits long enough"
    cards = counted(item["gpus"], "GPU")
    return f"on {cards} {waits}, so that nobody shares; --gpus N shows what sharing would do on fewer cards"


def render_assessment(document: Mapping[str, Any], origin: Origin) -> str:
    """The whole page."""
    found: Sequence[Partition] = document["partitions"]
    sections = (
        _bands(found, "saved_pct", "GPU time saved", "% of the GPU time that the jobs used"),
        _bands(found, "isd_mean_pct", "Slow-down", "mean slow-down of all jobs (ISD), %"),
        _table(found),
        section("How far to believe it", escape(document["method"])),
    )
    return page("What GPU sharing would do here", document["period"], opening(document), sections, origin)


def opening(document: Mapping[str, Any]) -> str:
    """The result in words."""
    total, jobs = document["total"], sum(item["jobs"] for item in document["partitions"])
    if not any(item["shared_pct"]["high"] for item in document["partitions"]):
        why = "; ".join(f"{item['partition']}: {why_nobody_shares(item)}" for item in document["partitions"])
        return f"None of the {jobs:,} GPU jobs of this period would have shared a card: {escape(why)}."
    each_s = {end: 3600.0 * hours / max(jobs, 1) for end, hours in total["waits_avoided_h"].items()}
    return (
        f"Had the {jobs:,} GPU jobs of this period shared cards, they would have done the same work in "
        f"<b>{hours(total['saved_gpu_h'])} less GPU time</b> ({span(total['saved_pct'], '.0f', ' %')}), and "
        f"would have waited {durations(each_s)} less on average."
    )


def _bands(found: Sequence[Partition], key: str, title: str, x_label: str) -> str:
    rows = [(item["partition"], item[key]["low"], item[key]["middle"], item[key]["high"]) for item in found]
    label = f"{title} by partition: " + "; ".join(f"{name} {low:.1f} to {high:.1f}" for name, low, _, high in rows)
    body = at_both_widths(lambda width: bands(rows, x_label, label, width))
    meaning = "ISD: how much longer a job runs than it would alone. " if key == "isd_mean_pct" else ""
    return section(title, f"{meaning}By partition; a bar spans what the draws gave, the line is their middle.", body)


def isd(item: Partition) -> str:
    """Slow-down; of nobody it is unknown, not 0."""
    return span(item["isd_mean_pct"], ".0f", " %") if item["shared_pct"]["high"] > 0 else "---"


def _table(found: Sequence[Partition]) -> str:
    head = ("partition", "jobs", "GPUs", "GPU time", "saved", "mean wait now", "with sharing", "slow-down", "share")
    rows = [
        (
            item["partition"], f"{item['jobs']:,}", f"{item['gpus']:,}", words.hours(item["gpu_hours"]),
            hours(item["saved_gpu_h"]), duration_text(item["plain_wait_s"]), durations(item["wait_s"]),
            isd(item), span(item["shared_pct"], ".0f", " %"),
        )
        for item in found
    ]  # fmt: skip
    return section(
        "By partition", "Slow-down is the mean over all jobs, shared or not.", data_table(head, rows, "By partition")
    )
