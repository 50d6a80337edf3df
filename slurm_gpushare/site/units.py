"""The systemd units, filled in for this site."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from slurm_gpushare.resources import resource_dir
from slurm_gpushare.site.configure import FileKind, Piece
from slurm_gpushare.site.current_setup import SiteSetup
from slurm_gpushare.slurm.configuration import slurm_user


def unit_pieces(facts: SiteSetup, command: Path) -> Iterator[Piece]:
    """The units with the path of the gpushare command and the name of SlurmUser, who runs the helper."""
    user = slurm_user(facts.config).name
    for path in sorted((resource_dir("share") / "systemd").iterdir()):
        text = path.read_text(encoding="utf-8").replace("@GPUSHARE@", str(command)).replace("@SLURM_USER@", user)
        yield Piece(f"systemd/{path.name}", FileKind.FILE, text)
