"""Each policy on a case small enough to be worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from gpushare_lab.peers.registry import NAMES, make_policy, parse_policies

from slurm_gpushare.protocol.errors import BadInput
from slurm_gpushare.protocol.policy import PolicySettings
from slurm_gpushare.whatif.our_policy import Options
from slurm_gpushare.whatif.simulate import run
from slurm_gpushare.whatif.traces import MeasuredPairs, SimulatedJobs
from slurm_gpushare.whatif.world import World, metrics

NO = np.nan


def simulate(
    policy: str,
    submit: list[float],
    duration: list[float],
    profile: list[int] | None = None,
    rate: list[list[float]] | None = None,
    gpus: int = 1,
    num_gpus: list[int] | None = None,
    options: Options | None = None,
) -> World:
    table = np.array(rate or [[0.5]], float)
    work = SimulatedJobs(
        gpus=gpus,
        submit_s=np.array(submit, float),
        duration_s=np.array(duration, float),
        num_gpus=np.array(num_gpus or [1] * len(submit)),
        profile=np.array(profile or [0] * len(submit)),
        pairs=MeasuredPairs(tuple(f"p{i}" for i in range(len(table))), table),
        seed=0,
    )
    chosen, seen = make_policy(policy, work, options or Options(knowledge="oracle"))
    return run(seen, chosen)


def ends(world: World) -> list[float]:
    return [round(float(end_s), 6) for end_s in world.end_s]


def test_fifo_serves_in_submit_order() -> None:
    assert ends(simulate("fifo", [0, 1, 2], [10, 5, 1])) == [10, 15, 16]


def test_fifo_uses_all_gpus() -> None:
    assert ends(simulate("fifo", [0, 0, 0], [10, 4, 1], gpus=2)) == [10, 4, 5]


def test_sjf_takes_the_shortest_that_waits_and_never_preempts() -> None:
    assert ends(simulate("sjf", [0, 1, 2], [10, 5, 1])) == [10, 16, 11]


def test_srpt_preempts_for_less_remaining_work() -> None:
    assert ends(simulate("srpt", [0, 1, 2], [10, 5, 1])) == [16, 7, 3]


def test_tiresias_prefers_who_has_had_less_than_a_gpu_hour() -> None:
    # The first has its hour at 3600; the second, come at 100, then runs through; the first goes on at 4600.
    assert ends(simulate("tiresias", [0, 100], [5000, 1000])) == [6000, 4600]


def test_tiresias_within_a_queue_goes_by_submit_time() -> None:
    assert ends(simulate("tiresias", [0, 100], [3000, 10])) == [3000, 3010]


def test_fcfs_share_puts_the_second_job_beside_the_first() -> None:
    # Both at rate 1/2 from 2 on: the second is done after 8; the first has then 10 - 2 - 4 = 4 left.
    world = simulate("fcfs-share", [0, 2], [10, 4])
    assert ends(world) == [14, 10]
    assert world.guest.tolist() == [False, True]


def test_fcfs_share_prefers_an_empty_gpu() -> None:
    world = simulate("fcfs-share", [0, 2], [10, 4], gpus=2)
    assert ends(world) == [10, 6]


def test_fcfs_share_passes_over_a_job_that_fits_nowhere() -> None:
    rate = [[0.5, NO], [NO, 0.5]]
    assert ends(simulate("fcfs-share", [0, 1, 2], [10, 5, 4], [0, 1, 0], rate)) == [14, 19, 10]


def test_packed_share_fills_the_lowest_gpu_although_another_is_empty() -> None:
    assert ends(simulate("packed-share", [0, 2], [10, 4], gpus=2)) == [14, 10]


def test_random_share_takes_some_half() -> None:
    world = simulate("random-share", [0, 0, 0], [10, 10, 1], gpus=2)
    assert world.guest.tolist() == [False, False, True]


def test_paper_pairs_the_lightest_with_the_heaviest() -> None:
    # Aggressors: p0 leaves 0.9 to its neighbours, p1 0.6, p2 0.3. On two GPUs run p0 and p1; p2 joins p0.
    rate = [[0.9, 0.6, 0.3]] * 3
    world = simulate("paper", [0, 0, 1], [100, 100, 9], [0, 1, 2], rate, gpus=2)
    assert world.start_s.tolist() == [0, 0, 1]
    assert world.shared.tolist() == [True, False, True]


def test_sjf_ffs_shares_shortest_first() -> None:
    world = simulate("sjf-ffs", [0, 1, 1], [100, 50, 5])
    assert world.start_s.tolist() == [0, 11, 1]


def test_sjf_bsbf_shares_only_where_together_beats_one_after_the_other() -> None:
    # Alone 10 and 10 at rates 0.5: together both end at 20, mean 20; one after the other 10 and 20, mean 15.
    assert ends(simulate("sjf-bsbf", [0, 0], [10, 10])) == [10, 20]
    # A guest of 1 beside a resident of 100: together 2 and 101, mean 51.5; else 100 and 101.
    assert ends(simulate("sjf-bsbf", [0, 0.5], [100, 1])) == [101, 2.5]


def test_sjf_bsbf_joins_the_resident_of_least_mean_completion() -> None:
    rate = [[0.9, 0.6], [0.9, 0.6]]  # beside p0 a job runs at 0.9, beside p1 at 0.6
    world = simulate("sjf-bsbf", [0, 0, 1], [100, 100, 9], [1, 0, 0], rate, gpus=2)
    assert world.shared.tolist() == [False, True, True]


def test_gavel_packing_wants_more_than_one_and_a_half_and_blocks() -> None:
    rate = [[0.7, NO, 0.9], [NO, NO, NO], [0.9, NO, 0.9]]
    # p0 + p0 make 1.4: the second job waits, and so does the third behind it, though p2 + p0 would make 1.8.
    assert simulate("gavel-packing", [0, 1, 1], [10, 5, 5], [0, 0, 2], rate).start_s.tolist() == [0, 10, 10]
    assert simulate("gavel-packing", [0, 1], [10, 5], [0, 2], rate).start_s.tolist() == [0, 1]


def test_lucid_shares_light_jobs_and_none_over_twice_the_residents_length() -> None:
    light, heavy = [[0.96]], [[0.8]]
    assert simulate("lucid", [0, 1], [10, 20], rate=light).start_s.tolist() == [0, 1]
    assert simulate("lucid", [0, 1], [10, 21], rate=light).start_s.tolist() == [0, 10]
    assert simulate("lucid", [0, 1], [10, 5], rate=heavy).start_s.tolist() == [0, 10]


def test_lucid_tertile_has_light_jobs_even_where_all_are_slow() -> None:
    rate = [[0.7] * 3, [0.6] * 3, [0.5] * 3]
    assert simulate("lucid-tertile", [0, 1], [10, 5], [2, 0], rate).start_s.tolist() == [0, 1]
    assert simulate("lucid-tertile", [0, 1], [10, 5], [2, 2], rate).start_s.tolist() == [0, 10]


def test_gandiva_splits_a_pair_that_proves_slow() -> None:
    world = simulate("gandiva", [0, 0], [1000, 1000], rate=[[0.4]])
    # Together for the 300 s of the trial at 0.4, then the guest waits until the resident's other 880 s are done.
    assert ends(world) == [1180, 2060]


def test_a_cap_forbids_pairs_that_slow_either_job_by_more() -> None:
    rate = [[0.9, 0.9], [0.75, 0.9]]
    assert simulate("fcfs-share-cap20", [0, 1], [10, 5], [0, 1], rate).start_s.tolist() == [0, 10]
    assert simulate("fcfs-share-cap34", [0, 1], [10, 5], [0, 1], rate).start_s.tolist() == [0, 1]


def test_gpushare_lets_a_short_guest_in_and_keeps_a_long_one_out() -> None:
    # Beside a guest of duration d the first loses d / 0.75 * 0.25: 3.3 s for the second, but 60 for the third, and
    # 50 are all it may lose.
    world = simulate("gpushare", [0, 1, 1], [200, 10, 180], rate=[[0.75]])
    assert world.start_s[1] == 1
    assert world.start_s[2] >= 200


def test_gpushare_guest_joins_only_if_that_is_sooner_than_waiting() -> None:
    # The first has 1 s to go: beside the second that takes 1 / r, and costs the second (1 - 0.7) / r.
    for resident_rate, start_s in ((0.6, 100), (0.7, 99)):
        rate = [[0.5, resident_rate], [0.7, 0.5]]
        assert simulate("gpushare", [0, 99], [100, 10], [0, 1], rate).start_s.tolist() == [0, start_s]


def test_gpushare_guest_may_outlast_its_resident_and_have_a_guest_itself() -> None:
    world = simulate("gpushare", [0, 90, 90], [100, 50, 50], rate=[[0.8]])
    # The last 10 s of the first take 12.5 beside the second, which has 40 to go then: 50 beside the third, which
    # does its last 10 alone.
    assert ends(world) == [102.5, 152.5, 162.5]


def test_gpushare_guest_slowed_by_more_than_half_stays_out() -> None:
    assert simulate("gpushare", [0, 1], [1000, 10], rate=[[0.66]]).start_s.tolist() == [0, 1000]
    assert simulate("gpushare", [0, 1], [1000, 10], rate=[[0.68]]).start_s.tolist() == [0, 1]


@pytest.mark.parametrize("guest_cap_pct", [10.0, 20.0, 50.0])
def test_a_strict_site_learns_too(guest_cap_pct: float) -> None:
    """Nothing is known at first, and nobody may be slowed much: only trying shows that these two get along."""
    settings = PolicySettings(extend_time_limit=True, guest_cap_pct=guest_cap_pct)
    world = simulate(
        "gpushare", [0, *range(1, 60)], [100_000] + [20] * 59, rate=[[0.97]], options=Options(settings=settings)
    )
    assert world.guest[1:].all()


def test_several_gpus_are_taken_together_and_backfill_does_not_delay_them() -> None:
    # Two GPUs: a runs to 10; b wants both and is due at 10; c (5 long) ends before that, d (20 long) does not.
    world = simulate("fifo", [0, 1, 2, 2], [10, 5, 5, 20], gpus=2, num_gpus=[1, 2, 1, 1])
    assert world.start_s.tolist() == [0, 10, 2, 15]


def test_metrics_of_a_shared_card() -> None:
    world = simulate("fcfs-share", [0, 2], [10, 4])
    got = metrics(world)
    assert got["avg_jct_s"] == pytest.approx((14 + 8) / 2)
    assert got["isd_mean_pct"] == pytest.approx((40 + 100) / 2)
    assert got["resident_isd_p99_pct"] == pytest.approx(40)
    assert got["guest_isd_p99_pct"] == pytest.approx(100)
    assert got["busy_gpu_hours"] == pytest.approx(14 / 3600)
    assert got["ps_pct"] == pytest.approx(0)
    assert got["max_wait_s"] == 0
    assert got["makespan_s"] == pytest.approx(14)


def test_policy_names() -> None:
    assert parse_policies("all") == list(NAMES)
    assert parse_policies("fifo,fcfs-share-cap25,fifo") == ["fifo", "fcfs-share-cap25"]
    for wrong in ("nope", "", "fifo-cap25", "fcfs-share-capx"):
        with pytest.raises(BadInput):
            parse_policies(wrong)
