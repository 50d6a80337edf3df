"""What ``gpushare assess`` found: the words of its table, and its page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from slurm_gpushare.protocol import text
from slurm_gpushare.protocol.text import counted, durations, hours_span, span
from slurm_gpushare.report.pages import render

Partition = Mapping[str, Any]
"""One entry of the JSON document's ``partitions``."""


def why_nobody_shares(item: Partition) -> str:
    """Why nothing would be gained; empty where something would."""
    if item["shared_pct"]["high"] > 0:
        return ""
    waits = "nobody waits" if item["plain_wait_s"] < 1 else "hardly anybody waits long enough"
    cards = counted(item["gpus"], "GPU")
    return f"on {cards} {waits}, so that nobody shares; --gpus N shows what sharing would do on fewer cards"


def remarks(item: Partition) -> Iterator[str]:
    """What must be known before any figure of a partition is believed."""
    if item["load"] > 1.0:
        cards = counted(item["gpus"], "GPU")
        yield (
            f"{item['partition']}: these jobs need {item['load']:.1f} times the hours that {cards} have in this time:"
            " the queue only grows, and no wait means anything; --gpus sets another number"
        )
    if item["wide_jobs_pct"] > 0:
        yield (
            f"{item['partition']}: jobs of several GPUs, {item['wide_jobs_pct']:.0f} % of the jobs and"
            f" {item['wide_hours_pct']:.0f} % of the GPU hours, share with nobody here"
        )


def isd(item: Partition) -> str:
    """Slow-down; of nobody it is unknown, not 0."""
    return span(item["isd_mean_pct"], ".0f", " %") if item["shared_pct"]["high"] > 0 else "---"


def render_assessment(document: Mapping[str, Any]) -> str:
    """The whole page. `document` is what ``--json`` prints."""
    found, total = document["partitions"], document["total"]
    jobs = sum(item["jobs"] for item in found)
    nobody = not any(item["shared_pct"]["high"] for item in found)
    each_s = {end: 3600.0 * value / max(jobs, 1) for end, value in total["waits_avoided_h"].items()}
    return render(
        "assess.html.j2",
        title="What GPU sharing would do here",
        period=document["period"],
        jobs=jobs,
        notes=[f"{note}." for item in found for note in remarks(item)],
        nobody="; ".join(f"{item['partition']}: {why_nobody_shares(item)}" for item in found) if nobody else "",
        saved=hours_span(total["saved_gpu_h"]),
        saved_pct=span(total["saved_pct"], ".0f", " %"),
        spared=durations(each_s),
        bands={
            name: [(item["partition"], *(item[name][end] for end in ("low", "middle", "high"))) for item in found]
            for name in ("saved_pct", "isd_mean_pct")
        },
        rows=[
            (
                item["partition"], f"{item['jobs']:,}", f"{item['gpus']:,}", text.hours(item["gpu_hours"]),
                hours_span(item["saved_gpu_h"]), text.duration_text(item["plain_wait_s"]), durations(item["wait_s"]),
                isd(item), span(item["shared_pct"], ".0f", " %"),
            )
            for item in found
        ],
        method=document["method"],
    )  # fmt: skip
