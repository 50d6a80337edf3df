"""What our pages are made of: the frame, sections, tables, keys of colours. Everything but notes is escaped here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from slurm_gpushare.report.charts.axes import cluster_colour
from slurm_gpushare.report.page.style import STYLE
from slurm_gpushare.report.words import cluster_name

MANY_COLUMNS = 6
"""From here on a phone shows a row as a block, each value with its name."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a page comes from, for its last line."""

    slurm_cluster: str = ""
    version: str = ""
    command: str = ""


def document(title: str, period: str, opening: str, sections: Iterable[str], origin: Origin) -> str:
    """A whole page; `opening` and `sections` are HTML."""
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8"/>',
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>',
        f"<title>{escape(title)}, {escape(period)}</title><style>{STYLE}</style></head><body>",
        f'<header><h1>{escape(title)}</h1><p>{escape(period)}</p><p class="result">{opening}</p></header><main>',
        *sections,
        f"</main>{_footer(period, origin)}</body></html>",
    ]
    return "\n".join(part for part in parts if part)


def _footer(period: str, origin: Origin) -> str:
    words = [
        f"Slurm cluster {escape(origin.slurm_cluster)}" if origin.slurm_cluster else "",
        f"slurm-gpushare {escape(origin.version)}" if origin.version else "slurm-gpushare",
        escape(period),
        f"made by <code>{escape(origin.command)}</code>" if origin.command else "",
    ]
    return f"<footer><p>{' · '.join(word for word in words if word)}</p></footer>"


def section(title: str, note: str, body: str = "") -> str:
    """A heading, a note (HTML), and what can be moved sideways with the keyboard should it ever be too wide."""
    region = f'<div class="wide" role="region" tabindex="0" aria-label="{escape(title)}">{body}</div>' if body else ""
    return f'<section><h2>{escape(title)}</h2><p class="note">{note}</p>{region}</section>'


def data_table(head: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "") -> str:
    """A table whose first column names the row. Roles are written out: a phone's layout would hide them."""
    cells = "".join(f'<th role="columnheader" scope="col">{escape(name)}</th>' for name in head)

    def line(row: Sequence[str]) -> str:
        first = f'<th role="rowheader" scope="row" data-label="{escape(head[0])}">{escape(row[0])}</th>'
        rest = (
            f'<td role="cell" data-label="{escape(name)}">{escape(cell)}</td>'
            for name, cell in zip(head[1:], row[1:], strict=True)
        )
        return f'<tr role="row">{first}{"".join(rest)}</tr>'

    css = ' class="many"' if len(head) >= MANY_COLUMNS else ""
    named = f' aria-label="{escape(caption)}"' if caption else ""
    return (
        f'<table role="table"{css}{named}><thead role="rowgroup"><tr role="row">{cells}</tr></thead>'
        f'<tbody role="rowgroup">{"".join(map(line, rows))}</tbody></table>'
    )


def key(*entries: tuple[str, str]) -> str:
    """What the colours mean: (CSS colour, words)."""
    return "".join(f'<span class="key"><i style="background:{c}"></i>{escape(words)}</span> ' for c, words in entries)


def cluster_key(clusters: Iterable[int | None]) -> str:
    """The colours of these clusters."""
    ordered = sorted(set(clusters), key=lambda cluster: -1 if cluster is None else cluster)
    return key(*((cluster_colour(cluster), cluster_name(cluster)) for cluster in ordered))
