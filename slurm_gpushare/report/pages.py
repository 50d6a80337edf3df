"""How our pages are made: Jinja2 templates, which escape whatever they are given, with our words as their filters."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from slurm_gpushare.report import axes, text

if TYPE_CHECKING:
    from jinja2 import Environment


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a page comes from, for its last line."""

    slurm_cluster: str = ""
    version: str = ""
    command: str = ""


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
        "px": lambda value: f"{value:.1f}", "g": lambda value: f"{value:g}", "short": axes.short,
        "fitting": axes.fitting, "colour": axes.cluster_colour, "cluster": text.cluster_name,
        "per_cent": lambda value: _unbroken(text.per_cent(value)), "hours": lambda value: _unbroken(text.hours(value)),
        "duration": lambda value: _unbroken(text.duration_text(value)), "counted": text.counted,
        "energy": text.energy, "n": lambda value: f"{value:,}",
    }  # fmt: skip
    names = ("Scale", "ticks", "time_ticks", "WIDTH", "NARROW", "LEFT", "RIGHT", "TOP", "BOTTOM", "LETTER")
    found.globals |= {name: getattr(axes, name) for name in names}
    return found


def render(template: str, **values: Any) -> str:
    """The page. Raises ModuleNotFoundError where Jinja2 is not installed; the command says what to install."""
    return _environment().get_template(template).render(**values)


def cluster_key(clusters: Any) -> list[tuple[str, str]]:
    """The colours of these clusters, and their names."""
    ordered = sorted(set(clusters), key=lambda cluster: -1 if cluster is None else cluster)
    return [(axes.cluster_colour(cluster), text.cluster_name(cluster)) for cluster in ordered]
