"""Ingest is killed (SIGKILL) at every step in turn; afterwards each record counts exactly once."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
from world import ALICE, NOW, Site, record, token, unseal

from slurm_gpushare.protocol.tokens import OwnedToken
from slurm_gpushare.store import Store, ingest, intake, spool

JOBS = range(1, 13)
OWNERS: dict[str, Any] = {"ingest": ingest, "intake": intake, "settle": intake, "Spool": spool.Spool}


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    sys.exit("still alive")


def dying(original: Callable[..., Any], when: str, count: int) -> Callable[..., Any]:
    """`original`, but its `count`-th call is the last thing that the process does."""
    calls = 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if when == "before" and calls == count:
            die()
        result = original(*args, **kwargs)
        if when == "after" and calls == count:
            die()
        return result

    return call


def ingest_and_die(url: str, spool_dir: Path, victim: str, when: str, count: int) -> int:
    """Run ingest in a child that dies on the way; returns the signal that ended it."""
    child = os.fork()
    if child == 0:
        try:
            owner, name = OWNERS[victim.split(".")[0]], victim.split(".")[1]
            setattr(owner, name, dying(getattr(owner, name), when, count))
            ingest.BATCH = 5
            tags = {job: OwnedToken(token(job % 3), ALICE) for job in JOBS}
            ingest.Ingest(Store(url), spool_dir, unseal, lambda jobs: {job: tags[job] for job in jobs}).run(NOW)
        finally:
            os._exit(1)
    return os.WTERMSIG(os.waitpid(child, 0)[1])


@pytest.mark.parametrize(
    ("victim", "when", "count"),
    [
        ("intake._insert", "after", 1),  # inside the transaction that keeps a batch
        ("ingest.take_in", "after", 1),  # kept, but no file removed yet
        ("Spool.done", "before", 3),  # some files removed
        ("ingest.take_in", "before", 2),  # between two batches
        ("ingest.settle", "before", 1),  # all kept, none settled
        ("settle.refine", "after", 1),  # inside the transaction that settles
        ("settle._drop", "after", 1),
        ("ingest.give_up", "before", 1),  # all done
    ],
)
def test_every_record_counts_exactly_once(store_url: str, tmp_path: Path, victim: str, when: str, count: int) -> None:
    site = Site(store_url, tmp_path / "spool")
    site.spool(*(record(job) for job in JOBS))
    assert ingest_and_die(store_url, site.spool_dir, victim, when, count) == signal.SIGKILL

    site.tags.update({job: OwnedToken(token(job % 3), ALICE) for job in JOBS})
    site.ingest.run(NOW + 60)
    assert list(site.incoming.iterdir()) == []
    runs = [run.job_id for name in range(3) for run in site.store.runs.of_tokens([token(name)])]
    assert sorted(runs) == list(JOBS)
    assert sorted(profile.runs for profile in site.store.profiles.all()) == [4, 4, 4]
    assert site.store.counters.all()["counted"] == len(JOBS)
