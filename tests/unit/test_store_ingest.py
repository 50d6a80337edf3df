from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from world import ALICE, BOB, NOW, Site, command_record, record, seal, token

from slurm_gpushare.helper.housekeeping import Housekeeping
from slurm_gpushare.helper.occupancy import GpuAddress
from slurm_gpushare.helper.queue_facts import StoreReader
from slurm_gpushare.protocol.errors import GpushareError
from slurm_gpushare.protocol.history import Decision
from slurm_gpushare.protocol.record import RecordKind, encode_record
from slurm_gpushare.protocol.tokens import OwnedToken
from slurm_gpushare.store.credential import MungeDown, Sealed
from slurm_gpushare.store.ingest import Ingest
from slurm_gpushare.store.maintenance import clock_doubt
from slurm_gpushare.store.spool import Arrival, read_record
from slurm_gpushare.store.stored_jobs import EVER

A, B = token(1), token(2)


@pytest.fixture
def site(store_url: str, tmp_path: Path) -> Site:
    return Site(store_url, tmp_path / "spool")


def test_a_nodes_record_becomes_the_profile_of_the_jobs_token(site: Site) -> None:
    site.tags[1] = OwnedToken(A, ALICE)
    assert site.take(record(1, util=60.0)) == {"final": 1, "counted": 1}
    profile = site.store.profiles.get(A)
    assert profile is not None
    assert (profile.owner_uid, profile.runs, profile.gpu_model, profile.generation) == (ALICE, 1, "V100", 1)
    assert (profile.mem_used_mib, profile.mem_total_mib, profile.duration_s) == (4000, 16384, 600.0)
    assert profile.features["mgup"] == 60.0
    assert profile.features["power_w_mean"] == 60.0
    assert profile.cluster is None
    assert [p.token for p in site.store.profiles.unassigned()] == [A]
    assert list(site.incoming.iterdir()) == []


def test_the_same_record_counts_once_however_often_it_arrives(site: Site) -> None:
    site.tags[1] = OwnedToken(A, ALICE)
    made = record(1)
    site.take(made, made)
    assert site.take(made) == {"duplicate": 1}
    assert site.take(replace(made, record_id="0" * 32)) == {"duplicate": 1}
    profile = site.store.profiles.get(A)
    assert profile is not None
    assert profile.runs == 1
    assert len(site.store.runs.of_tokens([A])) == 1


def test_a_later_record_of_the_same_run_replaces_the_earlier(site: Site) -> None:
    site.tags[1] = OwnedToken(A, ALICE)
    made = record(1, util=40.0)
    site.take(made)
    site.take(replace(made, seq=10, end_s=made.end_s + 30))
    (run,) = site.store.runs.of_tokens([A])
    assert run.end_s == made.end_s + 30
    profile = site.store.profiles.get(A)
    assert profile is not None
    assert profile.runs == 1


def test_a_record_waits_until_slurm_knows_its_job(site: Site) -> None:
    assert site.take(record(7)) == {"final": 1}
    assert site.ingest.run(NOW + 1).waiting == 1
    assert site.store.profiles.get(A) is None
    site.tags[7] = OwnedToken(A, ALICE)
    assert site.ingest.run(NOW + 100).counts["counted"] == 1
    assert site.store.profiles.get(A) is not None


def test_slurm_is_asked_about_an_unknown_job_ever_more_rarely(site: Site) -> None:
    site.take(record(7))
    asked_at = []
    for second in range(1, 100):
        site.tags.asked = None
        site.ingest.run(NOW + second)
        if site.tags.asked:
            asked_at.append(second)
    assert asked_at == [5, 15, 35, 75]


def test_a_record_that_waited_thirty_days_is_kept_but_asked_for_no_more(site: Site) -> None:
    site.take(record(7))
    site.ingest.run(NOW + 31 * 86400)
    assert "unresolved" not in site.store.counters.all(), "no node has said anything since: the clock may have jumped"
    site.tags[8] = OwnedToken(A, ALICE)
    site.spool(record(8, end_s=NOW + 31 * 86400))
    site.ingest.run(NOW + 31 * 86400)
    site.tags.asked = None
    summary = site.ingest.run(NOW + 40 * 86400)
    assert (summary.waiting, site.tags.asked) == (0, None)
    assert site.store.counters.all()["unresolved"] == 1


def test_slurm_being_down_loses_nothing(site: Site) -> None:
    def down(job_ids: object) -> dict[int, OwnedToken]:
        raise GpushareError("squeue: no controller")

    broken = Ingest(site.store, site.spool_dir, site.ingest._open, down)
    site.spool(record(1))
    broken.run(NOW)
    site.tags[1] = OwnedToken(A, ALICE)
    assert site.ingest.run(NOW + 10).counts["counted"] == 1


def test_nothing_is_kept_of_a_job_without_a_token_but_that_it_was(site: Site) -> None:
    site.tags[1] = OwnedToken(None, ALICE)
    made = record(1)
    assert site.take(made) == {"final": 1, "untokened": 1}
    assert site.store.runs.of_job(1) == []
    assert list(site.store.profiles.all()) == []
    assert site.store.counters.all()["untokened"] == 1
    assert site.take(made) == {"duplicate": 1}


def test_the_first_job_of_a_token_owns_it(site: Site) -> None:
    site.tags.update({1: OwnedToken(A, ALICE), 2: OwnedToken(A, BOB)})
    assert site.take(record(2), record(1)) == {"final": 2, "counted": 1, "foreign": 1}
    profile = site.store.profiles.get(A)
    assert profile is not None
    assert (profile.owner_uid, profile.runs) == (ALICE, 1)


def test_many_jobs_are_settled_like_few(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slurm_gpushare.store.statements.AT_ONCE", 2)
    tags = {1: (B, ALICE), 2: (None, BOB), 3: (A, BOB), 4: (B, BOB), 5: (None, ALICE), 6: (A, ALICE), 7: (B, ALICE)}
    site.tags.update({job: OwnedToken(*tag) for job, tag in tags.items()})
    assert site.take(*map(record, tags)) == {"final": 7, "counted": 3, "foreign": 2, "untokened": 2}
    profiles = {profile.token: (profile.owner_uid, profile.runs) for profile in site.store.profiles.all()}
    assert profiles == {A: (BOB, 1), B: (ALICE, 2)}


def test_a_user_cannot_change_another_users_profile(site: Site) -> None:
    site.tags.update({1: OwnedToken(A, ALICE), 2: OwnedToken(None, BOB)})
    site.take(record(1, util=60.0))
    assert site.take(command_record(2, token=A, util=1.0), uid=BOB) == {"final": 1, "foreign": 1}
    assert site.take(command_record(1, util=1.0), uid=BOB) == {"final": 1, "foreign": 1}
    profile = site.store.profiles.get(A)
    assert profile is not None
    assert (profile.runs, profile.features["mgup"]) == (1, 60.0)


def test_a_user_cannot_speak_for_a_node(site: Site) -> None:
    site.tags[1] = OwnedToken(A, ALICE)
    (path,) = site.spool(record(1), uid=ALICE)
    assert site.ingest.run(NOW).counts["rejected"] == 1
    rejected = site.spool_dir / "rejected"
    (reason,) = rejected.glob("*.reason")
    assert reason.read_text() == "a job's record that no node vouches for\n"
    assert [kept.suffix for kept in rejected.iterdir() if kept != reason] == [".rec"]
    assert not path.exists()


def test_another_user_cannot_use_up_the_id_of_a_nodes_record(site: Site) -> None:
    site.tags[1] = OwnedToken(A, ALICE)
    made = record(1)
    forged = command_record(1, token=B, run_id=made.run_id, record_id=made.record_id, seq=1000)
    site.take(forged, uid=BOB)
    assert site.take(made) == {"final": 1, "counted": 1}


def test_a_user_cannot_found_a_profile_nor_claim_a_token(site: Site) -> None:
    """A forged "3 %, 300 MiB" without any job would let anything sit beside others as a harmless guest."""
    site.tags[1] = OwnedToken(None, ALICE)
    harmless = command_record(1, token=B, util=3.0, mem_mib=300.0)
    assert site.take(harmless, uid=ALICE) == {"final": 1, "foreign": 1}
    assert site.store.workloads.owners_by_token([B]) == {}, "a token seen in squeue stays its owner's"
    site.store.workloads.claim({B: ALICE})  # as the helper does when a job brings it
    assert site.take(replace(harmless, run_id="1" * 32), uid=ALICE) == {"final": 1, "kept": 1}
    assert site.store.profiles.get(B) is None


def test_a_users_record_that_waits_for_its_node_outlasts_a_slurm_that_does_not_answer(site: Site) -> None:
    def down(jobs: Sequence[int]) -> dict[int, OwnedToken]:
        raise GpushareError("slurmctld does not answer")

    site.tags[1] = OwnedToken(A, ALICE)
    assert site.take(command_record(1, token=A), uid=ALICE) == {"final": 1}
    Ingest(site.store, site.spool_dir, site.ingest._open, down).run(NOW + 1)
    assert not +site.ingest.run(NOW + 2).counts, "nothing came of it yet"
    site.spool(record(1))
    assert site.ingest.run(NOW + 100).counts["outranked"] == 1, "it was not lost"


def test_slurm_is_not_asked_at_every_look_about_a_record_that_waits_for_its_node(site: Site) -> None:
    asked: list[int] = []

    def tags(jobs: Sequence[int]) -> dict[int, OwnedToken]:
        asked.extend(jobs)
        return {1: OwnedToken(A, ALICE)}

    ingest = Ingest(site.store, site.spool_dir, site.ingest._open, tags, gpu_models=["V100"])
    site.spool(command_record(1, token=A), uid=ALICE)
    for second in range(10):
        ingest.run(NOW + second)
    assert len(asked) == 2, "at once, and after five seconds"


def test_a_users_own_record_refines_what_a_node_has_measured(site: Site) -> None:
    site.tags.update({1: OwnedToken(A, ALICE), 2: OwnedToken(None, ALICE)})
    site.take(record(1, util=30.0))
    assert site.take(command_record(2, token=A, util=36.0), uid=ALICE) == {"final": 1, "counted": 1}
    profile = site.store.profiles.get(A)
    assert profile is not None
    assert (profile.features["mgup"], profile.runs, profile.duration_s) == (33.0, 2, 600.0)


def test_users_records_do_not_move_a_profile_away_from_what_nodes_measured(site: Site) -> None:
    site.tags.update({1: OwnedToken(A, ALICE), 2: OwnedToken(None, ALICE)})
    site.take(record(1, util=60.0, mem_mib=9000.0))
    assert site.take(command_record(2, token=A, util=3.0), uid=ALICE) == {"final": 1, "kept": 1}
    for _ in range(20):
        site.take(command_record(2, token=A, util=46.0, mem_mib=4000.0), uid=ALICE)
    profile = site.store.profiles.get(A)
    assert profile is not None
    assert (profile.features["mgup"], profile.mem_used_mib, profile.generation) == (53.0, 9000, 1)
    assert profile.features["mem_used_mib"] == 9000.0


@pytest.mark.parametrize("node_first", [True, False])
def test_a_nodes_record_outranks_the_users_of_the_same_job(site: Site, node_first: bool) -> None:
    site.tags[1] = OwnedToken(A, ALICE)
    node, user = (record(1, util=60.0), 0), (command_record(1, util=55.0), ALICE)
    for made, uid in (node, user) if node_first else (user, node):
        site.take(made, uid=uid)
    assert [run.by_node for run in site.store.runs.of_tokens([A])] == [True]
    profile = site.store.profiles.get(A)
    assert profile is not None
    assert profile.features["mgup"] == 60.0
    assert profile.runs == 1


def test_cards_for_a_single_process_are_known_until_their_mode_changes(site: Site) -> None:
    reader = StoreReader(site.store)

    def told(seq: int, one_process: bool) -> frozenset[GpuAddress]:
        site.take(
            record(5, kind=RecordKind.INTERIM, seq=seq, run_id="5" * 32, end_s=NOW + seq, one_process=one_process)
        )
        return reader.read([], {}, {}, NOW, ["v100"]).one_process

    assert told(1, one_process=True) == {GpuAddress("gpu0", 0)}
    assert told(2, one_process=False) == set()


def test_a_card_that_is_not_sound_is_out_of_sharing_and_its_jobs_are_told_once(site: Site) -> None:
    reader = StoreReader(site.store)

    def off(seq: int, unsound: bool) -> tuple[frozenset[GpuAddress], list[tuple[int, str]]]:
        site.take(record(5, kind=RecordKind.INTERIM, seq=seq, run_id="5" * 32, end_s=NOW + seq, unsound=unsound))
        facts, told = reader.read([], {}, {}, NOW, ["v100"]), list(reader.to_tell)
        reader.to_tell.clear()
        return facts.off, told

    assert off(1, unsound=True) == ({GpuAddress("gpu0", 0)}, [(5, "card-fault")])
    assert off(2, unsound=True) == ({GpuAddress("gpu0", 0)}, [])
    assert off(3, unsound=False) == (set(), [])


def test_interim_records_replace_each_other_and_go_when_the_job_ends(site: Site) -> None:
    final = record(5)
    first, second = (replace(final, kind=RecordKind.INTERIM, seq=seq, end_s=final.start_s + 30 * seq) for seq in (1, 2))
    site.take(first, second)
    site.take(first)
    assert site.store.live.of_jobs([5, 6]) == {5: second}
    assert site.store.live.since(second.end_s) == [second]
    site.take(final)
    assert site.store.live.of_jobs([5]) == {}
    site.take(second)
    assert site.store.live.of_jobs([5]) == {}


def test_a_requeued_job_shows_its_new_run(site: Site) -> None:
    old = record(5, kind=RecordKind.INTERIM, seq=50, end_s=NOW - 500)
    new = record(5, kind=RecordKind.INTERIM, seq=1, end_s=NOW - 20)
    site.take(old)
    site.take(new)
    site.take(replace(old, seq=51))
    assert site.store.live.of_jobs([5]) == {5: new}


def test_the_last_interim_record_speaks_for_a_sampler_that_died(site: Site) -> None:
    site.tags[5] = OwnedToken(A, ALICE)
    interim = record(5, kind=RecordKind.INTERIM, seq=3, end_s=NOW - 30)
    site.take(interim)
    assert site.store.profiles.get(A) is None
    site.ingest.run(NOW + 600)
    site.ingest.run(NOW + 1200)
    assert site.store.profiles.get(A) is not None
    assert site.store.live.of_jobs([5]) == {}


def test_a_record_that_comes_after_all_takes_the_place_of_the_last_interim_one(site: Site) -> None:
    site.tags[5] = OwnedToken(A, ALICE)
    made = record(5, kind=RecordKind.INTERIM, seq=3, end_s=NOW - 30)
    site.take(made)
    site.ingest.run(NOW + 1200)
    site.spool(replace(made, seq=4, end_s=NOW + 1190))
    site.ingest.run(NOW + 1210)
    assert site.store.live.of_jobs([5])[5].seq == 4, "it is running again"
    site.spool(replace(made, kind=RecordKind.FINAL, seq=5, end_s=NOW + 1300))
    site.ingest.run(NOW + 1310)
    profile = site.store.profiles.get(A)
    assert profile is not None
    assert (profile.runs, site.store.live.of_jobs([5])) == (1, {})


def test_a_clock_two_days_behind_rejects_nothing(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is too new waits where it is, in the spool and in the database."""
    clock = [1000.0]
    monkeypatch.setattr("slurm_gpushare.store.ingest.time.monotonic", lambda: clock[0])
    site.tags.update({job: OwnedToken(A, ALICE) for job in (1, 2, 3)})
    site.spool(record(1), record(2))
    site.store.inbox.deliver(seal(record(3)))
    for _ in range(2):
        counts = site.ingest.run(NOW - 2 * 86400).counts
        assert (counts["rejected"], counts["final"]) == (0, 0)
    assert len(list(site.incoming.iterdir())) == 2
    clock[0] += 61.0
    assert site.ingest.run(NOW).counts["counted"] == 3


def test_a_look_three_years_ahead_ends_and_forgets_nothing(site: Site) -> None:
    site.tags[1] = OwnedToken(A, ALICE)
    site.take(record(1), record(5, kind=RecordKind.INTERIM, seq=3), record(7))
    site.store.decisions.add([Decision(1, NOW - 60, "placed"), Decision(2, NOW - 50, "placed")])
    ahead_s = NOW + 3 * 365 * 86400
    site.ingest.run(ahead_s)
    assert site.store.live.of_jobs([5]), "its sampler has not been silent"
    assert "unresolved" not in site.store.counters.all()
    Housekeeping(site.store).look_after(365, ahead_s)
    assert len(site.store.decisions.of_jobs({1: EVER, 2: EVER})) == 2
    site.tags[7] = OwnedToken(A, ALICE)
    site.ingest.run(NOW + 5)
    assert site.store.counters.all()["counted"] == 2, "and Slurm is asked again"


def test_a_clock_that_others_contradict_is_named(site: Site) -> None:
    site.tags[1] = OwnedToken(A, ALICE)
    site.take(record(1))
    assert "2.0 days behind slurmctld" in clock_doubt(site.store.database, NOW - 172_800, NOW)
    if site.store.database.is_sqlite:
        assert clock_doubt(site.store.database, NOW) == ""
        assert "the newest record of a node" in clock_doubt(site.store.database, NOW - 172_800)
    else:
        assert "the database" in clock_doubt(site.store.database, time.time() + 172_800)


def test_interim_records_of_users_are_of_no_use(site: Site) -> None:
    assert site.take(command_record(5, token=A, kind=RecordKind.INTERIM), uid=ALICE) == {"ignored": 1}
    assert list(site.incoming.iterdir()) == []


def test_records_may_come_through_the_database(site: Site) -> None:
    site.tags[1] = OwnedToken(A, ALICE)
    made = record(1)
    site.store.inbox.deliver(seal(made))
    site.store.inbox.deliver(seal(made))
    site.store.inbox.deliver(b"nonsense")
    summary = site.ingest.run(NOW)
    assert {name: n for name, n in summary.counts.items() if n} == {
        "final": 1, "duplicate": 1, "rejected": 1, "counted": 1,
    }  # fmt: skip
    assert site.store.inbox.take(10) == []


def test_munge_being_down_leaves_everything_where_it_is(site: Site) -> None:
    def down(credential: bytes) -> Sealed:
        raise MungeDown("munge: munged does not answer")

    paths = site.spool(record(1), record(2))
    with pytest.raises(MungeDown):
        Ingest(site.store, site.spool_dir, down, site.tags).run(NOW)
    assert sorted(site.incoming.iterdir()) == sorted(paths)


def test_what_is_no_record_goes_to_rejected_with_a_reason(site: Site, tmp_path: Path) -> None:
    good = record(1)
    body = json.loads(encode_record(good))
    cases = {
        "not-munge": b"hello",
        "not-json": seal("hello"),
        "unknown-field": seal(json.dumps({**body, "job_name": "secret-project"})),
        "bad-node": seal(json.dumps({**body, "node": "/home/alice"})),
        "nan": seal(encode_record(good).replace("600.0", "NaN", 1)),
        "empty": b"",
        "huge": b"0:" + b"x" * 300_000,
    }
    for name, content in cases.items():
        (site.incoming / f"{name}.rec").write_bytes(content)
    (site.incoming / "link.rec").symlink_to("/etc/passwd")
    (site.incoming / "directory.rec").mkdir()
    os.mkfifo(site.incoming / "pipe.rec")
    (site.incoming / "unfinished.tmp").write_text("being written")
    counts = site.ingest.run(NOW).counts
    assert (counts["rejected"], counts["stray"]) == (len(cases) + 2, 1)
    assert [path.name for path in site.incoming.iterdir()] == ["unfinished.tmp"]
    rejected = site.spool_dir / "rejected"
    reasons = [path.read_text() for path in rejected.glob("*.reason")]
    assert len(reasons) == len(cases) + 2
    assert all(reason.count("\n") == 1 and len(reason) > 5 for reason in reasons)
    assert all(path.is_file() and not path.is_symlink() for path in rejected.iterdir())
    assert "secret-project" not in "".join(reasons)


def test_a_batch_larger_than_one_transaction_arrives_whole(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slurm_gpushare.store.ingest.BATCH", 7)
    for job in range(1, 31):
        site.tags[job] = OwnedToken(token(job % 5), ALICE)
    assert site.take(*(record(job) for job in range(1, 31)))["counted"] == 30
    assert sorted(profile.runs for profile in site.store.profiles.all()) == [6] * 5


def test_a_record_that_took_the_place_of_the_one_just_read_is_not_lost(site: Site) -> None:
    """A sampler writes each interim record under the same name."""
    first = record(5, kind=RecordKind.INTERIM, seq=1)
    second = replace(first, seq=2, end_s=first.end_s + 30)
    (path,) = site.spool(first)
    before = [read_record(found) for found in site.ingest._spool.look()]
    newer = path.with_suffix(".tmp")
    newer.write_bytes(seal(second))
    newer.rename(path)
    (arrival,) = before
    assert isinstance(arrival, Arrival)
    site.ingest._spool.done(arrival)
    site.ingest.run(NOW)
    assert site.store.live.of_jobs([5]) == {5: second}
