"""Cards under an MPS server: who may meet there, what is tried, and where its rates are kept."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from world import (
    ALICE,
    BESIDE_RESIDENT,
    NOW,
    NOWHERE,
    SETTINGS,
    Flat,
    Site,
    card,
    decide,
    node,
    occupant,
    pending,
    places,
    record,
    running,
    token,
)

from slurm_gpushare.helper.explain import Code
from slurm_gpushare.helper.learner import Learner
from slurm_gpushare.helper.observe import observe
from slurm_gpushare.helper.occupancy import GpuAddress
from slurm_gpushare.helper.queue_facts import QueueFacts, StoreReader
from slurm_gpushare.helper.snapshot import NodeRoom, Snapshot
from slurm_gpushare.helper.why_left import why_left
from slurm_gpushare.knowledge.rates import Knowledge, KnowledgeByModel
from slurm_gpushare.node.figures import run_figures
from slurm_gpushare.node.nvml import is_open
from slurm_gpushare.protocol.record import Mps, Neighbour, RecordError, RecordKind, encode_record, parse_record
from slurm_gpushare.protocol.settings import parse_config
from slurm_gpushare.protocol.tokens import OwnedToken
from slurm_gpushare.report.job_text import NOT_MEASURABLE, job_lines
from slurm_gpushare.report.job_view import JobView
from slurm_gpushare.store.published import PublicJob

A, B = token(1), token(2)
UNSURE = Flat(0.65, low=0.4)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(f"sqlite:///{tmp_path / 'store.sqlite'}", tmp_path / "spool")


def test_a_server_of_one_user_keeps_two_users_apart() -> None:
    theirs, mine = pending(), pending(user="ann")
    assert places(decide([card(occupant(), mps=Mps.ONE_USER)], [theirs])) == NOWHERE
    assert places(decide([card(occupant(), mps=Mps.ONE_USER)], [mine])) == BESIDE_RESIDENT
    assert places(decide([card(occupant(), mps=Mps.ALL_USERS)], [theirs])) == BESIDE_RESIDENT


def test_a_site_that_manages_mps_for_one_user_keeps_two_apart_before_a_server_is_seen() -> None:
    settings = replace(SETTINGS, mps="user")
    assert places(decide([card(occupant())], [pending()], settings=settings)) == NOWHERE
    assert places(decide([card(occupant())], [pending(user="ann")], settings=settings)) == BESIDE_RESIDENT
    assert places(decide([card(occupant())], [pending()], settings=replace(SETTINGS, mps="all"))) == BESIDE_RESIDENT


def test_nothing_is_tried_where_single_jobs_cannot_be_seen() -> None:
    tried = pending(limit_s=2000)
    assert places(decide([card(occupant())], [tried], knowledge=UNSURE)) == BESIDE_RESIDENT
    blind = card(occupant(), mps=Mps.ALL_USERS, blind=True)
    assert places(decide([blind], [tried], knowledge=UNSURE)) == NOWHERE
    assert places(decide([replace(blind, blind=False)], [tried], knowledge=UNSURE)) == BESIDE_RESIDENT
    assert places(decide([blind], [tried])) == BESIDE_RESIDENT, "what is known to go well needs no trial"


@pytest.mark.parametrize(
    ("gpu", "knowledge", "code"),
    [
        (card(occupant(), mps=Mps.ONE_USER), Flat(), Code.MPS_USER),
        (card(occupant(), mps=Mps.ALL_USERS, blind=True), UNSURE, Code.NOT_MEASURABLE),
    ],
)
def test_a_job_that_waits_is_told_so(gpu: object, knowledge: Flat, code: Code) -> None:
    job = pending(limit_s=2000)
    room = {"n1": NodeRoom("n1", 32, 100_000)}
    snapshot = Snapshot(NOW, (gpu,), room, (job,), mean_duration_s={1: 2000.0})  # type: ignore[arg-type]
    left = decide([gpu], [job], knowledge=knowledge).left  # type: ignore[list-item]
    assert why_left(snapshot, knowledge, SETTINGS, left)["p"].code is code


def test_rates_of_time_slices_say_nothing_of_mps() -> None:
    class ByName(KnowledgeByModel):
        def on(self, gpu_model: str) -> Knowledge:
            return Flat(0.9 if gpu_model == "v100" else 0.3)

    knows: object = ByName()
    slices, mps = card(occupant()), card(occupant("s"), index=1, mps=Mps.ALL_USERS)
    got = decide([mps, slices], [pending(), pending("q", mem_used_mib=4000)], knowledge=knows)  # type: ignore[arg-type]
    assert {key: place[1] for key, place in places(got).items()} == {"p": 0}


def test_what_is_seen_under_mps_is_learned_for_mps_alone(site: Site) -> None:
    for job, name in enumerate((A, B), start=1):
        site.tags[job] = OwnedToken(name, ALICE)
        site.take(record(job, util=50.0, mem_pct=20.0))  # 600 s alone
    site.tags[3] = OwnedToken(A, ALICE)
    beside = (Neighbour(2, 1000.0),)
    site.take(record(3, shared=True, seconds=1000.0, neighbours=beside, mps=Mps.ALL_USERS, blind=True))
    slices, mps = Learner(site.store), Learner(site.store, "V100MPS")
    assert slices.catch_up() == 0
    assert mps.catch_up() == 1
    (seen,) = site.store.observations.after(0)
    assert (seen.gpu_model, seen.rate) == ("V100MPS", pytest.approx(0.6)), "elapsed times count also where it is blind"
    before = Learner(site.store)
    before.catch_up()
    assert before.knowledge.observations == 0
    assert mps.knowledge.rates([A], [B]).mean[0, 0] != before.knowledge.rates([A], [B]).mean[0, 0]


def test_what_a_node_says_of_its_card_is_known_until_it_says_otherwise(site: Site) -> None:
    reader = StoreReader(site.store)

    def told(seq: int, mps: Mps | None, blind: bool) -> tuple[object, object]:
        now = {"kind": RecordKind.INTERIM, "seq": seq, "run_id": "5" * 32, "end_s": NOW + seq}
        site.take(record(5, mps=mps, blind=blind, **now))  # type: ignore[arg-type]
        facts = reader.read([], {}, {}, NOW, ["v100"])
        return dict(facts.mps), facts.blind

    there = GpuAddress("gpu0", 0)
    assert told(1, Mps.ONE_USER, blind=True) == ({there: Mps.ONE_USER}, {there})
    assert told(2, Mps.ONE_USER, blind=False) == ({there: Mps.ONE_USER}, set())
    assert told(3, None, blind=False) == ({}, set())


def test_a_server_in_fault_takes_nobody_and_both_owners_are_told_once(site: Site) -> None:
    reader, there = StoreReader(site.store), GpuAddress("gpu0", 0)

    def told(mps: Mps, *running_jobs: int) -> tuple[bool, list[tuple[int, str]]]:
        jobs = [running(str(job), "gpu0", "gres/shard:v100_0:1") for job in running_jobs]
        for job in running_jobs:
            site.take(record(job, kind=RecordKind.INTERIM, run_id=str(job) * 32, end_s=NOW, mps=mps, seq=next(seq)))
        facts, heard = reader.read(jobs, {}, {}, NOW, ["v100"]), list(reader.to_tell)
        reader.to_tell.clear()
        return there in facts.one_process, heard

    seq = count(1)
    assert told(Mps.ALL_USERS, 5, 6) == (False, [])
    assert told(Mps.NOBODY, 5, 6) == (True, [(5, "mps-fault"), (6, "mps-fault")])
    assert told(Mps.NOBODY, 5, 6) == (True, [])
    assert told(Mps.ALL_USERS, 6) == (False, []), "job 5 has left"
    assert told(Mps.NOBODY, 5) == (True, []), "an older record of its neighbour's takes nothing back"
    assert told(Mps.NOBODY, 6) == (True, [(6, "mps-fault")]), "it is started anew once all have left"
    assert told(Mps.NOBODY) == (False, [])


@pytest.mark.parametrize(("ended_s", "open_"), [(NOW - 1, True), (NOW - 5, False)])
def test_nobody_joins_a_client_whose_neighbour_is_being_killed(ended_s: int, open_: bool) -> None:
    """What does not end within an epilog's time does not obey, and may take the other client along."""
    stays = running("1", "n0", "gres/shard:v100_0:1", tag=f"GS1:c=1;t={A};o=gpu:1")
    ending = running("2", "n0", "gres/shard:v100_0:1", state="COMPLETING", end_s=ended_s)
    there, config = GpuAddress("n0", 0), parse_config("Partitions=gpu")
    under_mps = QueueFacts(mps={there: Mps.ALL_USERS})
    look = node(used="gpu:v100_0:1(IDX:0),shard:v100_0:2(2/2)")
    seen = [
        observe([stays, ending], [look], config, facts, NOW).snapshot.gpus[0] for facts in (under_mps, QueueFacts())
    ]
    assert [not gpu.exclusive_process for gpu in seen] == [open_, True]


def test_a_record_names_the_server_in_known_words() -> None:
    told = record(5, mps=Mps.ONE_USER, blind=True)
    assert parse_record(encode_record(told)) == told
    with pytest.raises(RecordError, match="mps"):
        parse_record(encode_record(told).replace("one-user", "alice"))
    assert "mps" not in encode_record(record(5))


def test_exclusive_process_is_right_under_mps_and_wrong_without() -> None:
    default, prohibited, exclusive = 0, 2, 3
    assert [is_open(mode, mps=False) for mode in (default, prohibited, exclusive)] == [True, False, False]
    assert [is_open(mode, mps=True) for mode in (default, prohibited, exclusive)] == [True, False, True]


def test_owners_are_told_that_nobody_keeps_their_promise_there() -> None:
    view = JobView("7", 7, 1, "gpu", "RUNNING", 0, 0, None, 60.0, 60.0)
    assert NOT_MEASURABLE not in "\n".join(job_lines(view, (), "", bars=False))
    by_record = replace(view, run=run_figures(record(7, mps=Mps.ALL_USERS, blind=True)))
    by_helper = replace(view, live=PublicJob("7", 7, card="n1:0", beside=8, blind=True))
    for told in (by_record, by_helper):
        assert NOT_MEASURABLE in " ".join("\n".join(job_lines(told, (), "", bars=False)).split())
