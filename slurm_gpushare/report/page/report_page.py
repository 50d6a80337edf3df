"""The report's page from top to bottom, with its opening sentence and its six figures."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from html import escape

from slurm_gpushare.report.page import cost, gpu_time, knowledge
from slurm_gpushare.report.page.page_words import hours, per_cent
from slurm_gpushare.report.page.parts import Origin, document
from slurm_gpushare.report.page.shadow_period import in_the_shadow
from slurm_gpushare.report.page.waiting import waits
from slurm_gpushare.report.summary import Report
from slurm_gpushare.report.words import counted


def render(
    report: Report,
    profiles: Sequence[knowledge.ProfilePoint] = (),
    cells: Sequence[knowledge.KnowledgeCells] = (),
    origin: Origin | None = None,
    shadow: Sequence[tuple[str, str]] = (),
) -> str:
    """The whole page. `shadow` are the lines about what sharing would have done."""
    origin = origin or Origin()
    period = " to ".join(datetime.fromtimestamp(t).strftime("%Y-%m-%d %H:%M") for t in (report.start_s, report.end_s))
    title = f"GPU sharing on {origin.slurm_cluster}" if origin.slurm_cluster else "GPU sharing"
    sections = (
        _figures(report),
        in_the_shadow(shadow),
        gpu_time.over_time(report),
        gpu_time.savings(report),
        gpu_time.utilisation(report),
        cost.slow_down(report),
        cost.past_promise(report),
        waits(report),
        gpu_time.cards(report),
        cost.predictions(report),
        knowledge.pairs(report),
        knowledge.cells(cells),
        knowledge.workloads(profiles),
        cost.owners(report),
    )
    return document(title, period, opening(report), sections, origin)


def opening(report: Report) -> str:
    """The result in words."""
    jobs = len(report.jobs)
    if not jobs:
        return f"No GPU job ran in this period. {gpu_time.TO_SHARE}"
    if not report.complete:
        return "Who shared is not known here: it is told to administrators, and to owners of their own jobs."
    if not report.shared:
        none = "The one GPU job of this period did not share" if jobs == 1 else f"None of the {jobs:,} GPU jobs shared"
        return f"{none} a card. {gpu_time.TO_SHARE}"
    return " ".join(filter(None, (_saved(report), _cost(report), _spared(report))))


def _saved(report: Report) -> str:
    return (
        f"{report.shared:,} of {counted(len(report.jobs), 'GPU job')} shared a card. They took "
        f"{hours(report.busy_gpu_h)} of GPU time and would have taken {hours(report.solo_gpu_h)} with a card each: "
        f"<b>{hours(report.saved_gpu_h)} saved</b>, {per_cent(report.ps_pct)}."
    )


def _cost(report: Report) -> str:
    isd, broken = report.isd_pct, len(report.past_promise)
    if not isd.count:
        return "None of them shared long enough for its slow-down to be measured."
    half = "It" if isd.count == 1 else "Half of them"
    kept = "none was slowed by more than promised" if not broken else f"<b>{broken:,}</b> ran longer than promised"
    return (
        f"The slow-down of {counted(isd.count, 'job')} was measured: {half.lower()} ran at most "
        f"{per_cent(isd.median)} longer than alone, and {kept}."
    )


def _spared(report: Report) -> str:
    if not report.waits_avoided:
        return ""
    jobs, avoided = counted(report.waits_avoided, "job"), hours(report.wait_avoided_h)
    return f"{jobs} started earlier, by an expected {avoided} in all."


def _figures(report: Report) -> str:
    """Six figures, once there is anything to tell; until then the opening says what to do."""
    if not report.shared or not report.complete:
        return ""
    measured = report.isd_pct.count
    stays = f", {report.measured_spans:,} of {counted(len(report.spans), 'stay')} measured" if report.spans else ""
    values = (
        (hours(report.saved_gpu_h), f"of GPU time saved{stays}"),
        (per_cent(report.ps_pct), "less than alone (packing saving, PS)"),
        (f"{report.shared:,}", f"of {counted(len(report.jobs), 'GPU job')} shared"),
        (per_cent(report.isd_pct.median), f"median slow-down (ISD), {counted(measured, 'job')} measured"),
        (f"{len(report.past_promise):,}" if measured else "---", f"of {counted(measured, 'job')} past the promise"),
        (
            hours(report.wait_avoided_h),
            f"of waiting avoided, as expected of {counted(report.waits_avoided, 'job')}",
        ),
    )
    tiles = (f"<div><dt>{escape(text)}</dt><dd>{escape(value)}</dd></div>" for value, text in values)
    return f'<dl class="figures">{"".join(tiles)}</dl>'
