from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from world import ALICE, BOB, Site, record, token

from slurm_gpushare.protocol.errors import BadInput
from slurm_gpushare.protocol.history import Decision, Span
from slurm_gpushare.protocol.tokens import OwnedToken
from slurm_gpushare.store import Store
from slurm_gpushare.store.maintenance import compact, forget_user, problems, prune, sizes
from slurm_gpushare.store.schema import METADATA
from slurm_gpushare.store.sharing import Observation

A, B = token(1), token(2)
DAY = 86_400


@pytest.fixture
def now() -> float:
    return time.time()


@pytest.fixture
def site(store_url: str, tmp_path: Path) -> Site:
    return Site(store_url, tmp_path / "spool")


def ingest(site: Site, *jobs: tuple[int, str, float], now: float) -> None:
    for job, name, end_s in jobs:
        site.tags[job] = OwnedToken(name, ALICE)
        site.spool(record(job, end_s=end_s))
    site.ingest.run(now)


def test_old_runs_go_but_not_those_that_a_profile_rests_on(site: Site, now: float) -> None:
    old = [(job, A, now - 100 * DAY + job) for job in range(1, 21)]
    ingest(site, *old, (50, A, now - DAY), now=now)
    assert prune(site.store, now - 30 * DAY)["run"] == 12
    assert [run.job_id for run in site.store.runs.of_tokens([A])] == [*range(13, 21), 50]
    profile = site.store.profiles.get(A)
    assert profile is not None
    assert profile.runs == 21
    assert problems(site.store.database) == []


def test_a_pruned_record_cannot_come_back(site: Site, now: float) -> None:
    made = record(1, end_s=now - 100 * DAY)
    site.tags[1] = OwnedToken(A, ALICE)
    site.spool(made)
    site.ingest.run(now)
    prune(site.store, now - 30 * DAY)
    site.spool(made)
    assert site.ingest.run(now).counts["rejected"] == 1
    (reason,) = (site.spool_dir / "rejected").glob("*.reason")
    assert reason.read_text() == "older than what the store remembers\n"


def test_a_token_not_used_since_is_forgotten_with_all_that_was_learned(site: Site, now: float) -> None:
    ingest(site, (1, A, now - 100 * DAY), (2, B, now - DAY), now=now)
    site.store.sharing.ban(A, B)
    with site.store.database.write() as connection:
        connection.exec_driver_sql(f"UPDATE workload SET created_s = 1 WHERE token = '{A}'")
        connection.exec_driver_sql(f"UPDATE profile SET updated_s = 1 WHERE token = '{A}'")
    assert prune(site.store, now - 30 * DAY)["workload"] == 1
    assert site.store.workloads.owners_by_token([A, B]).keys() == {B}
    assert site.store.sharing.banned(0) == frozenset()


def test_decisions_observations_and_sharing_age_but_ids_never_start_again(site: Site, now: float) -> None:
    store = site.store
    store.decisions.add([Decision(1, int(now) - 90 * DAY, "placed"), Decision(1, int(now), "placed")])
    store.observations.add(
        [Observation("a", "V100", A, B, 0.5, 1.0, 1000), Observation("b", "V100", A, B, 0.5, 1.0, 1001)]
    )
    store.sharing.begin([Span(1, 2, A, B, "gpu0", 0, "V100", 1000), Span(3, 4, A, B, "gpu0", 0, "V100", 1000)])
    newest = store.observations.after(0)[-1].id
    store.sharing.end({span.id: 2000 for span in store.sharing.open() if span.guest_job == 2})
    removed = prune(store, now - 30 * DAY)
    assert (removed["decision"], removed["observation"], removed["sharing"]) == (1, 1, 1)
    assert len(store.sharing.open()) == 1
    store.observations.add([Observation("c", "V100", A, B, 0.5, 1.0, int(now))])
    assert [item.source for item in store.observations.after(newest)] == ["c"]


def test_the_future_cannot_be_pruned(site: Site, now: float) -> None:
    with pytest.raises(BadInput):
        prune(site.store, now + DAY)


def test_a_dry_run_counts_and_forgets_nothing(site: Site, now: float) -> None:
    ingest(site, *((job, A, now - 100 * DAY + job) for job in range(1, 21)), (50, A, now - DAY), now=now)
    before = sizes(site.store)
    planned = prune(site.store, now - 30 * DAY, dry_run=True)
    assert sizes(site.store) == before
    assert planned["run"] == 12
    assert planned == prune(site.store, now - 30 * DAY)


def test_space_is_given_back(store_url: str, tmp_path: Path, site: Site, now: float) -> None:
    """A store of this release gives it back as it forgets; an older one after `db prune --compact`."""
    if not store_url.startswith("sqlite"):
        pytest.skip("a server looks after its pages")
    file = tmp_path / "store.sqlite"
    site.store.decisions.add([Decision(1, 1000 + n, "placed", reasons={"why": "x" * 500}) for n in range(5000)])
    prune(site.store, now - 30 * DAY)
    assert file.stat().st_size < 400_000
    with closing(sqlite3.connect(file)) as old:
        old.execute("PRAGMA auto_vacuum=NONE")
        old.execute("VACUUM")
    site.store.decisions.add([Decision(1, 1000 + n, "placed", reasons={"why": "x" * 500}) for n in range(5000)])
    prune(site.store, now - 30 * DAY)
    assert file.stat().st_size > 2_000_000
    compact(site.store.database)
    assert file.stat().st_size < 400_000
    assert problems(site.store.database) == []


def test_a_user_who_has_left_is_forgotten_and_others_keep_what_they_shared(site: Site, now: float) -> None:
    ingest(site, (1, A, now - DAY), now=now)
    site.tags[2] = OwnedToken(B, BOB)
    site.spool(record(2, end_s=now - DAY))
    site.ingest.run(now)
    store = site.store
    store.sharing.begin([Span(1, 2, A, B, "gpu0", 0, "V100", int(now - DAY - 300))])
    store.sharing.ban(A, B)
    store.observations.add([Observation("a", "V100", A, B, 0.5, 1.0, 1000)])
    store.decisions.add([Decision(1, int(now - DAY - 60), "beside"), Decision(2, int(now - DAY - 60), "beside")])
    planned = forget_user(store, ALICE, dry_run=True)
    assert planned == forget_user(store, ALICE) == {"workload": 1, "run": 1, "decision": 1}
    assert store.workloads.owners_by_token([A, B]) == {B: BOB}
    assert store.runs.of_tokens([A]) == []
    assert [(span.resident_token, span.guest_token) for span in store.sharing.open()] == [("", B)]
    assert [item.job_id for item in store.decisions.between(0, now)] == [2]
    assert (store.observations.after(0), store.sharing.banned(0)) == ([], frozenset())
    assert A not in "".join(dumped(store)), "not a trace"


def dumped(store: Store) -> Iterator[str]:
    with store.database.read() as connection:
        for table in METADATA.tables.values():
            yield from map(str, connection.execute(table.select()))
