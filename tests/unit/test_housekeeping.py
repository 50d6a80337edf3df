"""The helper looks for damage in its store, in bounds, and never in a tick's way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from world import overwrite_table

from slurm_gpushare.helper import housekeeping
from slurm_gpushare.helper.housekeeping import LOOK_EVERY_S, Housekeeping
from slurm_gpushare.protocol.history import Decision
from slurm_gpushare.store import Store, StoreDamaged, StoreError, StoreReplaced, schema
from slurm_gpushare.store.maintenance import damage


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.create(f"sqlite:///{tmp_path}/store.sqlite") as store:
        store.decisions.add([Decision(1, 0, "beside")])
        yield store


def looked(keeper: Housekeeping) -> None:
    keeper.look_for_damage()


@pytest.mark.parametrize("table", sorted(schema.METADATA.tables))
def test_damage_is_found_in_every_table_and_the_file_is_used_no_more(store: Store, tmp_path: Path, table: str) -> None:
    assert damage(store.database) == ""
    keeper = Housekeeping(store)
    overwrite_table(tmp_path / "store.sqlite", table)
    looked(keeper)
    with pytest.raises(StoreDamaged, match=r"store.sqlite: is damaged"):
        store.counters.all()
    with pytest.raises(StoreDamaged):
        store.live.beat()


def test_a_sound_store_is_used_as_before(store: Store) -> None:
    looked(Housekeeping(store))
    store.live.beat()


def test_another_file_is_noticed_before_the_damage_of_the_old_one(store: Store, tmp_path: Path) -> None:
    store.database.condemn("Tree 5 page 7")
    (tmp_path / "store.sqlite").rename(tmp_path / "old.sqlite")
    Store.create(f"sqlite:///{tmp_path}/store.sqlite").close()
    with pytest.raises(StoreReplaced):
        store.counters.all()


@pytest.mark.parametrize(("took_s", "least_s"), [(0.01, LOOK_EVERY_S), (0.1, 10_000), (13.0, 1_300_000)])
def test_a_large_store_is_looked_at_more_seldom(
    store: Store, monkeypatch: pytest.MonkeyPatch, took_s: float, least_s: float
) -> None:
    """However large it is, looking takes less than a second a day."""
    clock, looks = [1e6], []

    def slow(database: object) -> str:
        looks.append(clock[0])
        clock[0] += took_s
        return ""

    monkeypatch.setattr(housekeeping, "damage", slow)
    monkeypatch.setattr(housekeeping, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    keeper = Housekeeping(store)
    looked(keeper)
    done_s = clock[0]
    for later_s in (1.0, least_s - 1, least_s + 1):
        clock[0] = done_s + later_s
        looked(keeper)
    assert len(looks) == 2, "at once after a start, then when it is time"
    assert looks[1] >= done_s + least_s


def test_a_store_that_cannot_be_looked_at_is_not_called_damaged(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def busy(database: object) -> str:
        raise StoreError("locked by another process for too long")

    monkeypatch.setattr(housekeeping, "damage", busy)
    looked(Housekeeping(store))
    assert "locked" in caplog.text
    store.live.beat()
