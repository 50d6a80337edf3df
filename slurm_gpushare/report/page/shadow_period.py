"""The page's section about a period under ``Policy=shadow``: what sharing would have done."""

from __future__ import annotations

from collections.abc import Sequence

from slurm_gpushare.report.page.parts import data_table, section

TITLE = "In the shadow: what sharing would have done"
_NOTE = (
    "Nothing was shared or changed in this time. The helper recorded what it would have begun, and the simulator ran "
    "the period's own jobs."
)


def in_the_shadow(lines: Sequence[tuple[str, str]]) -> str:
    """The lines of the section as the terminal shows them, name and text; none where the period was not so."""
    return section(TITLE, _NOTE, data_table(("figure", "result"), lines, TITLE)) if lines else ""
