"""A job that is no longer what was measured: found from two records running, and measured anew."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from world import ALICE, BOB, NOW, Site, command_record, record, running, token

from slurm_gpushare.helper import learner
from slurm_gpushare.helper.cluster_assignment import user_weights
from slurm_gpushare.helper.profile_check import ProfileCheck, ProfileWatch, spare_memory_pct
from slurm_gpushare.knowledge.clusters import fit_clusters
from slurm_gpushare.protocol.record import Neighbour, Period, Record, RecordKind, Stat
from slurm_gpushare.protocol.settings import parse_config
from slurm_gpushare.protocol.tokens import OwnedToken
from slurm_gpushare.store.hookfile import PART_OF_HEADROOM, HookFile
from slurm_gpushare.store.sharing import Observation
from slurm_gpushare.store.workloads import Assignment, Profile

A = token(1)


def profile(util: float = 3.0, mem_mib: int = 300, sd: float = 1.0, scatter: float = 0.0) -> Profile:
    return Profile(
        A, "V100", ALICE, 1, 2, mem_mib, 16384, 600.0,
        {"gpu_util_mean_pct": util, "gpu_util_sd_pct": sd, "mem_access_mean_pct": 50.0},
        {"gpu_util_mean_pct": scatter}, 1, 0,
    )  # fmt: skip


def interim(seq: int, *means: float, mem_mib: float = 300.0, run_id: str = "a" * 32, job_id: int = 7) -> Record:
    """The record of a shared run after `means`, each over sixty samples."""
    n = 60 * len(means)
    stat = Stat(n, max(means), sum(means) / len(means), min(means), max(means), 0.0)
    return replace(
        record(job_id, mem_mib=mem_mib, shared=True),
        kind=RecordKind.INTERIM, run_id=run_id, seq=seq, shared=Period(0.0, 30.0 * len(means), {"gpu_util_pct": stat}),
    )  # fmt: skip


def past(check: ProfileCheck, *records: Record, of: Profile | None = None) -> list[str]:
    found = check.look(records, {7: of or profile()}, 5.0)
    return [str(excess) for excess in found.values()]


def test_two_records_running_past_the_profile_are_needed() -> None:
    check = ProfileCheck()
    assert past(check, interim(1, 97.0)) == []
    assert past(check, interim(1, 97.0)) == [], "the same record again is no second one"
    assert past(check, interim(2, 97.0, 3.0)) == []
    assert past(check, interim(3, 97.0, 3.0, 97.0)) == [], "not twice in a row"
    assert past(check, interim(4, 97.0, 3.0, 97.0, 97.0)) == ["gpu_util_mean_pct is 97, measured was 3"]
    assert past(check, interim(5, 97.0, 3.0, 97.0, 97.0, 97.0)) == [], "a job is told of once"


def test_memory_past_the_headroom_counts_too() -> None:
    check = ProfileCheck()
    assert past(check, interim(1, 3.0, mem_mib=1100.0), interim(2, 3.0, 3.0, mem_mib=1100.0)) == []
    grown = [interim(3, 3.0, 3.0, 3.0, mem_mib=13_000.0), interim(4, 3.0, 3.0, 3.0, 3.0, mem_mib=13_000.0)]
    assert past(check, *grown) == ["mem_used_mib is 13000, measured was 300"]


def test_a_client_of_mps_is_measured_anew_before_it_fails_at_its_limit() -> None:
    settings = {mps: parse_config(f"Mps={mps}") for mps in ("off", "user")}
    assert spare_memory_pct(settings["off"]) == settings["off"].memory_headroom_pct
    assert spare_memory_pct(settings["user"]) < PART_OF_HEADROOM * settings["user"].memory_headroom_pct


@pytest.mark.parametrize("wide", [profile(50.0, sd=20.0), profile(50.0, scatter=7.0), profile(60.0)])
def test_the_profiles_own_spread_is_no_excess(wide: Profile) -> None:
    check = ProfileCheck()
    assert past(check, interim(1, 74.0), interim(2, 74.0, 74.0), of=wide) == []


def test_a_record_with_few_samples_waits_for_the_next() -> None:
    """A site that samples rarely has a sample or two in each record."""
    check, found = ProfileCheck(), []
    for seq in range(1, 12):
        stat = Stat(seq, 97.0, 97.0, 97.0, 97.0, 0.0)
        found += past(check, replace(interim(seq, 97.0), shared=Period(0.0, 30.0 * seq, {"gpu_util_pct": stat})))
    assert len(found) == 1


def test_a_requeued_job_begins_anew() -> None:
    check = ProfileCheck()
    assert past(check, interim(1, 97.0)) == []
    assert past(check, interim(1, 97.0, run_id="b" * 32)) == []


def final(record: Record) -> Record:
    return replace(record, kind=RecordKind.FINAL)


def test_a_run_too_short_for_two_interim_records_is_judged_by_its_final_one() -> None:
    check = ProfileCheck()
    assert past(check, interim(1, 97.0)) == []
    assert check.look([], {}, 5.0) == {}, "it is gone from the queue"
    assert str(check.ended(final(interim(2, 97.0, 97.0)), profile(), 5.0)) == "gpu_util_mean_pct is 97, measured was 3"
    fine = ProfileCheck()
    assert past(fine, interim(1, 97.0)) == []
    assert fine.ended(final(interim(2, 97.0, 3.0)), profile(), 5.0) is None, "not twice in a row"


def test_two_short_runs_in_a_row_past_the_profile_are_needed() -> None:
    check = ProfileCheck()
    ends = [
        check.ended(final(interim(1, mean, job_id=job)), profile(), 5.0) for job, mean in enumerate((97, 3, 97, 97))
    ]
    assert [why is not None for why in ends] == [False, False, False, True]


def test_a_run_that_was_watched_is_not_judged_again_by_its_end() -> None:
    check = ProfileCheck()
    assert past(check, interim(1, 97.0), interim(2, 97.0, 3.0)) == []
    assert check.ended(final(interim(3, 97.0, 3.0, 97.0)), profile(), 5.0) is None
    assert check.ended(final(interim(1, 97.0, job_id=8)), profile(), 5.0) is None, "it left nothing behind"


@pytest.fixture
def site(store_url: str, tmp_path: Path) -> Site:
    site = Site(store_url, tmp_path / "spool")
    site.tags.update({job: OwnedToken(A, ALICE) for job in range(1, 100)})
    site.take(record(1, util=30.0))
    site.store.profiles.assign([Assignment(A, "V100", 1)])
    return site


def strike(site: Site) -> None:
    job = running("7", "n0", "gres/shard:v100_0:1", tag=f"GS1:c=1;t={A};o=gpu:1", uid=ALICE)
    watch = ProfileWatch(site.store)
    for seq in (1, 2):
        noted = watch.look([job], [interim(seq, *[97.0] * seq, mem_mib=9000.0)], {}, NOW, 5.0)
    assert [decision.kind for decision in noted] == ["past-profile"]


def test_a_strike_is_counted_for_the_user(site: Site) -> None:
    strike(site)
    assert [(item.uid, item.strikes, item.tokens) for item in site.store.violations.strikes_by_uid()] == [(ALICE, 1, 1)]
    (one,) = [s for s in site.store.violations.strikes() if s.uid == ALICE]
    assert (one.token, one.job_id, one.feature, one.seen) == (A, 7, "mem_used_mib", 9000.0)
    assert site.store.counters.all()["strikes"] == 1
    found = site.store.profiles.get(A)
    assert found is not None
    assert found.mem_used_mib == 9001, "what it was seen to use is remembered at once"


def test_short_jobs_past_their_profile_become_a_strike_when_their_records_come_in(site: Site) -> None:
    watch = ProfileWatch(site.store)
    busy = Period(0.0, 20.0, {"gpu_util_pct": Stat(40, 97.0, 97.0, 97.0, 97.0, 0.0)})
    for job in (7, 8):
        site.take(
            replace(record(job, util=97.0, shared=True, seconds=20.0), shared=busy, neighbours=(Neighbour(9, 20.0),))
        )
        noted = watch.ended(NOW, 5.0)
    assert [(decision.job_id, decision.kind, decision.partner_job) for decision in noted] == [(8, "past-profile", 9)]
    (one,) = [s for s in site.store.violations.strikes() if s.uid == ALICE]
    assert (one.token, one.feature, one.partner_job) == (A, "gpu_util_mean_pct", 9)
    assert A in site.store.violations.to_measure()
    assert ProfileWatch(site.store).ended(NOW, 5.0) == [], "a helper that starts anew goes on where it was"


def test_the_hook_takes_a_token_for_unknown_until_a_whole_card_has_measured_it(site: Site, tmp_path: Path) -> None:
    hook = HookFile(tmp_path / "hook.sqlite")

    def known() -> bool:
        hook.sync(site.store)
        with hook._connect() as file:
            return bool(file.execute("SELECT 1 FROM workload WHERE token = ?", (A,)).fetchone())

    assert known()
    strike(site)
    assert not known()
    hook.path.unlink()
    assert not known(), "a file that is written anew leaves it out too"
    site.take(record(8, util=30.0, end_s=NOW + 100, seconds=600.0))
    assert not known(), "a run that began before is the one that was struck, or its like"
    site.take(record(9, util=30.0, shared=True, end_s=NOW + 1000))
    assert not known(), "a shared run is no measurement"
    site.take(record(10, util=97.0, end_s=NOW + 2000))
    assert known()
    found = site.store.profiles.get(A)
    assert found is not None
    assert (found.generation, found.features["mgup"]) == (2, 97.0)


def test_one_user_cannot_move_the_clusters_by_making_many_tokens() -> None:
    assert user_weights([1, 2, 2]) == [1.0, 1.0, 1.0]
    many = user_weights([7] * 1000 + [8] * 4)
    assert sum(many[:1000]) == pytest.approx(10.0)
    assert many[1000:] == [1.0] * 4
    values = np.array([[10.0], [12.0], [88.0], [90.0]] + [[500.0]] * 1000)
    weights = np.array(user_weights([1, 1, 2, 2] + [3] * 1000))
    alike = fit_clusters(values, ["mgup"], k=2)
    weighed = fit_clusters(values, ["mgup"], k=2, weights=weights)
    assert alike.mean[0] == pytest.approx(498.2, abs=0.1)
    assert weighed.mean[0] == pytest.approx(371.4, abs=0.1)


def test_observations_of_one_user_count_ever_less(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner, "FULL_OBSERVATIONS", 2)
    site.store.workloads.claim({token(2): BOB})
    seen = [Observation(f"x:{n}", "V100", A, token(2), 0.5, 1.0, n) for n in range(4)]
    seen.append(Observation("x:9", "V100", token(2), A, 0.5, 1.0, 9))
    rows = learner.Learner(site.store)._weighed(seen)
    assert [weight for *_, weight in rows] == [1.0, 1.0, pytest.approx(2 / 3), 0.5, 1.0]


def test_a_users_own_record_says_nothing_of_how_jobs_slow_each_other(site: Site) -> None:
    site.take(command_record(1, token=A, shared=True, neighbours=(Neighbour(9, 600.0),)), uid=ALICE)
    learning = learner.Learner(site.store)
    assert learning.catch_up() == 0
    assert site.store.observations.after(0) == []
