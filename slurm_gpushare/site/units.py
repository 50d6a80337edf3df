"""The systemd units, filled in for this site."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from slurm_gpushare.resources import resource_dir
from slurm_gpushare.site.configure import Kind, Piece
from slurm_gpushare.site.facts import Facts


def unit_pieces(facts: Facts, command: Path) -> Iterator[Piece]:
    """The units with the path of the gpushare command and the name of SlurmUser, who runs the helper."""
    user = facts.config.get("SlurmUser", "slurm").partition("(")[0]
    for path in sorted((resource_dir("share") / "systemd").iterdir()):
        text = path.read_text(encoding="utf-8").replace("@GPUSHARE@", str(command)).replace("@SLURM_USER@", user)
        yield Piece(f"systemd/{path.name}", Kind.FILE, text)
