"""The report on a terminal: 80 columns, units that fit, and of how many jobs each figure speaks."""

from __future__ import annotations

from collections.abc import Sequence

from slurm_gpushare.cli.output import Cell, Column, right, styled, table, text_of
from slurm_gpushare.report.cpu_advice import CpuSummary
from slurm_gpushare.report.slow_down import Distribution
from slurm_gpushare.report.summary import Report
from slurm_gpushare.report.text import TO_SHARE, duration_text, hours, lines_text, period


def report_text(found: Report) -> str:
    """All of it."""
    blocks = [f"GPU sharing, {period(found.start_s, found.end_s)}", _figures(found)]
    if found.pairs:
        columns = (
            Column("RESIDENT"), Column("GUEST"), right("STAYS"), right("MEASURED"),
            right("TIME"),
            right("ISD_RESIDENT%", ".0f"), right("ISD_GUEST%", ".0f"), right("PS%", ".0f"),
        )  # fmt: skip
        rows = (
            (p.resident_cluster, p.guest_cluster, p.spans, p.measured_spans, hours(p.hours), p.resident_isd_pct,
             p.guest_isd_pct, p.ps_pct)
            for p in found.pairs
        )  # fmt: skip
        blocks.append(f"By pair of clusters, while sharing\n{table(columns, rows)}")
    times = (Column("ROLE"), right("JOBS"), *(right(name) for name in ("MEAN", "MEDIAN", "P95")))
    waits: list[Sequence[Cell]] = [
        (role, wait.count, *map(duration_text, (wait.mean, wait.median, wait.p95)))
        for role, wait in found.waits_s.items()
        if wait.count
    ]
    if waits:
        blocks.append(f"From submission to start\n{table(times, waits)}")
    if len(found.owners) > 1 and found.complete:
        by_user = (
            Column("USER"), right("JOBS"), right("SHARED"), right("SAVED"),
            right("MEASURED"), right("ISD%", ".0f"),
        )  # fmt: skip
        owners = (
            (o.user, o.jobs, o.shared, hours(o.gpu_hours_saved), o.measured, o.isd_mean_pct) for o in found.owners
        )
        blocks.append(f"By user\n{table(by_user, owners)}")
    return "\n\n".join(blocks)


def _figures(found: Report) -> str:
    jobs = f"{len(found.jobs)}, {found.profiled} were profiled"
    if not found.jobs:
        return lines_text(("GPU jobs", "none in this period"), ("to share", TO_SHARE))
    if not found.complete:
        return lines_text(("GPU jobs", jobs), ("shared", "--- (not known: see below)"))
    if not found.shared:
        return lines_text(("GPU jobs", f"{jobs}, none shared a card"), ("to share", TO_SHARE), *_cpus(found.cpus))
    isd, expected = found.isd_pct, found.expected_isd_pct
    saved = f"{hours(found.saved_gpu_h)}, {text_of(found.ps_pct, '.0f')} % of what they need alone (PS)"
    avoided = f"{hours(found.wait_avoided_h)} expected, of {found.waits_avoided} guests and successors together"
    lines = [
        ("GPU jobs", f"{jobs}, {found.shared} shared a card"),
        ("GPU time saved", f"{saved}; {found.measured_spans} of {len(found.spans)} stays measured"),
        ("slow-down (ISD)", f"measured of {isd.count} of {found.shared} jobs that shared: {_spread(isd)}"),
    ]
    if expected.count:
        lines.append(("", f"expected of {expected.count} that were not measured: {_spread(expected)}"))
    if found.predictions:
        error = f"{text_of(found.prediction_error_points, '.1f')} points off on average"
        lines.append(("predictions", f"{error}, of {found.predictions} jobs"))
    lines.append(("past promise", _broken(len(found.past_promise), isd.count)))
    if found.given_back_jobs or found.pauses:
        given = f"{duration_text(found.given_back_s)} added to the time limits of {found.given_back_jobs} jobs"
        pauses = f"; {found.pauses} pauses to keep promises, {duration_text(found.paused_s)}" if found.pauses else ""
        lines.append(("given back", f"{given}{pauses}"))
    if found.waits_avoided:
        lines.append(("wait avoided", avoided))
    return lines_text(*lines, *_cpus(found.cpus))


def _cpus(cpus: CpuSummary) -> Sequence[tuple[str, str]]:
    """One line, where somebody could do something about it."""
    if not (cpus.short or cpus.spare):
        return ()
    short = [f"the GPUs of {cpus.short} wait for more of them"] if cpus.short else []
    spare = [f"{cpus.spare} have some to spare, {cpus.spare_cpu_h:.0f} CPU hours in all"] if cpus.spare else []
    return (("CPUs", f"of {cpus.judged} jobs measured {' and '.join(short + spare)}; 'gpushare job ID' says how many"),)


def _broken(broken: int, measured: int) -> str:
    if broken:
        return styled(f"{broken} of {measured} jobs measured", "red")
    return f"none of {measured} jobs measured" if measured else "--- (no job was measured)"


def _spread(spread: Distribution) -> str:
    if spread.count == 0:
        return "---"
    if spread.count == 1:
        return f"{text_of(spread.mean, '.0f')} %"
    words = ((name, getattr(spread, name)) for name in ("mean", "median", "p95", "max"))
    return ", ".join(f"{name} {text_of(value, '.0f')} %" for name, value in words)
