"""Numbers and names as people read them."""

from __future__ import annotations

import re

from slurm_gpushare.coschedule.planning.reasons import duration_text


def number(value: float | None, form: str = ".1f", unit: str = "") -> str:
    """A figure for people; the unknown is ``---``."""
    return "---" if value is None else f"{value:{form}}{unit}"


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
