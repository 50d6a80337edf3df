"""Peers that let two jobs share a card.

All of them work the same way: in queue order, a job takes the lowest empty GPU, else a half beside a resident.
They differ in the order, in which halves a job may take (`longest`) and which of those it prefers (`prefer`).
"""

from __future__ import annotations

import numpy as np

from slurm_gpushare.knowledge.cells import balanced_partners, make_cells, tercile_clusters
from slurm_gpushare.knowledge.rates import Floats, Ints
from slurm_gpushare.whatif.simulate import Policy, start_whole
from slurm_gpushare.whatif.traces import SimulatedJobs
from slurm_gpushare.whatif.world import NOBODY, World


class SharingPolicy(Policy):
    """FIFO, empty GPU first, else the first half where the two can share."""

    blocking = False  # whether a job that finds no place stops those behind it

    def order(self) -> Ints:
        return self.by_submit

    def longest(self, world: World, residents: Ints) -> Floats:
        """How long a guest of each profile (row) may be beside each resident (column); -1: not at all."""
        return np.where(world.can_share[:, world.work.profile[residents]], np.inf, -1.0)

    def prefer(self, world: World, job: int, residents: Ints) -> int:
        """Which of the residents that `job` may join, given in GPU order."""
        return 0

    def schedule(self, world: World) -> None:
        work = world.work
        start_whole(world, self.order())
        while len(halves := world.halves()) and world.waiting.any():
            residents = world.first[halves]
            longest = self.longest(world, residents)
            queue = self.order()
            queue = queue[world.waiting[queue]]
            if self.blocking:
                queue = queue[:1]
            fits = (work.duration_s[queue] <= longest.max(axis=1)[work.profile[queue]]) & (work.num_gpus[queue] == 1)
            at = int(np.argmax(fits))
            if not fits[at]:
                return
            job = int(queue[at])
            allowed = np.flatnonzero(longest[work.profile[job]] >= work.duration_s[job])
            world.start(job, int(halves[allowed[self.prefer(world, job, residents[allowed])]]))


class FcfsShare(SharingPolicy):
    """Exactly the above."""


class PackedShare(SharingPolicy):
    """What raw Slurm shards do: the lowest GPU with room, empty or not."""

    def schedule(self, world: World) -> None:
        work = world.work
        order = self.order()
        blocked = np.zeros(len(work.pairs.profiles), bool)
        for job in order[world.waiting[order]].tolist():
            if blocked[work.profile[job]] or work.num_gpus[job] > 1:
                continue
            room = (world.second == NOBODY) & ~world.whole
            fits = room & ((world.first == NOBODY) | world.can_share[work.profile[job], work.profile[world.first]])
            gpu = int(np.argmax(fits))
            if fits[gpu]:
                world.start(job, gpu)
            else:
                blocked[work.profile[job]] = True
                if blocked.all() or not room.any():
                    break
        start_whole(world, order[work.num_gpus[order] > 1])


class RandomShare(SharingPolicy):
    """Any half where the two can share, at random."""

    def __init__(self, work: SimulatedJobs, seed: int = 0) -> None:
        super().__init__(work, seed)
        self.random = np.random.default_rng(seed)

    def prefer(self, world: World, job: int, residents: Ints) -> int:
        return int(self.random.integers(len(residents)))


class SjfFfs(SharingPolicy):
    """Shortest job first, first half that fits."""

    def order(self) -> Ints:
        return self.by_duration


class SjfBsbf(SharingPolicy):
    """Shortest job first; shares where the mean completion of the two beats running one after the other."""

    def order(self) -> Ints:
        return self.by_duration

    def longest(self, world: World, residents: Ints) -> Floats:
        # With a the guest and b the resident: where a ends first, together wins if a * ((2 - rb) / ra - 1) < b;
        # where b does, if ra + 2 rb > 2, and then it wins for every a.
        rate_a = world.rate_of[:, world.work.profile[residents]]
        rate_b = world.rate_of[world.work.profile[residents], :].T
        left_b = world.left_s(residents)
        with np.errstate(invalid="ignore", divide="ignore"):
            bound = np.nextafter(left_b / ((2 - rate_b) / rate_a - 1), 0.0)
            bound = np.where(rate_a + 2 * rate_b > 2, np.inf, bound)
        return np.where(np.isfinite(rate_a), bound, -1.0)

    def prefer(self, world: World, job: int, residents: Ints) -> int:
        rate_a = world.rate_of[world.work.profile[job], world.work.profile[residents]]
        rate_b = world.rate_of[world.work.profile[residents], world.work.profile[job]]
        a, b = world.left_s(np.array([job])), world.left_s(residents)
        both = np.minimum(a / rate_a, b / rate_b)  # until the first of the two ends
        ends_a = np.where(a / rate_a <= both, both, both + a - both * rate_a)
        ends_b = np.where(b / rate_b <= both, both, both + b - both * rate_b)
        return int(np.argmin(ends_a + ends_b))


class GavelPacking(SharingPolicy):
    """FIFO that blocks; the half with the largest sum of rates, if above 1.5."""

    blocking = True

    def longest(self, world: World, residents: Ints) -> Floats:
        return np.where(self._sum(world)[:, world.work.profile[residents]] > 1.5, np.inf, -1.0)

    def prefer(self, world: World, job: int, residents: Ints) -> int:
        return int(np.argmax(self._sum(world)[world.work.profile[job], world.work.profile[residents]]))

    def _sum(self, world: World) -> Floats:
        return np.nan_to_num(world.rate_of + world.rate_of.T)


class Lucid(SharingPolicy):
    """Labels 0, 1, 2 by a profile's mean co-run speed; labels of a pair sum to at most 2, the guest is
    at most twice as long as the resident. Shortest job first."""

    def __init__(self, work: SimulatedJobs, seed: int = 0) -> None:
        super().__init__(work, seed)
        with np.errstate(invalid="ignore"):
            both = (work.pairs.rate + work.pairs.rate.T) / 2
        count = np.isfinite(both).sum(axis=1)
        self.speed = np.where(count > 0, np.nansum(both, axis=1) / np.maximum(count, 1), 0.0)
        label = self.labels()
        self.affine = label[:, None] + label[None, :] <= 2

    def labels(self) -> Ints:
        return np.where(self.speed >= 0.95, 0, np.where(self.speed >= 0.85, 1, 2))

    def order(self) -> Ints:
        return self.by_duration

    def longest(self, world: World, residents: Ints) -> Floats:
        kinds = world.work.profile[residents]
        allowed = self.affine[:, kinds] & world.can_share[:, kinds]
        return np.where(allowed, 2 * world.work.duration_s[residents], -1.0)


class LucidTertile(Lucid):
    """The same, with a third of the profiles in each label."""

    def labels(self) -> Ints:
        return 2 - tercile_clusters(self.speed)


class Paper(SharingPolicy):
    """The paper's cluster rule: each cluster beside the one with which PS and ISD balance best, by the pairs given.

    Profiles without telemetry are clustered by how much they slow their neighbours on average.
    """

    def __init__(self, work: SimulatedJobs, seed: int = 0) -> None:
        super().__init__(work, seed)
        rate = work.pairs.rate
        count = np.isfinite(rate).sum(axis=0)
        slows = 1 - np.where(count > 0, np.nansum(rate, axis=0) / np.maximum(count, 1), 0.0)
        cluster = tercile_clusters(slows)
        victim, neighbour = np.nonzero(np.isfinite(rate))
        cells = make_cells(3, cluster[victim], cluster[neighbour], -np.log(rate[victim, neighbour]))
        self.complement = np.array(balanced_partners(cells, 3))[cluster][:, None] == cluster[None, :]

    def longest(self, world: World, residents: Ints) -> Floats:
        kinds = world.work.profile[residents]
        return np.where(self.complement[:, kinds] & world.can_share[:, kinds], np.inf, -1.0)


class Gandiva(RandomShare):
    """Packs at random when GPUs are short, and splits what proves slower than taking turns."""

    TRIAL_S = 300.0

    def __init__(self, work: SimulatedJobs, seed: int = 0) -> None:
        super().__init__(work, seed)
        self.slow = np.zeros((len(work.pairs.profiles),) * 2, bool)
        self.trials: list[tuple[float, int, int]] = []  # (when to judge, resident, guest), in time order

    def longest(self, world: World, residents: Ints) -> Floats:
        kinds = world.work.profile[residents]
        return np.where(world.can_share[:, kinds] & ~self.slow[:, kinds], np.inf, -1.0)

    def prefer(self, world: World, job: int, residents: Ints) -> int:
        choice = super().prefer(world, job, residents)
        self.trials.append((world.now_s + self.TRIAL_S, int(residents[choice]), job))
        return choice

    def wake_s(self, world: World) -> float:
        return self.trials[0][0] if self.trials else np.inf

    def schedule(self, world: World) -> None:
        while self.trials and self.trials[0][0] <= world.now_s:
            _, resident, guest = self.trials.pop(0)
            together = world.gpu[guest] != NOBODY and world.gpu[guest] == world.gpu[resident]
            if together and world.rate[resident] + world.rate[guest] < 1.0:
                a, b = world.work.profile[resident], world.work.profile[guest]
                self.slow[a, b] = self.slow[b, a] = True
                world.stop(guest)
        super().schedule(world)
