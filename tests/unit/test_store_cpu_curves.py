"""The CPU curve that a user measured: kept under the user's own token, and told to the hook."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from world import ALICE, BOB, NOW, Site, command_record, record, token

from slurm_gpushare.protocol.record import CpuSpeed, Record, RecordError, encode_record, enough_cpus, parse_record
from slurm_gpushare.protocol.tokens import OwnedToken
from slurm_gpushare.store.hookfile import HookFile
from slurm_gpushare.store.intake import WAITING_OF_A_JOB
from slurm_gpushare.store.maintenance import prune, sizes
from slurm_gpushare.store.workloads import Assignment

A = token(1)
FOUR = (CpuSpeed(2, 0.5), CpuSpeed(4, 0.97), CpuSpeed(8, 1.0))
TWO = (CpuSpeed(2, 1.0), CpuSpeed(4, 1.0))


@pytest.fixture
def site(store_url: str, tmp_path: Path) -> Site:
    """A workload of Alice's that a node has measured and that has a cluster."""
    site = Site(store_url, tmp_path / "spool")
    site.tags[1] = OwnedToken(A, ALICE)
    site.take(record(1))
    site.store.profiles.assign([Assignment(A, "V100", 2)])
    return site


@pytest.fixture
def hook(tmp_path: Path) -> HookFile:
    return HookFile(tmp_path / "hook.sqlite")


def told(hook: HookFile, site: Site) -> list[int | None]:
    """What the hook's file says of the workload's CPUs, as the helper brings it up to date."""
    hook.sync(site.store, NOW)
    with closing(sqlite3.connect(hook.path)) as file:
        return [cpus for (cpus,) in file.execute("SELECT cpus FROM workload")]


def curve(points: tuple[CpuSpeed, ...] = FOUR, named: str | None = A, **changes: object) -> Record:
    return command_record(1, named, cpu_curve=points, **changes)


def test_curve_of_the_owner_reaches_the_hook(site: Site, hook: HookFile) -> None:
    assert told(hook, site) == [None]
    site.take(curve(), uid=ALICE)
    assert told(hook, site) == [4]


def test_curve_without_a_token_counts_for_the_token_of_its_job(site: Site, hook: HookFile) -> None:
    site.take(curve(named=None), uid=ALICE)
    assert told(hook, site) == [4]


def test_curve_of_a_tokens_first_job_waits_for_the_nodes_record(site: Site, hook: HookFile) -> None:
    first = token(2)
    site.tags[2] = OwnedToken(first, ALICE)
    assert site.take(command_record(2, first, cpu_curve=FOUR), uid=ALICE) == {"final": 1}
    assert site.take(record(2)) == {"final": 1, "counted": 1, "outranked": 1}
    site.store.profiles.assign([Assignment(first, "V100", 2)])
    assert sorted(told(hook, site), key=str) == [4, None]


def test_who_writes_many_records_before_the_node_does_has_the_last_ones_kept(site: Site) -> None:
    first = token(2)
    site.tags[2] = OwnedToken(first, ALICE)
    many = [command_record(2, first, cpu_curve=FOUR) for _ in range(WAITING_OF_A_JOB + 3)]
    assert site.take(*many, uid=ALICE) == {"final": WAITING_OF_A_JOB + 3, "foreign": 3}


def test_curve_of_somebody_else_counts_nowhere(site: Site, hook: HookFile) -> None:
    site.take(curve(), curve(named=None), uid=BOB)
    assert told(hook, site) == [None]


def test_the_curve_measured_last_counts_in_whatever_order_they_arrive(site: Site, hook: HookFile) -> None:
    site.take(curve(TWO, end_s=NOW - 10), uid=ALICE)
    assert told(hook, site) == [2]
    site.take(curve(end_s=NOW - 20), uid=ALICE)
    assert told(hook, site) == [2]
    site.take(curve(end_s=NOW - 5), curve(TWO, end_s=NOW - 6), uid=ALICE)
    assert told(hook, site) == [4]


def test_record_without_a_curve_leaves_it(site: Site, hook: HookFile) -> None:
    site.take(curve(), uid=ALICE)
    site.take(command_record(1, A), uid=ALICE)
    assert told(hook, site) == [4]


def test_file_of_an_earlier_release_is_written_anew(site: Site, hook: HookFile) -> None:
    """A helper that has just started does that, whatever the file holds."""
    with closing(sqlite3.connect(hook.path)) as file, file:
        file.execute("CREATE TABLE workload (token TEXT PRIMARY KEY, uid INTEGER, cluster INTEGER)")
    site.take(curve(), uid=ALICE)
    hook.sync(site.store, NOW, anew=True)
    assert told(hook, site) == [4]


def test_file_with_other_columns_is_written_anew_by_the_first_change(site: Site, hook: HookFile) -> None:
    hook.sync(site.store, NOW)
    with closing(sqlite3.connect(hook.path)) as file, file:
        file.execute("DROP TABLE workload")
        file.execute(
            "CREATE TABLE workload (token TEXT PRIMARY KEY, uid INTEGER, cluster INTEGER NOT NULL, clusters, cpus)"
        )
    site.take(curve(), uid=ALICE)
    hook.sync(site.store, NOW)
    assert told(hook, site) == [4]


def test_curve_is_forgotten_with_its_workload(site: Site) -> None:
    site.take(curve(), uid=ALICE)
    with site.store.database.write() as connection:
        connection.exec_driver_sql("UPDATE workload SET created_s = 1")
        connection.exec_driver_sql("UPDATE profile SET updated_s = 1")
    prune(site.store, 1_700_000_000.0)
    assert sizes(site.store)["workload"] == 1, "a run of it is later"
    with site.store.database.write() as connection:
        connection.exec_driver_sql("UPDATE run SET end_s = 1")
    prune(site.store, 1_700_000_000.0)
    assert sizes(site.store)["workload"] == 0


def test_fewest_that_are_nearly_as_fast() -> None:
    assert enough_cpus(FOUR) == 4
    assert enough_cpus(TWO) == 2


def test_curve_survives_the_record() -> None:
    assert parse_record(encode_record(curve())).cpu_curve == FOUR


@pytest.mark.parametrize(
    "written",
    [
        "[]", "{}", "[4]", "[[4]]", "[[4,1.0,1]]", "[[0,1.0]]", "[[-4,1.0]]", "[[4.5,1.0]]", "[[10000,1.0]]",
        '[["4",1.0]]', "[[4,0.5]]", "[[4,1.5]]", "[[true,1.0]]", "[[4,NaN]]", "[" + ",".join(["[4,1.0]"] * 65) + "]",
    ],
)  # fmt: skip
def test_a_curve_that_cannot_be_is_refused(written: str) -> None:
    line = encode_record(curve((CpuSpeed(4, 1.0),)))
    assert "[[4,1.0]]" in line
    with pytest.raises(RecordError):
        parse_record(line.replace("[[4,1.0]]", written))


def test_a_node_measures_no_curve() -> None:
    with pytest.raises(RecordError, match="cpu_curve"):
        encode_record(replace(record(1), cpu_curve=FOUR))
