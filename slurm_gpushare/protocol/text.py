"""Durations, numbers and names as people read them: the one place where logs, commands and pages format."""

from __future__ import annotations

import math
import re
import textwrap
import time
from collections.abc import Mapping

WIDTH = 80
"""Columns of a terminal that every text keeps to."""
CLUSTER_NAMES = {0: "light", 1: "middle", 2: "heavy"}
TO_SHARE = (
    "a job shares once its token's workload has been measured: sbatch --comment=gpushare:$(gpushare token NAME) ...; "
    "administrators check the set-up with 'gpushare doctor'"
)


def number(value: float | None, form: str = ".1f", unit: str = "") -> str:
    """A figure; the unknown is ``---``."""
    return "---" if value is None else f"{value:{form}}{unit}"


def duration_text(seconds: float | None) -> str:
    """``45 s``, ``12 min``, ``3.5 h``, ``2.1 days``: a unit that fits."""
    if seconds is None or not math.isfinite(seconds):
        return "---"
    for unit, size, most in (("s", 1.0, 120.0), ("min", 60.0, 7200.0), ("h", 3600.0, 172_800.0)):
        if abs(seconds) < most:
            return f"{seconds / size:.{0 if seconds / size >= 10 or size == 1.0 else 1}f} {unit}"
    return f"{seconds / 86400.0:.1f} days"


def per_cent(value: float | None) -> str:
    """``25 %``."""
    return "---" if value is None else f"{round(value)} %"


def hours(value: float | None) -> str:
    """GPU time in a unit that fits: hours, as sites count them, or less."""
    if value is None:
        return "---"
    return f"{value:,.0f} h" if abs(value) >= 10 else duration_text(3600 * value)


def clock(seconds: float | None) -> str:
    """As squeue writes times."""
    if seconds is None:
        return "---"
    days, rest = divmod(int(seconds), 86400)
    full, minutes = divmod(rest // 60, 60)
    text = f"{full}:{minutes:02d}:{rest % 60:02d}" if full or days else f"{minutes}:{rest % 60:02d}"
    return f"{days}-{text}" if days else text


def moment(at_s: float, form: str = "%Y-%m-%d %H:%M") -> str:
    """Local time."""
    return time.strftime(form, time.localtime(at_s))


def period(start_s: float, end_s: float) -> str:
    """``2026-11-02 00:00 to 2026-11-09 00:00``."""
    return f"{moment(start_s)} to {moment(end_s)}"


def energy(kwh: float) -> str:
    """In a unit that fits."""
    if kwh >= 1000:
        return f"{kwh / 1000:,.1f} MWh"
    return f"{kwh:.{1 if kwh >= 10 else 2}f} kWh" if kwh >= 0.1 else f"{1000 * kwh:.1f} Wh"


def counted(count: int, singular: str) -> str:
    """``1 job``, ``12 jobs``."""
    return f"{count:,} {singular}{'' if count == 1 else 's'}"


def natural(text: str) -> tuple[tuple[int, int | str], ...]:
    """Sorts gpu9 before gpu10."""
    return tuple((0, int(part)) if part.isdecimal() else (1, part) for part in re.split(r"(\d+)", text) if part)


def cluster_name(cluster: int | None) -> str:
    return "no cluster" if cluster is None else f"cluster {cluster}"


# Ranges: ``low`` and ``high`` of several draws of a simulation.


def span(band: Mapping[str, float], form: str = ".0f", unit: str = "") -> str:
    """``12 to 17 %``; one number where the draws agree."""
    low, high = format(band["low"], form), format(band["high"], form)
    return f"{low}{unit}" if low == high else f"{low} to {high}{unit}"


def durations(band: Mapping[str, float]) -> str:
    """The same of times."""
    low, high = duration_text(band["low"]), duration_text(band["high"])
    return low if low == high else f"{low} to {high}"


def hours_span(band: Mapping[str, float]) -> str:
    """The same of GPU time, in a unit that fits."""
    return span(band, ",.0f", " h") if band["high"] >= 10 else durations({k: 3600 * v for k, v in band.items()})


# Lines of a terminal.


def bar(pct: float, cells: int = 20) -> str:
    """``[████......]``"""
    full = round(min(max(pct, 0.0), 100.0) / 100.0 * cells)
    return f"[{'█' * full}{'.' * (cells - full)}]"


def labelled(label: str, text: str, column: int, indent: str = "") -> str:
    """`text` from `column` on, wrapped there, with `label` before it."""
    first = f"{indent}{label:<{column - len(indent)}}"
    return textwrap.fill(text, WIDTH, initial_indent=first, subsequent_indent=" " * column, break_long_words=False)


def lines_text(*lines: tuple[str, str]) -> str:
    """Names and texts, as ``report`` shows its figures."""
    return "\n".join(labelled(name, text, 18) for name, text in lines)
