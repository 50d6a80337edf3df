"""Models, knowledge, observations, decisions, sharing: what is put in comes out, in order and once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from world import ALICE, BOB, NOW, token

from slurm_gpushare.protocol.history import Decision, Span
from slurm_gpushare.store import Store
from slurm_gpushare.store.sharing import BAN_S, Observation
from slurm_gpushare.store.stored_jobs import EVER

A, B, C = token(1), token(2), token(3)


@pytest.fixture
def store(store_url: str) -> Iterator[Store]:
    with Store.create(store_url) as store:
        yield store


def test_the_first_who_claims_a_token_owns_it(store: Store) -> None:
    assert store.workloads.claim({A: ALICE}) == {A: ALICE}
    assert store.workloads.claim({A: BOB}) == {A: ALICE}


def test_the_latest_model_of_a_gpu_model_is_in_force(store: Store) -> None:
    assert store.knowledge.clusters("V100") == (0, {})
    for k in range(1, 12):
        store.knowledge.save_clusters("V100", {"k": k})
    store.knowledge.save_clusters("A100", {"k": 5})
    assert store.knowledge.clusters("V100") == (11, {"k": 11})


def test_knowledge_is_replaced_by_name(store: Store) -> None:
    store.knowledge.put({"kb/V100": {"a": 1.5}, "kb/P100": {"b": 2}})
    store.knowledge.put({"kb/V100": {"a": 2.5}})
    assert store.knowledge.get("kb/V100") == {"a": 2.5}
    assert store.knowledge.get("kb/A100") is None
    assert store.knowledge.get("kb/P100") == {"b": 2}


def test_an_observation_of_the_same_source_counts_once(store: Store) -> None:
    seen = Observation("elapsed:12", "V100", A, B, 0.8, 4.0, 1000)
    assert store.observations.add([seen, seen]) == 1
    assert store.observations.add([seen, Observation("elapsed:13", "V100", B, A, 0.7, 4.0, 1001)]) == 1
    first, second = store.observations.after(0)
    assert (first.source, second.victim, second.rate) == ("elapsed:12", B, 0.7)
    assert store.observations.after(first.id) == [second]


def test_decisions_come_back_oldest_first_with_their_reasons(store: Store) -> None:
    placed = Decision(7, 100, "placed", "gpu1", 2, 5, 0.8, {"because": ["fits"], "isd_pct": 25.0})
    store.decisions.add([Decision(7, 90, "waits"), placed, Decision(8, 100, "alone")])
    assert store.decisions.of_jobs({7: EVER}) == [Decision(7, 90, "waits"), placed]
    assert [decision.job_id for decision in store.decisions.between(100, 200)] == [7, 8]


def test_a_span_of_sharing_lasts_until_it_is_ended(store: Store) -> None:
    span = Span(1, 2, A, B, "gpu0", 3, "V100", start_s=100, resident_rate=0.9, guest_rate=0.7)
    store.sharing.begin([span])
    store.sharing.begin([span])
    (open_span,) = store.sharing.open()
    store.sharing.end({open_span.id: 200})
    store.sharing.seen({open_span.id: 0.88}, {open_span.id: 0.72})
    assert store.sharing.open() == []
    (ended,) = store.sharing.of_jobs({2: EVER})
    assert (ended.end_s, ended.resident_rate_seen, ended.guest_rate_seen) == (200, 0.88, 0.72)
    assert list(store.sharing.between(150, 160)) == [ended]
    assert list(store.sharing.between(200, 300)) == []


def test_a_ban_has_no_order(store: Store) -> None:
    store.sharing.ban(B, A, now_s=1000)
    store.sharing.ban(A, B, now_s=1001)
    assert store.sharing.banned(2000) == {(A, B)}
    assert store.sharing.banned(1000 + BAN_S) == set(), "it fades"
    store.sharing.ban(A, B, now_s=8000)
    assert store.sharing.banned(1000 + BAN_S) == {(A, B)}, "unless it happens again"
    assert store.sharing.lift(B) == 1
    assert store.sharing.banned(2000) == set()


def test_heartbeats_have_names(store: Store) -> None:
    assert store.live.heartbeat_s() is None
    store.live.beat(at_s=NOW)
    store.live.beat(at_s=NOW + 1)
    store.live.beat("watchdog", at_s=NOW - 1)
    assert (store.live.heartbeat_s(), store.live.heartbeat_s("watchdog")) == (NOW + 1, NOW - 1)
