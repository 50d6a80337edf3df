"""Configure's files: a site's own settings survive, and everything can be put back."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from click.testing import CliRunner

from slurm_gpushare.cli import configure as configure_module
from slurm_gpushare.cli.configure import _warn_of_mistakes, _write, configure
from slurm_gpushare.protocol.errors import BadInput
from slurm_gpushare.site.site_files import (
    BACKUP,
    FileKind,
    Piece,
    Setting,
    merge_settings,
    read_settings,
    undo,
    write,
    writes,
)

OWN = """\
# ours since spring
Partitions = gpu   # the old ones
ShareAcross=account
  guestcap=30

StoreUrl=sqlite:////srv/store.sqlite
"""
WANTED = [Setting("Partitions", "gpu,long", "why"), Setting("SlurmVersion", "24.11.5", "The hook cannot ask.")]


def test_a_sites_own_settings_and_comments_stay() -> None:
    merged = merge_settings(OWN, WANTED)
    assert "Partitions = gpu,long   # the old ones\n" in merged
    assert merged.startswith("# ours since spring\n")
    for line in ("ShareAcross=account", "  guestcap=30", "StoreUrl=sqlite:////srv/store.sqlite"):
        assert f"{line}\n" in merged
    assert merged.endswith("# The hook cannot ask.\nSlurmVersion=24.11.5\n")


def test_merging_twice_changes_nothing_more() -> None:
    once = merge_settings(OWN, WANTED)
    assert merge_settings(once, WANTED) == once


def test_without_a_file_one_is_made() -> None:
    assert read_settings(merge_settings(None, WANTED)) == {"partitions": "gpu,long", "slurmversion": "24.11.5"}


def tree(top: Path) -> dict[str, tuple[str, int]]:
    """Every file below `top`: its text and mode."""
    found = [path for path in top.rglob("*") if path.is_file()]
    return {str(path.relative_to(top)): (path.read_text(), stat.S_IMODE(path.stat().st_mode)) for path in found}


@pytest.fixture
def etc(tmp_path: Path) -> Path:
    (tmp_path / "gpushare.conf").write_text(OWN)
    (tmp_path / "gpushare.conf").chmod(0o640)
    (tmp_path / "slurm.conf").write_text("ClusterName=x\n")
    return tmp_path


PIECES = [
    Piece("gpushare.conf", FileKind.FILE, merge_settings(OWN, WANTED)),
    Piece("slurm.conf", FileKind.MERGE, "GresTypes=gpu,shard\n"),
    Piece("prolog.d/50-gpushare", FileKind.FILE, "#!/bin/sh\n", executable=True),
]


def test_what_was_written_is_put_back_to_the_last_byte_and_mode(etc: Path) -> None:
    before = tree(etc)
    write(writes(PIECES, etc), etc)
    assert tree(etc)["gpushare.conf"] == (PIECES[0].text, 0o640), "closed as it was"
    assert tree(etc)["prolog.d/50-gpushare"][1] == 0o755
    assert tree(etc)["slurm.conf"] == before["slurm.conf"], "the site's own file is the site's"
    assert not writes(PIECES, etc)
    later = [Piece("gpushare.conf", FileKind.FILE, "Partitions=gpu\n")]
    write(writes(later, etc), etc)
    assert len(list(undo(etc))) == 3
    assert tree(etc) == before, "as before the first time, not the second"
    assert not (etc / "prolog.d").exists()


def test_a_file_that_somebody_changed_since_is_left_alone(etc: Path) -> None:
    write(writes(PIECES, etc), etc)
    (etc / "gpushare.conf").write_text("by hand\n")
    said = [line for line in undo(etc) if "left alone" in line]
    assert said == [
        f"gpushare.conf: changed by somebody since, left alone; the earlier one is {etc / BACKUP}/gpushare.conf"
    ]
    assert (etc / "gpushare.conf").read_text() == "by hand\n"
    assert (etc / BACKUP / "gpushare.conf").read_text() == OWN


def test_the_backup_is_nobody_elses_to_read(etc: Path) -> None:
    write(writes(PIECES, etc), etc)
    assert stat.S_IMODE((etc / BACKUP).stat().st_mode) == 0o700


def test_nothing_to_undo_is_said(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="nothing to undo"):
        list(undo(tmp_path))


def lua(text: str, name: str = "gpushare_submit.lua") -> list[Piece]:
    return [Piece(name, FileKind.FILE, text)]


def test_a_site_with_a_hook_of_its_own_is_told_how_to_load_ours_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """slurmctld looks at job_submit.lua alone."""
    _write(lua("-- one\n"), tmp_path, yes=True)
    assert "touch" not in capsys.readouterr().out, "the site adds lines to its script, and so changes it"
    _write(lua("-- two\n"), tmp_path, yes=True)
    assert f"touch {tmp_path}/job_submit.lua" in capsys.readouterr().out
    _write(lua("-- one\n", "job_submit.lua"), tmp_path, yes=True)
    _write(lua("-- two\n", "job_submit.lua"), tmp_path, yes=True)
    assert "touch" not in capsys.readouterr().out


def test_the_diff_of_a_whole_release_is_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write(lua("-- one\n" * 500), tmp_path, yes=True)
    _write(lua("-- two\n" * 500), tmp_path, yes=True)
    said = capsys.readouterr().out.splitlines()
    assert len(said) < 50
    assert any(line.startswith("... and ") for line in said)


class Running:
    """A Slurm that still runs a task prolog from a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def config(self) -> dict[str, str]:
        return {"TaskProlog": f"{self._directory}/gpushare_task_prolog", "Epilog": "(null)"}


def test_undo_under_a_slurm_that_still_runs_the_files_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    etc = tmp_path / "etc"
    etc.mkdir()
    write(writes([Piece("gpushare_task_prolog", FileKind.FILE, "#!/bin/sh\n")], etc), etc)
    monkeypatch.setattr(configure_module, "connect", lambda: Running(etc))
    done = CliRunner().invoke(configure, ["--undo", str(etc)])
    assert "Slurm still runs TaskProlog" in done.output
    assert done.exit_code == 0


def test_writing_and_undoing_at_once_is_refused(tmp_path: Path) -> None:
    both = ["--write", str(tmp_path), "--undo", str(tmp_path)]
    with pytest.raises(BadInput, match="--write and --undo together"):
        CliRunner().invoke(configure, both, catch_exceptions=False)


def test_a_mistake_that_the_site_has_written_is_said_and_stays(capsys: pytest.CaptureFixture[str]) -> None:
    _warn_of_mistakes([Piece("gpushare.conf", FileKind.FILE, "Partitions=gpu\n"), Piece("x", FileKind.FILE, "no=1\n")])
    assert capsys.readouterr().err == ""
    _warn_of_mistakes([Piece("gpushare.conf", FileKind.FILE, "Partitions=gpu\nPolcy=off\n")])
    said = capsys.readouterr().err
    assert said.startswith("gpushare: warning: gpushare.conf:2: unknown key 'Polcy'. ")
    assert said.count("\n") == 1
