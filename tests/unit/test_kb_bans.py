"""``gpushare kb bans``: who is kept apart, until when, and how an administrator ends it."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from slurm_gpushare.cli.main import main
from slurm_gpushare.store import Store
from slurm_gpushare.store.sharing import BAN_S

A, B, C = (f"gs-{letter * 20}" for letter in "abc")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A site where B broke a promise beside A yesterday and beside C just now, and A beside C long ago."""
    url = f"sqlite:///{tmp_path}/store.sqlite"
    (tmp_path / "gpushare.conf").write_text(f"Partitions=gpu\nStoreUrl={url}\n")
    monkeypatch.setenv("GPUSHARE_CONF", str(tmp_path / "gpushare.conf"))
    store, now_s = Store.create(url), time.time()
    store.sharing.ban(B, A, now_s - 86_400)
    store.sharing.ban(B, C, now_s)
    store.sharing.ban(C, A, now_s - BAN_S - 60)
    return store


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(["kb", "bans", *arguments])
    assert stop.value.code == 0
    return capsys.readouterr().out


def test_bans_in_force_are_listed_with_what_is_left_of_them(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    head, *lines = said(capsys).splitlines()
    assert head.split() == ["TOKEN", "OTHER", "SINCE", "DAYS", "LEFT"]
    assert [(line.split()[:2], line.split()[-1]) for line in lines] == [([B, C], "14"), ([A, B], "13")]
    told = json.loads(said(capsys, "--json"))
    assert [ban["tokens"] for ban in told["bans"]] == [[B, C], [A, B]]
    assert not told["lifted"]


def test_a_ban_is_lifted_for_two_or_for_all_of_one(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "--lift", f"{A},{B}", "--dry-run") == "would lift 1 ban\n"
    assert store.sharing.banned(time.time()) == {(A, B), (B, C)}
    assert said(capsys, "--lift", f"{B},{A}") == "lifted 1 ban\n"
    assert store.sharing.banned(time.time()) == {(B, C)}
    assert said(capsys, "--lift", B) == "lifted 1 ban\n"
    assert said(capsys) == "no workloads are kept apart\n"
    assert said(capsys, "--lift", B) == "lifted 0 bans\n"


def test_a_workload_that_is_kept_from_itself_keeps_its_other_bans(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(capsys, "--lift", f"{B},{B}", "--dry-run") == "would lift 0 bans\n"
    assert said(capsys, "--lift", f"{B},{B}") == "lifted 0 bans\n"
    store.sharing.ban(B, B)
    assert said(capsys, "--lift", f"{B},{B}") == "lifted 1 ban\n"
    assert store.sharing.banned(time.time()) == {(A, B), (B, C)}


@pytest.mark.parametrize("tokens", ["resnet", f"{A},", f"{A},{B},{C}"])
def test_what_is_no_token_is_a_mistake(store: Store, capsys: pytest.CaptureFixture[str], tokens: str) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["kb", "bans", "--lift", tokens])
    assert stop.value.code == 2
    assert "must be one token, or two" in capsys.readouterr().err
    assert len(store.sharing.banned(time.time())) == 2
