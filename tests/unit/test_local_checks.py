"""Doctor's checks of this machine."""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from slurm_gpushare.protocol.settings import DEFAULTS
from slurm_gpushare.site import local_checks
from slurm_gpushare.site.finding import Level
from slurm_gpushare.store.hookfile import HookFile
from slurm_gpushare.store.maintenance import problems
from slurm_gpushare.store.store import Store


def test_the_munged_that_is_tried_is_that_of_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's own munged answers; nodes and helper ask another one, and that one is away."""
    for command in ("munge", "unmunge"):
        (tmp_path / command).write_text("#!/bin/sh\necho MUNGE:x:\n")
        (tmp_path / command).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (finding,) = local_checks.munge(replace(DEFAULTS, munge_socket=tmp_path / "absent.socket"))
    assert (finding.check, finding.level) == ("munge", Level.FAIL)
    assert "munged does not answer" in finding.found


@pytest.mark.parametrize(("mode", "mended"), [(0o644, 0o640), (0o660, 0o640), (0o604, 0o600), (0o640, 0o640)])
def test_doctor_and_db_check_say_the_same_of_the_store_s_mode(tmp_path: Path, mode: int, mended: int) -> None:
    """A site may let its group read the store: what is told to do leaves that as it is."""
    path = tmp_path / "store.sqlite"
    config = replace(DEFAULTS, store_url=f"sqlite:///{path}", slurm_user=str(os.geteuid()))
    with Store.create(config.store_url) as store:
        path.chmod(mode)
        (finding,), found = local_checks.store(config), problems(store.database)
        assert (finding.level is Level.FAIL, len(found)) == ((True, 1) if mode != mended else (False, 0))
        for fix in (finding.fix.removeprefix("Run: "), *(text.partition("'")[2].rstrip("'") for text in found)):
            path.chmod(mode)
            subprocess.run(shlex.split(fix) or ["true"], check=True)
            assert path.stat().st_mode & 0o777 == mended


def test_of_a_stale_heartbeat_it_is_said_what_helps_where_the_helper_hangs(tmp_path: Path) -> None:
    """To start another one beside it would only say that one is enough."""
    with Store.create(f"sqlite:///{tmp_path}/store.sqlite") as store:
        HookFile(tmp_path / "hook.sqlite").sync(store, int(time.time()) - 3600)
    (finding,) = local_checks.hook_file(replace(DEFAULTS, hook_file=tmp_path / "hook.sqlite"))
    assert (finding.check, finding.level) == ("heartbeat", Level.FAIL)
    assert "systemctl restart" in finding.fix


def test_doctor_names_who_uses_a_card_from_outside_of_all_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = tmp_path / "nodes" / "n1"
    (node / "jobs").mkdir(parents=True)
    (node / "jobs" / "7").touch()
    (node / "gpus" / "0").mkdir(parents=True)
    monkeypatch.setattr("slurm_gpushare.node.nvml.processes_by_card", lambda: {0: [os.getpid()], 1: [os.getpid()]})
    for uid, count in ((os.getuid(), 0), (os.getuid() + 1, 1)):
        (node / "gpus" / "0" / "7").write_text(f"{uid}\n")
        found = list(local_checks.outsiders(replace(DEFAULTS, state_dir=tmp_path)))
        assert len(found) == count
    assert f"process {os.getpid()} of" in found[0].found
    assert "ConstrainDevices=yes" in found[0].fix
