"""What commands go by where there is no gpushare.conf."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from slurm_gpushare.cli import access
from slurm_gpushare.config import DEFAULTS, Config
from slurm_gpushare.report.sources import PublishedSource, StoreSource
from slurm_gpushare.store.store import Store


@pytest.fixture
def defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setenv("GPUSHARE_CONF", str(tmp_path / "absent.conf"))
    here = replace(DEFAULTS, store_url=f"sqlite:///{tmp_path}/store.sqlite")
    monkeypatch.setattr(access, "DEFAULTS", here)
    return here


def test_without_settings_the_defaults_are_used_and_said_to_be(
    defaults: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    assert access.config_or_defaults() == defaults
    said = capsys.readouterr().err
    assert "absent.conf: no such file" in said
    assert said.rstrip().endswith("The defaults are used.")
    assert access.config_or_defaults(loud=False) == defaults
    assert capsys.readouterr().err == ""


def test_nobody_is_told_twice_that_nothing_is_set_up(defaults: Config, capsys: pytest.CaptureFixture[str]) -> None:
    figures = access.source(defaults, loud=True)
    assert isinstance(figures, PublishedSource)
    assert capsys.readouterr().err == ""
    absent = replace(defaults, source=Path("/etc/slurm/gpushare.conf"))
    assert access.readable_store(absent) is None
    assert "What the helper published is shown." in capsys.readouterr().err


def test_the_default_store_is_read_where_it_is(defaults: Config) -> None:
    Store.create(defaults.store_url).close()
    figures = access.source(access.config_or_defaults())
    assert isinstance(figures, StoreSource)
    figures.store.close()
