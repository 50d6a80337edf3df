"""Pictures that compare: dots, bars, cells and bands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
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
    fitting,
    svg,
    text_at,
    x_axis,
    x_label,
    y_axis,
)


@dataclass(frozen=True, slots=True)
class Point:
    """One dot of a scatter plot."""

    x: float
    y: float
    cluster: int | None
    title: str


def scatter(
    points: Sequence[Point],
    across: str,
    upwards: str,
    *,
    x_high: float,
    y_high: float,
    diagonal: bool = False,
    width: float = WIDTH,
) -> str:
    """Dots on two axes that start at 0; `diagonal` draws the line on which both are equal."""
    height = 360.0 if width == WIDTH else 280.0
    x = Scale(0, x_high, LEFT, width - RIGHT)
    y = Scale(0, y_high, height - BOTTOM, TOP)
    body = [*x_axis(x, y.start, y.end, across), *y_axis(x, y, upwards, 5)]
    if diagonal:
        end = min(x_high, y_high)
        body.append(f'<line x1="{x(0):.1f}" y1="{y(0):.1f}" x2="{x(end):.1f}" y2="{y(end):.1f}" class="guide"/>')
    body += [
        f'<circle cx="{x(min(p.x, x_high)):.1f}" cy="{y(min(p.y, y_high)):.1f}" r="4" class="dot"'
        f' fill="{cluster_colour(p.cluster)}"><title>{escape(p.title)}</title></circle>'
        for p in points
    ]
    return svg(body, height, f"{upwards} against {across}: {len(points)} dots", width)


def heat_map(values: Sequence[Sequence[float | None]], names: Sequence[str], label: str, width: float = WIDTH) -> str:
    """A square of numbers, a job's cluster a row and its neighbour's a column: the darker, the higher."""
    cell_h, left, top = 44.0, 110.0 if width == WIDTH else 72.0, 44.0
    cell_w = min(96.0, (width - left) / max(len(names), 1))
    high = max((value for row in values for value in row if value is not None), default=1.0) or 1.0
    body = [text_at(left, 14, "beside a job of", "start", "label"), text_at(left - 8, top - 10, "a job of", "end")]
    for i, name in enumerate(names):
        body.append(text_at(left + (i + 0.5) * cell_w, top - 10, name))
        body.append(text_at(left - 8, top + (i + 0.5) * cell_h + 4, name, "end"))
        for j, value in enumerate(values[i]):
            share = 0.0 if value is None else min(max(value / high, 0.0), 1.0)
            body.append(
                f'<rect x="{left + j * cell_w:g}" y="{top + i * cell_h:g}" width="{cell_w - 2:g}" '
                f'height="{cell_h - 2:g}" rx="3" fill="var(--heat)" fill-opacity="{0.08 + 0.6 * share:.2f}"/>'
            )
            text = "---" if value is None else f"{value:.0f} %"
            body.append(text_at(left + (j + 0.5) * cell_w - 1, top + (i + 0.5) * cell_h + 4, text, css="cell"))
    return svg(body, top + cell_h * len(names) + 8, label, width)


def histogram(
    names: Sequence[str],
    groups: Sequence[tuple[str, Sequence[float]]],
    across: str,
    upwards: str,
    label: str,
    marks: Sequence[tuple[float, str]] = (),
    width: float = WIDTH,
) -> str:
    """Bars for each name, one of each of at most two groups; `marks` are lines at a place among the names."""
    height, top = 250.0, 24.0 + 14.0 * max(len(marks) - 1, 0)
    x = Scale(0, len(names), LEFT, width - RIGHT)
    y = Scale(0, max((value for _, values in groups for value in values), default=1.0) or 1.0, height - BOTTOM, top)
    body = y_axis(x, y, upwards)
    bar_w = (x(1) - x(0) - 3) / max(len(groups), 1)
    every = math.ceil(LETTER * (max(map(len, names), default=0) + 1) / (x(1) - x(0)))
    for i, name in enumerate(names):
        if i % every == 0:
            body.append(text_at(x(i + 0.5), y.start + 15, name))
        for j, (group, values) in enumerate(groups):
            peak = y(values[i])
            body.append(
                f'<rect x="{x(i) + 1.5 + j * bar_w:.1f}" y="{peak:.1f}" width="{max(bar_w - 1, 1):.1f}"'
                f' height="{y.start - peak:.1f}" class="{("high", "low")[j]}">'
                f"<title>{escape(f'{group}, {name}: {values[i]:.3g}')}</title></rect>"
            )
    for number, (place, text) in enumerate(marks):
        at, row = x(place), 12.0 + 14.0 * number
        body.append(f'<line x1="{at:.1f}" y1="{row - 8:g}" x2="{at:.1f}" y2="{y.start:g}" class="mark"/>')
        fits = at + LETTER * (len(text) + 1) <= width
        body.append(text_at(at + (4 if fits else -4), row, text, "start" if fits else "end", "label"))
    body.append(x_label(x, y.start, across))
    return svg(body, height, label, width)


def bands(rows: Sequence[tuple[str, float, float, float]], across: str, label: str, width: float = WIDTH) -> str:
    """A bar a row from its low to its high end, with a line at the middle."""
    row_h, left = 34.0, 130.0 if width == WIDTH else 84.0
    height = TOP + row_h * len(rows) + BOTTOM
    lowest = min(0.0, *(low for _, low, _, _ in rows))
    x = Scale(lowest, max(high for _, _, _, high in rows) * 1.05 or 1.0, left, width - RIGHT)
    body = x_axis(x, height - BOTTOM, TOP, across, 6 if width == WIDTH else 3)
    for i, (name, low, middle, high) in enumerate(rows):
        top = TOP + i * row_h
        words = escape(f"{name}: {low:.1f} to {high:.1f}, middle {middle:.1f}")
        body.append(text_at(left - 8, top + row_h / 2 + 4, fitting(name, left - 8), "end"))
        body.append(
            f'<rect x="{x(low):.1f}" y="{top + 8:.1f}" width="{max(x(high) - x(low), 2):.1f}" height="{row_h - 16:g}"'
            f' rx="3" class="high"><title>{words}</title></rect>'
        )
        body.append(
            f'<line x1="{x(middle):.1f}" y1="{top + 4:.1f}" x2="{x(middle):.1f}" y2="{top + row_h - 4:.1f}"'
            ' class="middle"/>'
        )
    return svg(body, height, label, width)
