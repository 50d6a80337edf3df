"""Why a job waits: the rule that left no card, with its numbers and what would change it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from world import NOW, SETTINGS, Flat, card, occupant, pending

from slurm_gpushare.helper.explain import Code, Reason, sentence, words
from slurm_gpushare.helper.plan import plan
from slurm_gpushare.helper.snapshot import (
    Gpu,
    GpuPlace,
    How,
    LeftToSlurm,
    NodeRoom,
    PendingJob,
    Placement,
    Plan,
    Snapshot,
    Workload,
)
from slurm_gpushare.helper.why_left import REFRESH_S, Forecasts, WaitReasons, why_left
from slurm_gpushare.protocol.policy import PolicySettings
from slurm_gpushare.protocol.text import duration_text

RESIDENT = card(occupant())
ENDS_SOON = card(occupant("soon", token=None, whole=True, expected_s=1001), index=1)


def reasons(
    gpus: Sequence[Gpu] = (RESIDENT,),
    jobs: Sequence[PendingJob] = (pending(),),
    knowledge: Flat | None = None,
    settings: PolicySettings = SETTINGS,
    **changes: Any,
) -> dict[str, Reason]:
    """What is said of the jobs that the plan leaves."""
    room = {"n1": NodeRoom("n1", 32, 100_000)}
    snapshot = replace(Snapshot(NOW, tuple(gpus), room, tuple(jobs), mean_duration_s={1: 2000.0}), **changes)
    decided = plan(snapshot, knowledge or Flat(), settings)
    taken = {placement.partner_key for placement in decided.placements if placement.partner_key}
    return why_left(snapshot, knowledge or Flat(), settings, decided.left, taken)


def only(**case: Any) -> Reason:
    (reason,) = reasons(**case).values()
    return reason


def test_memory_is_told_with_its_numbers() -> None:
    reason = only(jobs=[pending(mem_used_mib=9000)])
    assert (reason.code, reason.need, reason.have) == (Code.MEMORY, 9000, 16_000 * 0.95 - 8000)
    assert words(reason)[0] == "it needs 9000 MiB of GPU memory, and beside the best neighbour 7200 MiB are free"


def test_too_long_means_longer_than_the_plan_allows() -> None:
    """Where nothing is known of what came lately, the sharers at hand say what is short, also those that run."""
    jobs = [pending(expected_s=9000, limit_s=20_000), pending("x", token=None, expected_s=900_000)]
    others = [card(occupant(f"s{i}", expected_s=1500, whole=True), index=i) for i in range(1, 13)]
    reason = reasons([RESIDENT, *others], jobs, mean_duration_s={})["p"]
    assert (reason.code, reason.have) == (Code.TOO_LONG, pytest.approx(3.0 * (9000 + 10_000 + 12 * 1500) / 14))


@pytest.mark.parametrize(
    ("case", "code"),
    [
        ({"gpus": [card(occupant(whole=True))]}, Code.NO_PARTNER),
        ({"jobs": [pending(cpus=64)]}, Code.PLACE),
        ({"jobs": [pending(expected_s=9000, limit_s=20_000)]}, Code.TOO_LONG),
        ({"jobs": [pending(max_isd_pct=10.0)]}, Code.OWN_CAP),
        ({"jobs": [pending(max_isd_pct=0.0)]}, Code.OWN_CAP),
        ({"knowledge": Flat(0.3)}, Code.PROMISE),
        ({"never_together": frozenset({("gs-p", "gs-r")})}, Code.FORBIDDEN),
        ({"settings": replace(SETTINGS, share_across="user")}, Code.OWNERS),
        ({"settings": replace(SETTINGS, policy="off")}, Code.OFF),
        ({"jobs": [pending(limit_s=310, may_grow_s=0.0)], "knowledge": Flat(0.7)}, Code.TIME_LIMIT),
        ({"gpus": [RESIDENT, ENDS_SOON], "knowledge": Flat(0.7)}, Code.NO_GAIN),
    ],
)
def test_each_rule_has_its_own_reason(case: dict[str, Any], code: Code) -> None:
    assert only(**case).code is code


def test_rates_that_nobody_knows_are_told_as_such() -> None:
    short = card(occupant(expected_s=1500, limit_s=2000))
    assert only(gpus=[short], knowledge=Flat(0.65, 0.5)).code is Code.EXPLORATION


def test_a_job_that_would_hold_up_the_next_in_the_queue_is_told_how_short_it_must_be() -> None:
    stranger = PendingJob("first", Workload())
    reason = reasons(jobs=[stranger, pending(limit_s=50_000)])["p"]
    assert (reason.code, reason.need) == (Code.PRIORITY, 50_000)
    assert "a time limit of at most 8.1 h" in sentence(reason)


def test_places_that_went_to_others_are_the_reason_of_the_next() -> None:
    found = reasons(jobs=[pending("a", expected_s=200), pending("b")])
    assert found["b"].code is Code.OTHERS_FIRST


def test_every_reason_says_when_a_start_is_expected_and_what_would_change_it() -> None:
    text = sentence(only(jobs=[pending(mem_used_mib=9000)]))
    assert text.startswith("waits, its start is forecast in ")
    assert "What would change it: a neighbour that uses less, or a smaller batch" in text
    for code in Code:
        assert all(words(Reason(code, 1.0, 2.0)))


def test_jobs_alike_get_one_answer_each_with_its_own_wait() -> None:
    found = reasons(jobs=[pending("a", mem_used_mib=9000), pending("b", mem_used_mib=9000)])
    assert found["a"].code is found["b"].code is Code.MEMORY
    assert (found["a"].wait_s or 0) < (found["b"].wait_s or 0)


def test_a_reason_is_worked_out_for_a_new_job_at_once_and_for_all_now_and_then() -> None:
    kept = WaitReasons()
    snapshot = Snapshot(NOW, (RESIDENT,), {"n1": NodeRoom("n1", 32, 100_000)}, (pending(mem_used_mib=9000),))

    def update(now_s: float, need_mib: int) -> Reason:
        seen = replace(snapshot, now_s=now_s, pending=(pending(mem_used_mib=need_mib),))
        return kept.update(seen, Flat(), SETTINGS, plan(seen, Flat(), SETTINGS))["p"]

    assert update(NOW, 9000).need == 9000
    assert update(NOW + 1, 9500).need == 9000
    assert update(NOW + REFRESH_S, 9500).need == 9500


def test_forecasts_are_steady_and_follow_how_earlier_ones_came_out() -> None:
    seen, forecasts = Snapshot(NOW, (), {}, ()), Forecasts()
    assert forecasts.wait_s("a", 100.0, NOW) == 100.0
    assert forecasts.wait_s("a", 400.0, NOW + 10) == pytest.approx(90 + 0.3 * 310), "a jump of 300 s is followed slowly"
    for number in range(60):  # whoever came got half a card after a tenth of the wait for a whole one
        forecasts.wait_s(f"j{number}", 100.0, NOW)
        begun = Plan((Placement(f"j{number}", GpuPlace("n1", (0,)), How.BESIDE),), (LeftToSlurm("a", 400.0),))
        forecasts.look(replace(seen, now_s=NOW + 10), begun)
    assert forecasts.wait_s("new", 1000.0, NOW + 20) == pytest.approx(100.0, abs=10.0)


def test_durations_have_units_that_fit() -> None:
    found = [duration_text(s) for s in (1.6, 96, 600, 5400, 9000, 300_000, float("inf"), None)]
    assert found == ["2 s", "96 s", "10 min", "90 min", "2.5 h", "3.5 days", "---", "---"]


def test_the_manual_has_every_reason_in_the_programs_words() -> None:
    page = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()
    for code in Code:
        why, change = words(Reason(code, 1.0, 2.0))
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{code.value}` |")]
        assert why.split()[0] in row
        assert len(row.split("|")) == 5
        assert why.split(",")[0].split("1")[0].strip() in row, f"{code.value}: {why}"
        assert change.split("2")[0].strip() in row
