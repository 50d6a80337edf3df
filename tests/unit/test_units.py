"""The systemd units: what they may do is what the helper needs, by systemd's own measure."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from slurm_gpushare.resources import resource_dir

UNITS = sorted((resource_dir("share") / "systemd").glob("*.service"))


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd on this machine")
@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.stem)
def test_a_unit_is_well_shielded(unit: Path, tmp_path: Path) -> None:
    text = unit.read_text().replace("@GPUSHARE@", "/usr/bin/gpushare").replace("@SLURM_USER@", "slurm")
    filled = tmp_path / unit.name
    filled.write_text(text)
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", str(filled)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "unrecognized option" in done.stderr or "Unknown" in done.stderr:
        pytest.skip("this systemd cannot judge a file")
    found = re.search(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)
    assert found is not None, done.stderr
    assert float(found[1]) < 3.0


def test_the_helper_may_write_what_it_must() -> None:
    text = (resource_dir("share") / "systemd" / "gpushare-backfill.service").read_text()
    assert "RuntimeDirectory=gpushare" in text  # StateDir
    assert "StateDirectory=gpushare" in text  # the store and the hook's file
    assert "ReadWritePaths=-/var/spool/gpushare" in text  # SpoolDir and PublicDir
