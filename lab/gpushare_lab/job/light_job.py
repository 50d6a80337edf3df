"""Building the emulated job that costs next to nothing (light_job.c has what it does)."""

from __future__ import annotations

from pathlib import Path

from gpushare_lab.emulator.library import SOURCES, compile_c

_SOURCE = Path(__file__).with_name("light_job.c")
_CARD = SOURCES[0]


def build_light_job(target_dir: Path) -> Path:
    """Compile the job into `target_dir` and return its path."""
    return compile_c(target_dir / "light_job", [str(_SOURCE), str(_CARD), "-lm"])
