"""Doctor's checks of this machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from slurm_gpushare.config import DEFAULTS
from slurm_gpushare.site import local_checks
from slurm_gpushare.site.finding import Level


def test_the_munged_that_is_tried_is_that_of_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's own munged answers; nodes and helper ask another one, and that one is away."""
    for command in ("munge", "unmunge"):
        (tmp_path / command).write_text("#!/bin/sh\necho MUNGE:x:\n")
        (tmp_path / command).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (finding,) = local_checks.munge(replace(DEFAULTS, munge_socket=tmp_path / "absent.socket"))
    assert (finding.check, finding.level) == ("munge", Level.FAIL)
    assert "munged does not answer" in finding.found
