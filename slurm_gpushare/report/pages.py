"""How our pages are made: Jinja2 templates, which escape whatever they are given, with our words as their filters."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache
from typing import TYPE_CHECKING, Any

from slurm_gpushare import __version__
from slurm_gpushare.protocol import text
from slurm_gpushare.protocol.text import counted, durations, hours_span, span

if TYPE_CHECKING:
    from jinja2 import Environment


def _unbroken(value: str) -> str:
    """Numbers are never torn apart from their units at the end of a line."""
    return value.replace(" ", "\N{NO-BREAK SPACE}")


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined  # a login node may have none

    found = Environment(
        loader=PackageLoader("slurm_gpushare.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    found.filters |= {
        "px": lambda value: f"{value:.1f}", "g": lambda value: f"{value:g}", "short": short,
        "colour": cluster_colour, "cluster": text.cluster_name,
        "per_cent": lambda value: _unbroken(text.per_cent(value)), "hours": lambda value: _unbroken(text.hours(value)),
        "duration": lambda value: _unbroken(text.duration_text(value)), "counted": text.counted,
        "energy": text.energy, "n": lambda value: f"{value:,}",
    }  # fmt: skip
    names = ("Scale", "ticks", "time_ticks", "WIDTH", "NARROW", "LEFT", "RIGHT", "TOP", "BOTTOM", "LETTER")
    found.globals |= {name: globals()[name] for name in names}
    return found


def render(template: str, slurm_cluster: str = "", **values: Any) -> str:
    """The page, whose last line says where it comes from: of which Slurm cluster and by which command.

    Raises ModuleNotFoundError where Jinja2 is not installed; the command says what to install.
    """
    command = shlex.join(["gpushare", *sys.argv[1:]])
    page = _environment().get_template(template)
    return page.render(slurm_cluster=slurm_cluster, version=__version__, command=command, **values)


def cluster_key(clusters: Any) -> list[tuple[str, str]]:
    """The colours of these clusters, and their names."""
    ordered = sorted(set(clusters), key=lambda cluster: -1 if cluster is None else cluster)
    return [(cluster_colour(cluster), text.cluster_name(cluster)) for cluster in ordered]


# What all pictures of a page have in common: scales, round numbers along an axis, instants along a time axis. The
# pictures themselves are SVG, in templates/charts.html.j2. Each is drawn at two widths, for a desk and for a phone,
# where shrunk letters could not be read.


WIDTH, NARROW = 720.0, 340.0
LEFT, RIGHT, TOP, BOTTOM = 56.0, 16.0, 12.0, 40.0
LETTER = 6.2
"""About how wide a letter of an axis is."""
_MINUTES = (1, 5, 15, 60, 180, 360)
_DAYS = (1, 2, 7, 14, 30, 91, 365)


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


def time_ticks(start_s: float, end_s: float, most: int = 8) -> list[tuple[float, str]]:
    """Instants along a time axis with their words: clock times within a day and a half, midnights beyond."""
    span_s = end_s - start_s
    midnight = datetime.fromtimestamp(start_s).replace(hour=0, minute=0, second=0, microsecond=0)
    if span_s <= 1.5 * 86400:
        step_s = 60 * next((step for step in _MINUTES if span_s / (60 * step) <= most), _MINUTES[-1])
        midnight_s = midnight.timestamp()
        first = math.ceil((start_s - midnight_s) / step_s)
        last = math.floor((end_s - midnight_s) / step_s)
        instants = [datetime.fromtimestamp(midnight_s + i * step_s) for i in range(first, last + 1)]
        return [(at.timestamp(), at.strftime("%H:%M")) for at in instants]
    step = next((step for step in _DAYS if span_s / (86400 * step) <= most), _DAYS[-1])
    form = "%Y-%m-%d" if span_s > 300 * 86400 else "%d %b"
    found, at = [], midnight + timedelta(days=1)
    while at.timestamp() <= end_s:
        found.append((at.timestamp(), at.strftime(form)))
        at += timedelta(days=step)
    return found


def short(value: float) -> str:
    """``15k`` instead of 15000: an axis has room for four letters."""
    return f"{value / 1000:g}k" if abs(value) >= 10_000 else f"{value:g}"


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
