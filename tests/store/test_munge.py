"""Records sealed by the real munge, opened both ways, and two ingests at once."""

from __future__ import annotations

import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from world import ALICE, NOW, Tags, command_record, record, token

from slurm_gpushare.protocol.record import Record, encode_record
from slurm_gpushare.protocol.settings import DEFAULTS
from slurm_gpushare.protocol.tokens import OwnedToken
from slurm_gpushare.site.finding import Level
from slurm_gpushare.site.local_checks import munge
from slurm_gpushare.store import Store
from slurm_gpushare.store.credential import CredentialError, MungeDown, OpenCredential, Sealed, _Library
from slurm_gpushare.store.ingest import Ingest

NOBODY = 65534


def seal(socket: Path, made: Record | str, uid: int = 0) -> bytes:
    text = made if isinstance(made, str) else encode_record(made)
    command = ["munge", f"--socket={socket}"]
    return subprocess.run(command, input=text.encode(), capture_output=True, check=True, user=uid).stdout


@pytest.fixture
def opened(munge_socket: Path) -> OpenCredential:
    return _Library(munge_socket).open


def test_a_credential_proves_its_author_and_content(opened: OpenCredential, munge_socket: Path) -> None:
    for uid in (0, NOBODY):
        sealed = opened(seal(munge_socket, "line one\n\nline two", uid))
        assert (sealed.uid, sealed.payload) == (uid, b"line one\n\nline two")


def test_one_that_was_opened_before_still_proves_its_author(opened: OpenCredential, munge_socket: Path) -> None:
    credential = seal(munge_socket, "again", NOBODY)
    opened(credential)
    assert opened(credential) == Sealed(NOBODY, b"again")


def test_one_that_waited_too_long_still_proves_its_author(opened: OpenCredential, munge_socket: Path) -> None:
    command = ["munge", f"--socket={munge_socket}", "--ttl=1", "--string=late"]
    credential = subprocess.run(command, capture_output=True, check=True).stdout
    time.sleep(2.1)  # nothing can be polled: it must be too old when it is first opened
    assert opened(credential).payload == b"late"


@pytest.mark.parametrize("text", [b"", b"hello", b"MUNGE:AwQDAACSDa:"])
def test_what_is_no_credential_is_refused(opened: OpenCredential, text: bytes) -> None:
    with pytest.raises(CredentialError):
        opened(text)


def test_a_changed_credential_is_refused(opened: OpenCredential, munge_socket: Path) -> None:
    credential = bytearray(seal(munge_socket, "content"))
    credential[len(credential) // 2] ^= 1
    with pytest.raises(CredentialError):
        opened(bytes(credential))


def test_no_munged_is_not_the_records_fault(tmp_path: Path) -> None:
    with pytest.raises(MungeDown, match="munged does not answer"):
        _Library(tmp_path / "nothing").open(b"MUNGE:AwQDAACSDa:")


def test_a_user_without_rights_cannot_write_another_users_profile(munge_socket: Path, tmp_path: Path) -> None:
    """From munge to profile: what nobody seals counts neither for a node nor for another's token, nor founds one."""
    store = Store.create(f"sqlite:///{tmp_path}/store.sqlite")
    incoming = tmp_path / "spool" / "incoming"
    incoming.mkdir(parents=True)
    tags = Tags({1: OwnedToken(token(1), ALICE), 2: OwnedToken(token(2), NOBODY)})
    ingest = Ingest(store, tmp_path / "spool", _Library(munge_socket).open, tags, gpu_models=["V100"])
    letters = {
        "node": seal(munge_socket, record(1, util=60.0)),
        "as-node": seal(munge_socket, record(1, util=1.0), NOBODY),
        "for-alice": seal(munge_socket, command_record(1, token=token(1), util=1.0), NOBODY),
        "own": seal(munge_socket, command_record(2, util=30.0), NOBODY),
    }
    for name, credential in letters.items():
        (incoming / f"{name}.rec").write_bytes(credential)
    counts = ingest.run(NOW).counts
    assert (counts["counted"], counts["rejected"], counts["foreign"]) == (1, 1, 1)
    alice = store.profiles.get(token(1))
    assert alice is not None
    assert (alice.owner_uid, alice.runs, alice.features["mgup"]) == (ALICE, 1, 60.0)
    assert store.profiles.get(token(2)) is None, "it waits for a node to vouch for its token"


@pytest.mark.parametrize("kind", ["sqlite", "mariadb"])
def test_two_ingests_at_once_count_each_record_once(
    kind: str, munge_socket: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = f"sqlite:///{tmp_path}/store.sqlite" if kind == "sqlite" else request.getfixturevalue("mariadb_url")
    store = Store.create(url)
    incoming = tmp_path / "spool" / "incoming"
    incoming.mkdir(parents=True)
    jobs = range(1, 61)
    for job in jobs:
        (incoming / f"gpu0-{job}.rec").write_bytes(seal(munge_socket, record(job)))
    tags = Tags({job: OwnedToken(token(job % 7), ALICE) for job in jobs})
    errors: list[BaseException] = []

    def work() -> None:
        try:
            Ingest(Store(url), tmp_path / "spool", _Library(munge_socket).open, tags).run(NOW)
        except BaseException as error:  # noqa: BLE001 - shown below
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert list(incoming.iterdir()) == []
    assert sum(profile.runs for profile in store.profiles.all()) == len(jobs)
    assert store.counters.all()["counted"] == len(jobs)


def test_doctor_tries_the_munged_of_the_settings(munge_socket: Path) -> None:
    (finding,) = munge(replace(DEFAULTS, munge_socket=munge_socket))
    assert finding.level is Level.PASS
