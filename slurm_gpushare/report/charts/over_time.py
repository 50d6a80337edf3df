"""Pictures with time along the bottom."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from html import escape

from slurm_gpushare.report.charts.axes import (
    BOTTOM,
    LEFT,
    LETTER,
    RIGHT,
    TOP,
    WIDTH,
    Scale,
    cluster_colour,
    svg,
    text_at,
    upright_lines,
    y_axis,
)


@dataclass(frozen=True, slots=True)
class Bar:
    """A job on a GPU, from `start_s` to `end_s`, in lane 0 or 1."""

    start_s: float
    end_s: float
    lane: int
    cluster: int | None
    title: str


def timeline(rows: Sequence[tuple[str, Sequence[Bar]]], start_s: float, end_s: float, width: float = WIDTH) -> str:
    """One row a GPU, two lanes a row: who was on the card when, and who shared it."""
    row_height, left = 30.0, 110.0 if width == WIDTH else 64.0
    height = TOP + row_height * len(rows) + BOTTOM
    x = Scale(start_s, end_s, left, width - RIGHT)
    bottom = height - BOTTOM
    body = upright_lines(x, [at for at, _ in time_ticks(start_s, end_s, 8 if width == WIDTH else 4)], TOP, bottom)
    body += time_axis(x, bottom + 16, width)
    for number, (label, bars) in enumerate(rows):
        top = TOP + number * row_height
        body.append(text_at(left - 8, top + row_height / 2 + 4, label, "end"))
        body.append(f'<line x1="{left:g}" y1="{top:g}" x2="{width - RIGHT:g}" y2="{top:g}" class="grid"/>')
        for bar in bars:
            begin, end = x(max(bar.start_s, start_s)), x(min(bar.end_s, end_s))
            body.append(
                f'<rect x="{begin:.1f}" y="{top + 3 + bar.lane * 12:.1f}" width="{max(end - begin, 1):.1f}" height="11"'
                f' rx="2" fill="{cluster_colour(bar.cluster)}"><title>{escape(bar.title)}</title></rect>'
            )
    stays = sum(len(bars) for _, bars in rows)
    return svg(body, height, f"{stays} jobs on {len(rows)} GPUs over time", width)


SHADES = 4


def strips(rows: Sequence[tuple[str, Sequence[float]]], start_s: float, end_s: float, width: float = WIDTH) -> str:
    """One row a GPU, equal steps of time: the darker, the more of a step (0 to 1) two jobs had the card."""
    row_height, left = 22.0, 110.0 if width == WIDTH else 64.0
    height = TOP + row_height * len(rows) + BOTTOM
    x = Scale(start_s, end_s, left, width - RIGHT)
    body = time_axis(x, height - BOTTOM + 16, width)
    for number, (label, shares) in enumerate(rows):
        top, wide = TOP + number * row_height, (x.end - x.start) / max(len(shares), 1)
        body.append(text_at(left - 8, top + row_height / 2 + 4, label, "end"))
        for shade in range(1, SHADES + 1):
            cells = [i for i, share in enumerate(shares) if math.ceil(SHADES * min(share, 1.0)) == shade]
            path = "".join(
                f"M{left + i * wide:.1f} {top + 2:g}h{wide:.1f}v{row_height - 4:g}h-{wide:.1f}z" for i in cells
            )
            if path:
                body.append(f'<path d="{path}" fill="var(--good)" fill-opacity="{shade / SHADES:g}"/>')
    told = ", ".join(f"{label} {100 * sum(shares) / max(len(shares), 1):.0f} %" for label, shares in rows)
    return svg(body, height, f"Part of the time with two jobs on the card: {told}", width)


_MINUTES = (1, 5, 15, 60, 180, 360)
_DAYS = (1, 2, 7, 14, 30, 91, 365)


def time_ticks(start_s: float, end_s: float, most: int = 8) -> list[tuple[float, str]]:
    """Instants along a time axis with their words: clock times within a day and a half, midnights beyond."""
    span_s = end_s - start_s
    if span_s <= 1.5 * 86400:
        step_s = 60 * next((step for step in _MINUTES if span_s / (60 * step) <= most), _MINUTES[-1])
        midnight_s = _midnight(start_s).timestamp()
        first = math.ceil((start_s - midnight_s) / step_s)
        last = math.floor((end_s - midnight_s) / step_s)
        instants = [datetime.fromtimestamp(midnight_s + i * step_s) for i in range(first, last + 1)]
        return [(at.timestamp(), at.strftime("%H:%M")) for at in instants]
    step = next((step for step in _DAYS if span_s / (86400 * step) <= most), _DAYS[-1])
    form = "%Y-%m-%d" if span_s > 300 * 86400 else "%d %b"
    found, at = [], _midnight(start_s) + timedelta(days=1)
    while at.timestamp() <= end_s:
        found.append((at.timestamp(), at.strftime(form)))
        at += timedelta(days=step)
    return found


def _midnight(at_s: float) -> datetime:
    return datetime.fromtimestamp(at_s).replace(hour=0, minute=0, second=0, microsecond=0)


def time_axis(x: Scale, y: float, width: float) -> list[str]:
    """The words below a time axis, as many as have room, none over the edge."""
    found = time_ticks(x.low, x.high, 8 if width == WIDTH else 4)
    half = LETTER / 2
    return [text_at(x(at), y, text) for at, text in found if x(at) + half * len(text) <= width]


def area(points: Sequence[tuple[float, float]], y_label: str, width: float = WIDTH) -> str:
    """A quantity that grows over time, as a filled line; `points` are (unix time, value)."""
    height = 240.0
    x = Scale(points[0][0], points[-1][0], LEFT, width - RIGHT)
    high = max(value for _, value in points) or 1.0
    low = min(0.0, min(value for _, value in points))
    y = Scale(low, high, height - BOTTOM, TOP)
    body = y_axis(x, y, y_label)
    body += time_axis(x, y.start + 16, width)
    line = " ".join(f"{x(t):.1f},{y(value):.1f}" for t, value in points)
    body.append(f'<polygon points="{x.start:g},{y(0):.1f} {line} {x.end:g},{y(0):.1f}" class="area"/>')
    body.append(f'<polyline points="{line}" class="line"/>')
    return svg(body, height, f"{y_label}, {points[-1][1]:.3g} at the end", width)


@dataclass(frozen=True, slots=True)
class Stack:
    """What is piled up over one stretch of time: `low` at the bottom, `high` on top of it."""

    start_s: float
    end_s: float
    low: float
    high: float
    title: str


def stacks(bins: Sequence[Stack], y_label: str, label: str, width: float = WIDTH) -> str:
    """Two quantities over time, one on top of the other."""
    height = 220.0
    x = Scale(bins[0].start_s, bins[-1].end_s, LEFT, width - RIGHT)
    y = Scale(0, max(item.low + item.high for item in bins) or 1.0, height - BOTTOM, TOP)
    body = y_axis(x, y, y_label)
    body += time_axis(x, y.start + 16, width)
    for item in bins:
        left, wide = x(item.start_s), max(x(item.end_s) - x(item.start_s) - 1.0, 0.8)
        low, top = y(item.low), y(item.low + item.high)
        body.append(
            f"<g><title>{escape(item.title)}</title>"
            f'<rect x="{left:.1f}" y="{low:.1f}" width="{wide:.1f}" height="{y.start - low:.1f}" class="low"/>'
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{wide:.1f}" height="{low - top:.1f}" class="high"/></g>'
        )
    return svg(body, height, label, width)
