"""The simulator's policy and the helper's plan are one: fed with snapshots, the plan decides the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from slurm_gpushare.helper.plan import plan
from slurm_gpushare.helper.snapshot import Gpu, How, NodeRoom, Occupant, PendingJob, Snapshot, Workload
from slurm_gpushare.knowledge.rates import RateTable
from slurm_gpushare.protocol.policy import PolicySettings
from slurm_gpushare.whatif.our_policy import Gpushare, Options
from slurm_gpushare.whatif.simulate import run
from slurm_gpushare.whatif.traces import MeasuredPairs, SimulatedJobs
from slurm_gpushare.whatif.world import NOBODY, World

SETTINGS = PolicySettings(extend_time_limit=True, aged_s=float("inf"))


class MeasuredKnowledge:
    """The measured rates themselves. Pairs that cannot share have rate 1: they are ruled out elsewhere."""

    def __init__(self, pairs: MeasuredPairs) -> None:
        self._at = {name: i for i, name in enumerate(pairs.profiles)}
        self._rate = np.where(np.isfinite(pairs.rate), pairs.rate, 1.0)

    def rates(self, victims: Sequence[str], neighbours: Sequence[str]) -> RateTable:
        rate = self._rate[np.ix_([self._at[name] for name in victims], [self._at[name] for name in neighbours])]
        return RateTable(rate, rate)

    def observe(self, victim: str, neighbour: str, rate: float, weight: float = 1.0) -> None:
        """Nothing to learn."""


class ByPlan(Gpushare):
    """Builds the whole snapshot at each event and does what the plan says."""

    def place(self, world: World) -> None:
        work = world.work
        arrived = int(np.searchsorted(work.submit_s, world.now_s, side="right"))
        names = work.pairs.profiles
        never = {(names[i], names[j]) for i, j in zip(*np.nonzero(~world.can_share), strict=True) if i <= j}
        snapshot = Snapshot(
            now_s=world.now_s,
            gpus=tuple(self._gpu(world, gpu) for gpu in range(work.gpus)),
            nodes={"n": NodeRoom("n", cpus_free=10**6, mem_free_mib=10**6)},
            pending=tuple(self._pending(world, job) for job in np.flatnonzero(world.waiting).tolist()),
            never_together=frozenset(never),
            mean_duration_s={1: float(work.duration_s[:arrived].mean())},
        )
        decided = plan(snapshot, MeasuredKnowledge(work.pairs), self.settings)
        for placement in decided.placements:
            if placement.how in {How.ALONE, How.UNSHARED}:
                world.start(int(placement.key), placement.place.first)
        for placement in decided.placements:
            if placement.how in {How.BESIDE, How.TOGETHER, How.SUCCEEDS}:
                world.start(int(placement.key), placement.place.first)
            if placement.how is How.SUCCEEDS:
                self.successor[int(placement.key)] = True

    def _gpu(self, world: World, gpu: int) -> Gpu:
        jobs = [int(job) for job in (world.first[gpu], world.second[gpu]) if job != NOBODY]
        return Gpu("n", gpu, "v100", mem_total_mib=100, occupants=tuple(self._occupant(world, job) for job in jobs))

    def _workload(self, world: World, job: int) -> Workload:
        return Workload(
            world.work.pairs.profiles[world.work.profile[job]],
            mem_used_mib=1,
            limit_s=float(self.durations.limit_s[job]),
            expected_s=float(world.work.duration_s[job]),
        )

    def _occupant(self, world: World, job: int) -> Occupant:
        done_s = float(world.work.duration_s[job]) - float(world.left_s(np.array([job]))[0])
        start_s = float(world.start_s[job])
        return Occupant(
            str(job),
            self._workload(world, job),
            start_s=start_s,
            lost_s=world.now_s - start_s - done_s - float(world.stood_s(np.array([job]))[0]),
            paused_s=float(world.stood_s(np.array([job]))[0]),
            joined=bool(world.guest[job]) and not self.successor[job],
        )

    def _pending(self, world: World, job: int) -> PendingJob:
        return PendingJob(str(job), self._workload(world, job), eligible_s=float(world.work.submit_s[job]))


def workload(seed: int, jobs: int = 60, gpus: int = 4, kinds: int = 5) -> SimulatedJobs:
    random = np.random.default_rng(seed)
    rate = random.uniform(0.4, 1.0, (kinds, kinds))
    rate[0, 1] = rate[1, 0] = np.nan
    return SimulatedJobs(
        gpus=gpus,
        submit_s=np.sort(random.uniform(0, 3000, jobs)),
        duration_s=np.exp(random.normal(5, 1.5, jobs)),
        num_gpus=np.ones(jobs, np.int64),
        profile=random.integers(kinds, size=jobs),
        pairs=MeasuredPairs(tuple(f"p{i}" for i in range(kinds)), rate),
        seed=seed,
    )


@pytest.mark.parametrize("objective", ["completion", "saving"])
@pytest.mark.parametrize("seed", range(4))
def test_the_simulator_decides_as_the_plan_does(seed: int, objective: str) -> None:
    settings = replace(SETTINGS, objective=objective)
    work = workload(seed)
    options = Options(knowledge="oracle", settings=settings)
    fast = run(work, Gpushare(work, options=options))
    by_plan = ByPlan(work, options=options)
    slow = run(work, by_plan)
    assert fast.shared.any()
    assert by_plan.successor.any()
    np.testing.assert_allclose(fast.start_s, slow.start_s, atol=1e-6)
    np.testing.assert_allclose(fast.end_s, slow.end_s, atol=1e-6)
