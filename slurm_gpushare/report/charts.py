"""Pictures for the HTML report: numbers in, SVG text out. Colours come from the page's CSS variables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape

WIDTH = 720.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 56.0, 16.0, 12.0, 40.0


def cluster_colour(cluster: int | None) -> str:
    """A CSS variable; the page defines six clusters' colours, told apart by colour-blind readers too."""
    return "var(--grey)" if cluster is None else f"var(--c{cluster % 6})"


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from `low` to `high`, about so many."""
    if not high > low:
        return [low]
    raw = (high - low) / max(about, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _svg(body: Iterable[str], height: float, label: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH:g} {height:g}" role="img" aria-label="{escape(label)}">{"".join(body)}</svg>'


def _text(x: float, y: float, text: str, anchor: str = "middle", css: str = "tick") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{css}">{escape(text)}</text>'


@dataclass(frozen=True, slots=True)
class _Scale:
    """Data to pixels, along one axis."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        span = self.high - self.low or 1.0
        return self.start + (value - self.low) / span * (self.end - self.start)


@dataclass(frozen=True, slots=True)
class Point:
    """One dot of a scatter plot."""

    x: float
    y: float
    cluster: int | None
    title: str


def scatter(
    points: Sequence[Point], x_label: str, y_label: str, *, x_high: float, y_high: float, diagonal: bool = False
) -> str:
    """Dots on two axes that start at 0; `diagonal` draws the line on which both are equal."""
    height = 360.0
    x = _Scale(0, x_high, _LEFT, WIDTH - _RIGHT)
    y = _Scale(0, y_high, height - _BOTTOM, _TOP)
    body = _axes(x, y, x_label, y_label)
    if diagonal:
        end = min(x_high, y_high)
        body.append(f'<line x1="{x(0):.1f}" y1="{y(0):.1f}" x2="{x(end):.1f}" y2="{y(end):.1f}" class="guide"/>')
    body += [
        f'<circle cx="{x(min(p.x, x_high)):.1f}" cy="{y(min(p.y, y_high)):.1f}" r="4" class="dot"'
        f' fill="{cluster_colour(p.cluster)}"><title>{escape(p.title)}</title></circle>'
        for p in points
    ]
    return _svg(body, height, f"{y_label} against {x_label}")


def _axes(x: _Scale, y: _Scale, x_label: str, y_label: str) -> list[str]:
    body = []
    for value in ticks(x.low, x.high):
        body.append(f'<line x1="{x(value):.1f}" y1="{y.start:g}" x2="{x(value):.1f}" y2="{y.end:g}" class="grid"/>')
        body.append(_text(x(value), y.start + 16, f"{value:g}"))
    for value in ticks(y.low, y.high):
        body.append(f'<line x1="{x.start:g}" y1="{y(value):.1f}" x2="{x.end:g}" y2="{y(value):.1f}" class="grid"/>')
        body.append(_text(x.start - 6, y(value) + 4, f"{value:g}", "end"))
    body.append(_text((x.start + x.end) / 2, y.start + 34, x_label, css="label"))
    middle = (y.start + y.end) / 2
    body.append(f'<g transform="rotate(-90 14 {middle:.1f})">{_text(14, middle, y_label, css="label")}</g>')
    return body


@dataclass(frozen=True, slots=True)
class Bar:
    """A job on a GPU, from `start_s` to `end_s`, in lane 0 (resident) or 1 (guest)."""

    start_s: float
    end_s: float
    lane: int
    cluster: int | None
    title: str


def timeline(rows: Sequence[tuple[str, Sequence[Bar]]], start_s: float, end_s: float) -> str:
    """One row a GPU, two lanes a row: who was on the card when, and who shared it."""
    row_height, left = 30.0, 110.0
    height = _TOP + row_height * len(rows) + _BOTTOM
    x = _Scale(start_s, end_s, left, WIDTH - _RIGHT)
    bottom = height - _BOTTOM
    body = []
    for value, text in time_ticks(start_s, end_s):
        body.append(f'<line x1="{x(value):.1f}" y1="{_TOP:g}" x2="{x(value):.1f}" y2="{bottom:g}" class="grid"/>')
        body.append(_text(x(value), bottom + 16, text))
    for number, (label, bars) in enumerate(rows):
        top = _TOP + number * row_height
        body.append(_text(left - 8, top + row_height / 2 + 4, label, "end"))
        body.append(f'<line x1="{left:g}" y1="{top:g}" x2="{WIDTH - _RIGHT:g}" y2="{top:g}" class="grid"/>')
        for bar in bars:
            begin, end = x(max(bar.start_s, start_s)), x(min(bar.end_s, end_s))
            body.append(
                f'<rect x="{begin:.1f}" y="{top + 3 + bar.lane * 12:.1f}" width="{max(end - begin, 1):.1f}" height="11"'
                f' rx="2" fill="{cluster_colour(bar.cluster)}"><title>{escape(bar.title)}</title></rect>'
            )
    return _svg(body, height, "who shared which GPU when")


def time_ticks(start_s: float, end_s: float) -> list[tuple[float, str]]:
    """Instants along a time axis with their words: clock times within two days, dates beyond."""
    span = end_s - start_s
    steps = (60, 300, 900, 3600, 3 * 3600, 6 * 3600, 86400, 7 * 86400, 30 * 86400, 365 * 86400)
    step = next((step for step in steps if span / step <= 8), steps[-1])
    form = "%H:%M" if span <= 2 * 86400 else "%Y-%m-%d" if span > 300 * 86400 else "%d %b"
    first = math.ceil(start_s / step) * step
    return [(t, datetime.fromtimestamp(t).strftime(form)) for t in range(int(first), int(end_s) + 1, step)]


def heat_map(
    values: Sequence[Sequence[float | None]], rows: Sequence[str], columns: Sequence[str], caption: str, high: float
) -> str:
    """A matrix as coloured cells with their numbers: the darker, the closer to `high`."""
    cell_w, cell_h, left, top = 96.0, 44.0, 110.0, 44.0
    body = [_text(left + cell_w * len(columns) / 2, 14, caption, css="label")]
    for j, name in enumerate(columns):
        body.append(_text(left + (j + 0.5) * cell_w, top - 10, name))
    for i, name in enumerate(rows):
        body.append(_text(left - 8, top + (i + 0.5) * cell_h + 4, name, "end"))
        for j, value in enumerate(values[i]):
            share = 0.0 if value is None else min(max(value / high if high else 0.0, 0.0), 1.0)
            body.append(
                f'<rect x="{left + j * cell_w:g}" y="{top + i * cell_h:g}" width="{cell_w - 2:g}" '
                f'height="{cell_h - 2:g}" rx="3" fill="var(--heat)" fill-opacity="{0.08 + 0.8 * share:.2f}"/>'
            )
            text = "---" if value is None else f"{value:.0f} %"
            body.append(_text(left + (j + 0.5) * cell_w - 1, top + (i + 0.5) * cell_h + 4, text, css="cell"))
    return _svg(body, top + cell_h * len(rows) + 8, caption)


def area(points: Sequence[tuple[float, float]], y_label: str) -> str:
    """A quantity that grows over time, as a filled line; `points` are (unix time, value)."""
    height = 240.0
    x = _Scale(points[0][0], points[-1][0], _LEFT, WIDTH - _RIGHT)
    high = max(value for _, value in points) or 1.0
    y = _Scale(0, high, height - _BOTTOM, _TOP)
    body = []
    for value in ticks(0, high, 4):
        body.append(f'<line x1="{x.start:g}" y1="{y(value):.1f}" x2="{x.end:g}" y2="{y(value):.1f}" class="grid"/>')
        body.append(_text(x.start - 6, y(value) + 4, f"{value:g}", "end"))
    for value, text in time_ticks(x.low, x.high):
        body.append(_text(x(value), y.start + 16, text))
    line = " ".join(f"{x(t):.1f},{y(max(value, 0)):.1f}" for t, value in points)
    body.append(f'<polygon points="{x.start:g},{y.start:g} {line} {x.end:g},{y.start:g}" class="area"/>')
    body.append(f'<polyline points="{line}" class="line"/>')
    body.append(_text((x.start + x.end) / 2, height - 4, y_label, css="label"))
    return _svg(body, height, y_label)
