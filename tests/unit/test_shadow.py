"""`Policy=shadow`: all is planned and recorded, nothing is changed; the report says what would have come of it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpushare_lab.known_profiles import KnownProfile, enter_profiles
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from world import TOKEN_A, TOKEN_B, TOKEN_C, FakeSlurm, Flat, job, node, running

from slurm_gpushare.cli.console import progress
from slurm_gpushare.helper.explain import Code, of_decision
from slurm_gpushare.helper.shadow_policy import as_if_shareable
from slurm_gpushare.helper.tick import Helper, TickReport
from slurm_gpushare.knowledge.kb import default_kb
from slurm_gpushare.protocol.history import Decision
from slurm_gpushare.protocol.policy import PolicySettings
from slurm_gpushare.protocol.settings import Config, SitePromises, parse_config
from slurm_gpushare.protocol.tag import Tag
from slurm_gpushare.report.job_view import History
from slurm_gpushare.report.report_page import SHADOW_TITLE, render_report
from slurm_gpushare.report.summary import Report, summarise
from slurm_gpushare.site.finding import Level
from slurm_gpushare.site.local_checks import policy
from slurm_gpushare.slurm.accounting import AccountedJob
from slurm_gpushare.slurm.queue import Job
from slurm_gpushare.store import Store
from slurm_gpushare.store.stored_jobs import EVER
from slurm_gpushare.whatif.assess import PastJob
from slurm_gpushare.whatif.shadow import KnownTokens, Shadow, in_the_shadow, known_tokens, shadow_of

KNOWLEDGE = default_kb().knowledge()
NOW = int(time.time())
USED = "gpu:v100_0:1(IDX:0),gpu:v100_1:1(IDX:1),shard:v100_0:0(0/2,0/2),shard:v100_1:0(0/2,0/2)"


def make_config(directory: Path, policy: str = "shadow") -> Config:
    return parse_config(
        f"Partitions=gpu\nGpusPerNode=2\nStoreUrl=sqlite:///{directory}/store.sqlite\nSpoolDir={directory}\n"
        f"StateDir={directory}\nPolicy={policy}\n"
    )


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Config, Store]]:
    config = make_config(tmp_path_factory.mktemp("shadow"))
    with Store.create(config.store_url) as store:
        enter_profiles(store, [KnownProfile(t, 1000, "V100", 2000, 16384, 1, 900) for t in (TOKEN_A, TOKEN_B)])
        yield config, store


def tick(config: Config, store: Store, slurm: FakeSlurm) -> TickReport:
    return Helper(config, slurm, store, KNOWLEDGE, clock=lambda: float(NOW)).tick()


def waiting(key: str, tag: str = "", **changes: Any) -> Job:
    return job(key, **{"tag": tag, "submit_s": NOW - 100, "eligible_s": NOW - 100} | changes)


def busy(key: str, index: int, tag: str = "", **changes: Any) -> Job:
    return running(key, "n0", f"gres/gpu:v100_{index}:1", tag=tag, **{"start_s": NOW - 60} | changes)


TAGS = st.sampled_from(["", f"GS1:t={TOKEN_A}", f"GS1:t={TOKEN_B};m=10", f"GS1:probe;t={TOKEN_C}", f"GS1:t={TOKEN_C}"])
REQUESTS = st.sampled_from(
    [
        {"per_node": "gres/gpu:1"},
        {"per_node": "", "per_job": "gres/gpu:1"},
        {"per_node": "", "per_task": "gres/gpu:1"},
        {"per_node": "gres/gpu:2"},
        {"per_node": "gres/gpu:v100_1:1"},
        {"per_gpu_extras": True},
        {"priority": 0, "reason": "JobHeldUser"},
        {"eligible_s": NOW + 1000, "reason": "BeginTime"},
        {"dependency": "afterok:1(unfulfilled)", "reason": "Dependency"},
        {"limit_s": None},
    ]
)


def section(slurm: FakeSlurm, store: Store, config: Config, report: Report) -> Shadow | None:
    jobs = [job.accounted for job in report.jobs if job.accounted]
    return shadow_of(slurm, store, config, jobs, (report.start_s, report.end_s), partial(progress, "Simulating"))


@given(st.lists(st.tuples(TAGS, REQUESTS), max_size=6), TAGS, TAGS, st.sampled_from([120, 3600, None]))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_tick_changes_anything_in_slurm(
    shared: tuple[Config, Store], queue: list[tuple[str, dict[str, Any]]], first: str, second: str, limit_s: int | None
) -> None:
    jobs = [waiting(str(10 + n), tag, **request) for n, (tag, request) in enumerate(queue)]
    slurm = FakeSlurm([busy("1", 0, first, limit_s=limit_s), busy("2", 1, second), *jobs], [node(used=USED)])
    report = tick(*shared, slurm)
    assert slurm.written == []
    assert all(reason.code is Code.SHADOW for reason in report.reasons.values())


def test_the_same_queue_is_changed_where_sharing_counts(tmp_path: Path) -> None:
    """Else the property above could not fail."""
    config = make_config(tmp_path, "fcfs")
    with Store.create(config.store_url) as store:
        enter_profiles(store, [KnownProfile(TOKEN_A, 1000, "V100", 2000, 16384, 1, 900)])
        slurm = FakeSlurm([waiting("10", f"GS1:c=1;t={TOKEN_A};o=gpu:1"), waiting("11")], [node()])
        tick(config, store, slurm)
        assert ("update", "10") in slurm.written, "a placement"
        assert ("update", "11") in slurm.written, "a tag for a job that the hook missed"


def test_the_first_decision_of_a_job_is_recorded_once(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with Store.create(config.store_url) as store:
        enter_profiles(store, [KnownProfile(t, 1000, "V100", 2000, 16384, 0, 900) for t in (TOKEN_A, TOKEN_B)])
        tags = [f"GS1:t={TOKEN_A}", f"GS1:t={TOKEN_B}"]
        residents = [busy("1", 0, tags[0], limit_s=20_000), busy("2", 1, tags[0], limit_s=20_000)]
        slurm = FakeSlurm([*residents, waiting("10", tags[1], limit_s=600)], [node(used=USED)])
        helper = Helper(config, slurm, store, Flat(0.95))
        assert helper.tick().outcomes == {"shadow": 1}
        assert not helper.state.somebody_waits, "no card is held for a job that will not get it"
        assert helper.tick().outcomes == {}
        assert Helper(config, slurm, store, Flat(0.95)).tick().outcomes == {}, "nor after a restart"
        (decision,) = (item for item in store.decisions.of_jobs({10: EVER}) if item.kind == "shadow")
    assert decision.reasons["how"] == "beside"
    assert decision.partner_job in (1, 2)
    assert f"would have been placed beside job {decision.partner_job}, if this site shared" in of_decision(decision)
    assert slurm.written == []


def test_what_was_given_before_is_taken_back(tmp_path: Path) -> None:
    """A lease from before the switch does not outlive it; that undoes us and is no sharing."""
    config = make_config(tmp_path)
    leased = waiting("10", f"GS1:c=1;t={TOKEN_A};o=gpu:1;l=1", eligible_s=NOW + 25, reason="BeginTime")
    with Store.create(config.store_url) as store:
        slurm = FakeSlurm([leased], [node()])
        tick(config, store, slurm)
    assert slurm.written == [("update", "10")]


def test_only_a_waiting_job_of_a_known_workload_is_imagined_shareable() -> None:
    seen = as_if_shareable(waiting("1", f"GS1:t={TOKEN_A}", per_node="", per_job="gres/gpu:1"), 2)
    assert (seen.per_job, seen.per_node, seen.tag) == ("", "gres/gpu:1", Tag(token=TOKEN_A, original="gpu:1"))
    for other in (
        waiting("1"),
        waiting("1", f"GS1:probe;t={TOKEN_A}"),
        waiting("1", f"GS1:t={TOKEN_A}", per_node="gres/gpu:2"),
        waiting("1", f"GS1:t={TOKEN_A}", per_node="gres/gpu:v100_1:1"),
        busy("1", 0, f"GS1:t={TOKEN_A}"),
    ):
        assert as_if_shareable(other, 2) is other


def known(mean: float, low: float, tokens: Sequence[str] = (TOKEN_A,)) -> KnownTokens:
    size = (len(tokens), len(tokens))
    return KnownTokens(tuple(tokens), np.full(size, mean), np.full(size, low), np.ones(size, bool))


def past(n: int, token: str | None = TOKEN_A, gpus: int = 1) -> PastJob:
    return PastJob("gpu", 10.0 * n, 3600.0, gpus, "ann", 0.0, token=token, limit_s=7200.0)


SETTINGS = PolicySettings()


def test_a_range_has_the_pessimistic_end_and_the_best() -> None:
    found = in_the_shadow([replace(past(n), wait_s=1800.0 * n) for n in range(8)], known(0.9, 0.85), SETTINGS, 1)
    assert found is not None
    assert (found.jobs, found.takes_part) == (8, 8)
    assert found.shared_jobs.low > 0
    assert 0 < found.saved_gpu_h.low < found.saved_gpu_h.high
    assert found.isd_mean_pct.low < found.isd_mean_pct.high
    assert found.wait_s.high < found.plain_wait_s


def test_cards_that_were_shared_in_the_period_are_not_counted_twice() -> None:
    """A period may begin in the shadow and end with sharing."""
    beside = [past(0), past(1)]
    found = in_the_shadow(beside, known(0.9, 0.85), SETTINGS, 1)
    assert found is not None
    assert (found.jobs, found.gpus) == (2, 1)
    unknown = in_the_shadow(beside, known(0.9, 0.85), SETTINGS)
    assert unknown is not None
    assert unknown.gpus == 2, "where slurmctld does not answer"


@pytest.mark.parametrize(("policy", "tagged"), [("off", []), ("gpushare", ["1", "2", "7"])])
def test_jobs_that_the_hook_left_alone_stay_so_while_sharing_is_off(
    policy: str, tagged: list[str], shared: tuple[Config, Store]
) -> None:
    config, store = shared
    slurm = FakeSlurm([busy("1", 0), busy("2", 1), waiting("7")], [node(used=USED)])
    tick(replace(config, policy=policy), store, slurm)
    assert slurm.written == [("update", key) for key in tagged]


@pytest.mark.parametrize("alone", ["no token", "unknown token", "two GPUs", "cannot share"])
def test_who_cannot_share_saves_nothing(alone: str) -> None:
    tokens = known(0.9, 0.85)
    if alone == "cannot share":
        tokens = replace(tokens, can_share=np.zeros((1, 1), bool))
    token = {"no token": None, "unknown token": TOKEN_B}.get(alone, TOKEN_A)
    jobs = [past(n, token, 2 if alone == "two GPUs" else 1) for n in range(6)]
    found = in_the_shadow(jobs, tokens, SETTINGS, 2)
    assert found is not None
    assert (found.shared_jobs.high, found.slowed_jobs.high) == (0, 0)
    assert found.saved_gpu_h.high == pytest.approx(0, abs=1e-9)
    assert in_the_shadow([], tokens, SETTINGS) is None


def test_doctor_says_that_nobody_shares() -> None:
    assert [(item.check, item.level) for item in policy(parse_config("Policy=shadow"))] == [("policy", Level.WARN)]
    assert [item.found for item in policy(parse_config("Policy=off"))] == ["Policy=off: nobody shares"]
    assert list(policy(parse_config(""))) == []


def accounted(n: int, tag: Tag | None, user: str = "ann") -> AccountedJob:
    submit_s, start_s = NOW - 90_000 + n, NOW - 89_900 + 3600 * (n // 2)
    return AccountedJob(
        raw_id=n, key=str(n), slurm_cluster="c", uid=1000, user=user, account="acc", partition="gpu",
        state="COMPLETED", submit_s=submit_s, eligible_s=submit_s, start_s=start_s,
        end_s=start_s + 3600, elapsed_s=3600, limit_s=7200, cpus=1, nodes=("n0",), gpus=1, shards=0,
        tag=tag,
    )  # fmt: skip


class TestSection:
    @pytest.fixture
    def report(self) -> Report:
        probes = [accounted(1, Tag(probe=True, token=TOKEN_A)), accounted(2, Tag(probe=True, token=TOKEN_B), "bob")]
        later = [
            accounted(n, Tag(token=TOKEN_A if n % 2 else TOKEN_B), "ann" if n % 2 else "bob") for n in range(3, 12)
        ]
        return summarise(
            [*probes, *later, accounted(12, None)], History(complete=True), SitePromises(25, 50), NOW - 100_000, NOW
        )

    def test_what_would_have_been_shared_saved_and_slowed(self, shared: tuple[Config, Store], report: Report) -> None:
        config, store = shared
        placed = Decision(4, NOW - 80_000, "shadow", partner_job=3, reasons={"how": "beside", "key": "4"})
        store.decisions.add([placed])
        found = section(FakeSlurm([], [node()]), store, replace(config, resident_budget_pct=200.0), report)
        assert found is not None
        assert found.figures is not None
        assert (found.figures.jobs, found.figures.takes_part, found.figures.gpus) == (12, 9, 2)
        document = found.document()
        assert document["recorded"] == {"beside": 1}
        assert document["simulated"]["shared_jobs"]["high"] > 0
        text = dict(found.lines())
        assert text["recorded"].startswith("1 jobs would have been placed, 1 of them beside another")
        assert {"would share", "would save", "slow-down (ISD)", "mean wait"} <= text.keys()
        page = render_report(report, shadow=found.lines())
        assert f"<h2>{SHADOW_TITLE}</h2>" in page
        assert text["would save"] in page
        assert SHADOW_TITLE not in render_report(report)

    def test_tokens_of_two_gpu_models_never_share(self, shared: tuple[Config, Store], report: Report) -> None:
        config, store = shared
        enter_profiles(store, [KnownProfile(TOKEN_B, 1000, "A100", 2000, 40960, 1, 600.0)])
        both = replace(config, gpu_models=("v100", "a100"))
        found = known_tokens(store, both, [job.accounted for job in report.jobs if job.accounted])
        assert found.can_share.tolist() == [[True, False], [False, True]]

    def test_users_and_memory_that_keep_two_tokens_apart(self, shared: tuple[Config, Store], report: Report) -> None:
        config, store = shared
        jobs = [job.accounted for job in report.jobs if job.accounted]

        def can_share(**changes: object) -> list[list[bool]]:
            found = known_tokens(store, replace(config, **changes), jobs)  # type: ignore[arg-type]
            assert found.tokens == (TOKEN_A, TOKEN_B)
            return found.can_share.tolist()

        assert can_share() == [[True, True], [True, True]]
        assert can_share(share_across="account") == [[True, True], [True, True]]
        assert can_share(share_across="user") == [[True, False], [False, True]]
        assert can_share(memory_headroom_pct=80.0) == [[False, False], [False, False]]

    def test_a_first_day_on_which_no_workload_is_known_yet(self, tmp_path: Path, report: Report) -> None:
        config = make_config(tmp_path)
        with Store.create(config.store_url) as store:
            found = section(FakeSlurm([], []), store, config, report)
            assert found is not None
            assert found.figures is not None
            assert (found.figures.takes_part, found.figures.shared_jobs.high) == (0, 0)
            nothing = section(FakeSlurm([], []), store, config, replace(report, jobs=()))
        assert nothing is not None
        assert nothing.document() == {"recorded": {}, "simulated": None}
        assert dict(nothing.lines())["simulated"] == "--- (no job has ended)"

    def test_a_period_in_which_sharing_counted_has_none(self, tmp_path: Path, report: Report) -> None:
        config = make_config(tmp_path, "gpushare")
        with Store.create(config.store_url) as store:
            assert section(FakeSlurm([], []), store, config, report) is None
