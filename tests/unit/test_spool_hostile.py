"""Whatever users leave in the spool directory: nothing stops a tick, and nodes' records come first."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from world import ALICE, BOB, NOW, Site, command_record, record, seal, token

from slurm_gpushare.helper import log
from slurm_gpushare.protocol.record import encode_record, new_id
from slurm_gpushare.protocol.tokens import OwnedToken
from slurm_gpushare.store import ingest, intake, spool, workloads

A = token(1)
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make other users' files")


@pytest.fixture
def site(store_url: str, tmp_path: Path) -> Site:
    site = Site(store_url, tmp_path / "spool")
    site.tags[1] = OwnedToken(A, ALICE)
    return site


def counts(site: Site) -> dict[str, int]:
    return {name: count for name, count in site.ingest.run(NOW).counts.items() if count}


def long_name(directory: Path) -> None:
    (directory / ("x" * 251 + ".rec")).write_text("hello")


def full_directory(directory: Path) -> None:
    (directory / "d.rec").mkdir()
    (directory / "d.rec" / "inside").touch()


def directory_then_file(directory: Path) -> None:
    (directory.parent / "rejected" / "d.rec").mkdir(parents=True)
    (directory / "d.rec").write_text("hello")


def odd_names(directory: Path) -> None:
    for name in (b"\xff\xfe.rec", b"\x1b[31m\n.rec", b"-rf .rec", "ü\u202e.rec".encode()):
        (directory / os.fsdecode(name)).write_text("hello")


def odd_files(directory: Path) -> None:
    os.mkfifo(directory / "pipe.rec")
    (directory / "loop.rec").symlink_to("loop.rec")
    (directory / "passwd.rec").symlink_to("/etc/shadow")
    with (directory / "sparse.rec").open("wb") as file:
        file.truncate(1 << 40)


@pytest.mark.parametrize("attack", [long_name, full_directory, directory_then_file, odd_names, odd_files])
def test_no_entry_of_the_spool_stops_ingest(
    site: Site, attack: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    attack(site.incoming)
    for _ in range(3):
        counts(site)
    assert "\x1b" not in caplog.text
    site.spool(record(1))
    assert counts(site)["counted"] == 1
    left = [path.name for path in site.incoming.iterdir()]
    assert left == (["d.rec"] if attack is full_directory else [])


def test_what_cannot_be_removed_is_counted_once(site: Site) -> None:
    full_directory(site.incoming)
    assert counts(site) == {"stuck": 1}
    assert counts(site) == {}
    assert site.store.counters.all()["stuck"] == 1


def owned_by(uid: int, *paths: Path) -> None:
    for path in paths:
        os.chown(path, uid, uid)


@as_root
def test_nodes_records_come_first_and_users_take_turns(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingest, "MOST_A_RUN", 3)
    site.tags[2] = OwnedToken(A, ALICE)
    users = site.spool(*(command_record(1, token=A) for _ in range(20)), uid=ALICE)
    owned_by(ALICE, *users)
    others = site.spool(command_record(1, token=A), uid=BOB)
    owned_by(BOB, *others)
    (node,) = site.spool(record(1))
    summary = site.ingest.run(NOW)
    assert summary.more
    assert not node.exists()
    assert not others[0].exists()
    assert sum(path.exists() for path in users) == 19


@as_root
def test_a_user_who_floods_the_spool_loses_what_is_too_much(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool, "FILES_A_USER", 5)
    monkeypatch.setattr(spool, "BYTES_A_USER", 100_000)
    many = [site.incoming / f"{number}.rec" for number in range(12)]
    for path in many:
        path.write_bytes(seal(command_record(1, token=A), ALICE))
    large = [site.incoming / f"large{number}" for number in range(3)]
    for path in large:
        path.write_bytes(b"x" * 60_000)
    owned_by(ALICE, *many)
    owned_by(BOB, *large)
    seen = counts(site)
    assert seen["excess"] == 7 + 2
    assert seen["final"] == 5
    assert [path.name for path in site.incoming.iterdir()] in (["large0"], ["large1"], ["large2"])


def test_a_look_is_bounded_and_the_next_goes_on(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool, "ENTRIES_A_LOOK", 10)
    for number in range(35):
        (site.incoming / f"draft{number}").touch()
    site.spool(record(1))
    runs = [site.ingest.run(NOW) for _ in range(4)]
    assert [run.more for run in runs] == [True, True, True, False]
    assert sum(run.counts["counted"] for run in runs) == 1


def test_strays_go_after_an_hour(site: Site) -> None:
    old, new = site.incoming / ".old.tmp", site.incoming / ".new.tmp"
    for path in (old, new):
        path.touch()
    os.utime(old, (1, 1))
    assert counts(site) == {"stray": 1}
    assert new.exists()


def test_rejected_files_do_not_pile_up(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool, "KEPT_REJECTED", 3)
    for number in range(10):
        (site.incoming / f"{number}.rec").write_text("hello")
    assert counts(site) == {"rejected": 10}
    rejected = site.spool_dir / "rejected"
    assert len(list(rejected.iterdir())) == 6
    for path in rejected.iterdir():
        os.utime(path, (1, 1))
    (site.incoming / "last.rec").write_text("hello")
    counts(site)
    assert len(list(rejected.iterdir())) == 2


def test_a_users_own_records_have_a_quota_by_the_proven_uid(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingest, "USER_RECORDS_A_DAY", 3)
    site.spool(*(command_record(1, token=A) for _ in range(5)), uid=BOB)
    site.spool(command_record(1, token=A), uid=ALICE)
    seen = counts(site)
    assert (seen["final"], seen["rejected"]) == (4, 2)
    site.spool(command_record(1, token=A), uid=BOB)
    assert site.ingest.run(NOW + 86_400).counts["final"] == 1, "another day"


def test_a_user_has_no_more_tokens_than_anybody_needs(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workloads, "TOKENS_A_USER", 3)
    tokens = [token(number) for number in range(5)]
    assert len(site.store.workloads.claim(dict.fromkeys(tokens, ALICE))) == 3
    assert len(site.store.workloads.of_owner(ALICE)) == 3
    assert site.store.workloads.claim({token(9): BOB}) == {token(9): BOB}
    assert site.store.workloads.claim({tokens[0]: BOB}) == {tokens[0]: ALICE}


def test_many_waiting_records_of_users_are_settled_a_part_at_a_time(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All at once they were more values than SQLite takes in one statement, for ever."""
    monkeypatch.setattr(ingest, "USER_RECORDS_A_DAY", 10_000)
    monkeypatch.setattr(intake, "OWN_RECORDS_A_RUN", 700)
    site.store.workloads.claim({A: ALICE})
    template = encode_record(command_record(1, token=A))
    for job in range(1500):
        body = template.replace('"job_id":1,', f'"job_id":{job + 10},')
        run_id = new_id()
        start = body.index('"run_id":"') + len('"run_id":"')
        (site.incoming / f"{job}.rec").write_bytes(seal(body[:start] + run_id + body[start + 32 :], ALICE))
    seen = [counts(site)["kept"] for _ in range(3)]
    assert seen == [700, 700, 100]


def test_control_characters_do_not_reach_the_log() -> None:
    assert log.line("x", name="a\x1b[2Jb\x00") == 'event=x name="a\\\\x1b[2Jb\\\\x00"'
