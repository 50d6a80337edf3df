"""No text of a user's reaches the store, whatever is tried."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from world import ALICE, NOW, Site, command_record, record, seal, token

from slurm_gpushare.protocol.record import encode_record
from slurm_gpushare.protocol.tokens import OwnedToken

SECRET = "SECRETPROJECT"
A = token(1)


@pytest.fixture
def site(store_url: str, tmp_path: Path) -> Site:
    site = Site(store_url, tmp_path / "spool")
    site.tags[1] = OwnedToken(A, ALICE)
    return site


def attempts() -> list[dict[str, Any]]:
    """A user's record with the secret in every place where text could stand."""
    body = json.loads(encode_record(command_record(1, token=A)))
    stat = body["profile"]["stats"]["gpu_util_pct"]
    return [
        {**body, "job_name": SECRET},
        {**body, SECRET: 1},
        {**body, "node": f"/home/alice/{SECRET}"},
        {**body, "node": SECRET.lower()},  # a well-formed node name: accepted, but not kept
        {**body, "gpu_model": SECRET},
        {**body, "token": f"gs-{SECRET.lower()}"},
        {**body, "run_id": SECRET},
        {**body, "closed": SECRET},
        {**body, "features": {**body["features"], "mgup": SECRET}},
        {**body, "features": {**body["features"], SECRET: 1.0}},
        {**body, "profile": {**body["profile"], "stats": {SECRET: stat}}},
        {**body, "profile": {**body["profile"], "stats": {"gpu_util_pct": [*stat[:5], SECRET]}}},
        {**body, "neighbours": [[SECRET, 1.0]]},
        {**body, "v": [1, SECRET]},
    ]


def test_no_field_of_a_record_carries_text_of_the_user_into_the_store(site: Site, tmp_path: Path) -> None:
    for number, body in enumerate(attempts()):
        (site.incoming / f"user{number}.rec").write_bytes(seal(json.dumps(body), ALICE))
    # The file's name is the user's as well.
    (site.incoming / f"{SECRET}.rec").write_bytes(seal(command_record(1, token=A), ALICE))
    site.spool(record(1))
    site.ingest.run(NOW)
    assert site.store.profiles.get(A) is not None
    assert SECRET.lower() not in dump(site, tmp_path).lower()


def test_reasons_and_the_log_never_quote_a_record(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    for number, body in enumerate(attempts()):
        (site.incoming / f"user{number}.rec").write_bytes(seal(json.dumps(body), ALICE))
    site.ingest.run(NOW)
    reasons = "".join(path.read_text() for path in (site.spool_dir / "rejected").glob("*.reason"))
    assert reasons
    assert SECRET.lower() not in (reasons + caplog.text).lower()


def test_a_tag_that_is_no_token_is_not_kept(site: Site, tmp_path: Path) -> None:
    site.tags[2] = OwnedToken(f"{SECRET}'; DROP TABLE workload", ALICE)
    site.take(record(2))
    assert SECRET not in dump(site, tmp_path)
    assert site.store.counters.all()["untokened"] == 1


def dump(site: Site, folder: Path) -> str:
    """All text in the store: what `strings` finds in its files, or every row of a network database."""
    if site.store.database.is_sqlite:
        files = sorted(str(path) for path in folder.glob("store.sqlite*"))
        assert len(files) == 3  # the log and its index too
        return subprocess.run(["strings", "-n", "4", *files], capture_output=True, text=True, check=True).stdout
    with site.store.database.read() as connection:
        tables = connection.exec_driver_sql("SHOW TABLES").scalars().all()
        return "\n".join(str(connection.exec_driver_sql(f"SELECT * FROM {table}").all()) for table in tables)
