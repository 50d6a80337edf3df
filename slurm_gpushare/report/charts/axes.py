"""What all pictures of the report have in common: SVG text, scales, axes. Colours come from the page's CSS variables.

Every picture is drawn at two widths, for a desk and for a phone, where shrunk letters could not be read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from html import escape

WIDTH = 720.0
NARROW = 340.0
LEFT, RIGHT, TOP, BOTTOM = 56.0, 16.0, 12.0, 40.0
LETTER = 6.2
"""About how wide a letter of an axis is."""


def cluster_colour(cluster: int | None) -> str:
    """A CSS variable; the page defines six clusters' colours, told apart by colour-blind readers too."""
    return "var(--grey)" if cluster is None else f"var(--c{cluster % 6})"


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from `low` to `high`, about so many."""
    if not high > low:
        return [low]
    raw = (high - low) / max(about, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    # A little too fine is better than too coarse: 8.01 in about 4 goes in steps of 2, not with one line at 5.
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= 0.8 * raw)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def svg(body: Iterable[str], height: float, label: str, width: float = WIDTH) -> str:
    words = escape(label)
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{words}"><title>{words}</title>'
        f"{''.join(body)}</svg>"
    )


def at_both_widths(draw: Callable[[float], str]) -> str:
    """The picture for a desk and for a phone; the page's style shows the one that fits."""
    return f'<div class="desk">{draw(WIDTH)}</div><div class="phone">{draw(NARROW)}</div>'


def text_at(x: float, y: float, text: str, anchor: str = "middle", css: str = "tick") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{css}">{escape(text)}</text>'


@dataclass(frozen=True, slots=True)
class Scale:
    """Data to pixels, along one axis."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        span = self.high - self.low or 1.0
        return self.start + (value - self.low) / span * (self.end - self.start)


def upright_lines(x: Scale, values: Iterable[float], bottom: float, top: float) -> list[str]:
    """A line of the grid at each value."""
    return [f'<line x1="{x(v):.1f}" y1="{bottom:g}" x2="{x(v):.1f}" y2="{top:g}" class="grid"/>' for v in values]


def x_axis(x: Scale, bottom: float, top: float, label: str, about: int = 5) -> list[str]:
    """Upright lines with their numbers below, and what they are of."""
    values = ticks(x.low, x.high, about)
    numbers = [text_at(x(value), bottom + 16, f"{value:g}") for value in values]
    return [*upright_lines(x, values, bottom, top), *numbers, x_label(x, bottom, label)]


def x_label(x: Scale, bottom: float, label: str) -> str:
    return text_at((x.start + x.end) / 2, bottom + 34, label, css="label")


def fitting(text: str, width: float) -> str:
    """As many of its letters as have room."""
    most = int(width / LETTER)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def short(value: float) -> str:
    """``15k`` instead of 15000: an axis has room for four letters."""
    return f"{value / 1000:g}k" if abs(value) >= 10_000 else f"{value:g}"


def y_axis(x: Scale, y: Scale, y_label: str, about: int = 4) -> list[str]:
    body = []
    for value in ticks(y.low, y.high, about):
        body.append(f'<line x1="{x.start:g}" y1="{y(value):.1f}" x2="{x.end:g}" y2="{y(value):.1f}" class="grid"/>')
        body.append(text_at(x.start - 6, y(value) + 4, short(value), "end"))
    middle = (y.start + y.end) / 2
    body.append(f'<g transform="rotate(-90 14 {middle:.1f})">{text_at(14, middle, y_label, css="label")}</g>')
    return body
