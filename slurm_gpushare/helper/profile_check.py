"""Is a running job still what was measured of its token? Three questions, which need three answers:

- *Past its profile*, `ProfileCheck`: has its owner changed the workload, or hidden what it does? It is written down
  against the owner and the token is measured anew, so it must be sure.
- *Unlike its profile*, `unlike_profile`: whose promise comes first now that one of two must be paused? It holds until
  the next look, and one of the two must be chosen, so one record decides, by round margins.
- *Outgrown*, `MemoryWatch`: how much memory does it really need? Every MiB more counts from now on, and two that
  no longer fit cannot wait for a second record.

A job may be past its profile because its owner changed it, or because the profile was made to look harmless. Both
cost a neighbour more than it was promised. One interim record may show a phase that the profile averages out, so two
in a row are needed. A run that is over before it has two is judged by its final record; what is missing then comes from
the next short run of the same token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from slurm_gpushare.helper import explain, log
from slurm_gpushare.helper.loop import Work
from slurm_gpushare.helper.occupancy import token_of
from slurm_gpushare.helper.pair_speeds import ACTIVITY, ACTIVITY_MEAN, SeenPair, Tally
from slurm_gpushare.helper.pairs import Pair, PairKey
from slurm_gpushare.protocol.errors import SlurmError
from slurm_gpushare.protocol.history import Decision
from slurm_gpushare.protocol.record import ENOUGH, OUTSIDE, Record
from slurm_gpushare.protocol.settings import Config
from slurm_gpushare.slurm.commands import Slurm
from slurm_gpushare.slurm.queue import Job
from slurm_gpushare.store import Store
from slurm_gpushare.store.hookfile import PART_OF_HEADROOM
from slurm_gpushare.store.refine import Numbers, sd_name, tolerance_points
from slurm_gpushare.store.sharing import Strike
from slurm_gpushare.store.stored_jobs import StoredRun
from slurm_gpushare.store.workloads import Profile

IN_A_ROW = 2
LEAST_SAMPLES = 5
"""Of an attribute between two records: the mean of fewer says nothing."""
SDS = 2.0
"""How many standard deviations of a run's own samples its mean may be above the profile's for a while."""
MOST_REMEMBERED = 10_000
"""So many jobs that are over are remembered until their final record comes."""
UNLIKE_POINTS = 15.0
"""Activity so far above the profile's, in points of a hundred, is another workload; runs of one differ by less."""
UNLIKE_MEMORY = 1.05
MEMORY = "mem_used_mib"
_MEANS = {"gpu_util_mean_pct": "gpu_util_pct", "mem_access_mean_pct": "mem_access_pct"}


@dataclass(frozen=True, slots=True)
class Excess:
    """A number of a job that is past its profile."""

    feature: str
    seen: float
    profiled: float

    def __str__(self) -> str:
        return f"{self.feature} is {self.seen:.0f}, measured was {self.profiled:.0f}"


def unlike_profile(record: Record | None, profile: Profile | None) -> bool:
    """Whether a running job is busier than its profile says, or has more memory, by its latest record alone."""
    if record is None or profile is None:
        return False
    used_mib = record.features.mem_used_mib
    if used_mib is not None and used_mib > UNLIKE_MEMORY * profile.mem_used_mib:
        return True
    known = profile.features.get(ACTIVITY_MEAN)
    stats = [period.stats.get(ACTIVITY) for period in (record.alone, record.shared)]
    seen = next((stat for stat in stats if stat is not None and stat.n >= ENOUGH), None)
    return known is not None and seen is not None and seen.mean > known + UNLIKE_POINTS


def spare_memory_pct(config: Config) -> float:
    """What a job may take of a card beyond its profile's memory before it is measured anew.

    A client of MPS fails at its limit: one that comes near it is measured anew, without a limit.
    """
    return config.memory_headroom_pct * (1.0 if config.mps == "off" else 0.8 * PART_OF_HEADROOM)


def memory_excess(record: Record, profile: Profile, headroom_pct: float) -> Excess | None:
    """Whether the job has allocated more than its profile says and the card's headroom covers."""
    seen, total = record.features.mem_used_mib, record.features.mem_total_mib or profile.mem_total_mib
    if seen is None or not total or seen <= profile.mem_used_mib + headroom_pct / 100.0 * total:
        return None
    return Excess(MEMORY, seen, profile.mem_used_mib)


def activity_excess(feature: str, mean: float, features: Numbers, scatter: Numbers) -> Excess | None:
    """Whether a mean over the last record is above the profile's by more than the profile's own spread."""
    profiled = features.get(feature)
    if profiled is None:
        return None
    spread = max(tolerance_points(feature, scatter), SDS * features.get(sd_name(feature), 0.0))
    return Excess(feature, mean, profiled) if mean > profiled + spread else None


@dataclass(slots=True)
class _Followed:
    """One run as far as it was looked at."""

    run_id: str
    seq: int = -1
    before: dict[str, Tally] = field(default_factory=dict)
    judged: int = 0
    in_a_row: int = 0
    past: bool = False


class ProfileCheck:
    """Follows running jobs from interim record to interim record."""

    def __init__(self) -> None:
        self._jobs: dict[int, _Followed] = {}
        self._over: dict[int, _Followed] = {}
        """Jobs that are gone from the queue, until their final record comes."""
        self._short_runs: dict[str, int] = {}
        """Records past the profile in a row, of short runs, by token."""

    def look(
        self, records: Iterable[Record], profiles: Mapping[int, Profile], headroom_pct: float
    ) -> dict[int, Excess]:
        """Jobs that are newly past their profile. `profiles` are those of the running jobs, by SLURM_JOB_ID."""
        self._over.update({job_id: followed for job_id, followed in self._jobs.items() if job_id not in profiles})
        for job_id in list(self._over)[:-MOST_REMEMBERED]:
            del self._over[job_id]
        self._jobs = {job_id: followed for job_id, followed in self._jobs.items() if job_id in profiles}
        found: dict[int, Excess] = {}
        for record in sorted(records, key=lambda record: record.seq):
            profile = profiles.get(record.job_id)
            if profile is None:
                continue
            followed = self._jobs.get(record.job_id)
            if followed is None or followed.run_id != record.run_id:
                followed = self._jobs[record.job_id] = _Followed(record.run_id)
            if record.seq <= followed.seq:
                continue
            followed.seq = record.seq
            judged, excess = self._judge(followed, record, profile, headroom_pct)
            if judged:
                followed.judged += 1
                followed.in_a_row = followed.in_a_row + 1 if excess else 0
            if excess and followed.in_a_row >= IN_A_ROW and not followed.past:
                followed.past = True
                found[record.job_id] = excess
        return found

    def ended(self, record: Record, profile: Profile, headroom_pct: float) -> Excess | None:
        """Judge a run that is over by its final record, if it was too short for enough interim ones."""
        followed = self._over.pop(record.job_id, None) or self._jobs.get(record.job_id)
        if followed is None or followed.run_id != record.run_id:
            followed = _Followed(record.run_id)
        if followed.judged >= IN_A_ROW:
            return None
        judged, excess = self._judge(followed, record, profile, headroom_pct)
        if not judged:
            return None
        before = self._short_runs.pop(profile.token, 0)
        if excess is None:
            return None
        in_a_row = before + followed.in_a_row + 1
        if in_a_row >= IN_A_ROW:
            return excess
        self._short_runs[profile.token] = in_a_row
        return None

    def _judge(
        self, followed: _Followed, record: Record, profile: Profile, headroom_pct: float
    ) -> tuple[bool, Excess | None]:
        """Whether there was enough to judge by, and what is past the profile. Few samples wait for more."""
        found = memory_excess(record, profile, headroom_pct)
        judged = found is not None
        for feature, attribute in _MEANS.items():
            now, before = Tally.of(attribute, record.alone, record.shared), followed.before.get(attribute, Tally())
            mean = now.since(before)
            if mean is None or now.n - before.n < LEAST_SAMPLES:
                continue
            others = Tally.of(OUTSIDE, record.alone, record.shared)
            mean = max(0.0, mean - others.total / now.n)  # what was not the job's
            followed.before[attribute] = now
            judged = True
            found = found or activity_excess(feature, mean, profile.features, profile.scatter)
        return judged, found


# Running jobs that are past their profile: found, written down, and measured anew before they share again.


KIND = "past-profile"
"""Of the decision that says so."""
PROGRESS = "conduct"
"""Under which name the store keeps how far runs that ended were looked at."""


class ProfileWatch:
    """Compares every running job that may share with its profile, as interim records come in."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._check = ProfileCheck()
        progress = store.knowledge.get(PROGRESS) or {}
        self._last_run = int(progress.get("last_run", 0))

    def look(
        self,
        jobs: Iterable[Job],
        records: Sequence[Record],
        pairs: Mapping[PairKey, Pair],
        now_s: float,
        headroom_pct: float,
    ) -> list[Decision]:
        """Jobs that are newly past their profile become strikes; returns what is noted about them."""
        if not records:
            return []
        running = {job.raw_id: job for job in jobs if job.running and token_of(job)}
        profiles = self._store.profiles.by_model({token_of(job) or "" for job in running.values()})
        models = {record.job_id: record.gpu_model or "" for record in records}
        by_job = {}
        for raw_id, job in running.items():
            token = token_of(job) or ""
            # A job without a new record is only to be remembered: any of its profiles will do.
            here = [profiles.get(models[raw_id], {})] if raw_id in models else list(profiles.values())
            profile = next((found[token] for found in here if token in found), None)
            if profile is not None and profile.owner_uid == job.uid:
                by_job[raw_id] = profile
        beside = {own.raw_id: other for pair in pairs.values() for own, other in pair.sides}
        found = [
            (running[raw_id], excess) for raw_id, excess in self._check.look(records, by_job, headroom_pct).items()
        ]
        self._store.violations.strike([strike(job, beside.get(job.raw_id), why, now_s) for job, why in found])
        for job, why in found:
            if why.feature == MEMORY:
                self._store.workloads.raise_memory(token_of(job) or "", int(why.seen) + 1)
            other = beside.get(job.raw_id)
            log.info(KIND, job=job.key, uid=job.uid, beside=other.key if other else None, why=str(why))
        return [
            explain.noted(job, KIND, now_s, beside.get(job.raw_id), feature=why.feature,
                          seen=round(why.seen, 1), profiled=round(why.profiled, 1))
            for job, why in found
        ]  # fmt: skip

    def ended(self, now_s: float, headroom_pct: float) -> list[Decision]:
        """Jobs past their profile, of runs beside somebody that were over before two interim records told of them.

        Memory needs no look here: a run that has ended raises its profile's peak.
        """
        found: list[tuple[StoredRun, int, Excess, int | None]] = []
        new = list(self._store.runs.after(self._last_run))
        for run in new:
            self._last_run = max(self._last_run, run.settled_seq)
            if not run.by_node or run.shared_s <= 0.0:
                continue
            record, profile = self._store.runs.record(run.id), self._store.profiles.get(run.token)
            if record is not None and profile is not None and (why := self._check.ended(record, profile, headroom_pct)):
                beside = max(record.neighbours, key=lambda item: item.seconds, default=None)
                found.append((run, profile.owner_uid, why, beside.job_id if beside else None))
        if new:
            self._store.knowledge.put({PROGRESS: {"last_run": self._last_run}})
        self._store.violations.strike(
            [
                Strike(uid, run.token, run.job_id, int(now_s), why.feature, why.seen, why.profiled, partner)
                for run, uid, why, partner in found
            ]
        )
        for run, uid, why, partner in found:
            log.info(KIND, job=run.job_id, uid=uid, beside=partner, why=str(why), ended=True)
        return [
            Decision(
                run.job_id, int(now_s), KIND, run.node, run.gpu_index, partner,
                reasons={"key": str(run.job_id), "feature": why.feature, "seen": round(why.seen, 1),
                         "profiled": round(why.profiled, 1)},
            )
            for run, _, why, partner in found
        ]  # fmt: skip


def strike(job: Job, other: Job | None, why: Excess, now_s: float) -> Strike:
    """What is written down against the owner of a job."""
    return Strike(
        uid=job.uid,
        token=token_of(job) or "",
        job_id=job.raw_id,
        at_s=int(now_s),
        feature=why.feature,
        seen=why.seen,
        profiled=why.profiled,
        partner_job=other.raw_id if other else None,
    )


# GPU memory, which nothing fences: act as soon as two jobs no longer fit, and learn from those that ran out of it.


NEAR_FULL = 0.9
"""Both jobs' memory over the card's: from here on a failure is taken for out-of-memory."""
_FAILED = frozenset({"FAILED", "OUT_OF_MEMORY"})


REMEMBERED = 10_000
"""Jobs of which it is remembered that they have outgrown their profiles: the latest."""


class MemoryWatch:
    """Compares what jobs hold of a card with what their profiles said."""

    def __init__(self, store: Store, slurm: Slurm) -> None:
        self._store = store
        self._slurm = slurm
        self._told: set[int] = set()

    def look(
        self, pair: Pair, records: Mapping[int, Record], profiles: Mapping[str, Profile], config: Config, now_s: float
    ) -> tuple[list[Decision], list[tuple[Job, Job, str]]]:
        """Who has outgrown its profile is remembered with what it really needs.

        Returns what is noted, and who must go since the two no longer fit: job, neighbour, why.
        """
        decisions: list[Decision] = []
        must_go: list[tuple[Job, Job, str]] = []
        used = {job.raw_id: _used_mib(records.get(job.raw_id)) for job in (pair.resident, pair.guest)}
        while len(self._told) > REMEMBERED:
            self._told.discard(min(self._told))
        total = max((record.features.mem_total_mib or 0.0 for record in records.values()), default=0.0)
        usable = 1.0 - config.memory_headroom_pct / 100.0
        for job, other in pair.sides:
            profile = profiles.get(token_of(job) or "")
            if profile is None or used[job.raw_id] <= profile.mem_used_mib or job.raw_id in self._told:
                continue
            need, beside = used[job.raw_id], max(used[other.raw_id], _expected_mib(other, profiles))
            self._store.workloads.raise_memory(token_of(job) or "", int(need))  # so nobody joins who would not fit
            if total and need + beside > total * usable:
                self._told.add(job.raw_id)
                why = f"memory: {need:,.0f} MiB do not fit beside {beside:,.0f} of {total:,.0f}"
                log.info("memory", job=job.key, beside=other.key, why=why)
                decisions += explain.both(job, other, "outgrown", now_s, why)
                must_go.append((job, other, why))
        return decisions, must_go

    async def ended(self, over: Iterable[tuple[Pair, SeenPair]], now_s: float) -> list[Decision]:
        """Raise the memory estimate of a job that failed while the two filled the card."""
        full = [(pair, seen) for pair, seen in over if _filled(pair, seen)]
        if not full:
            return []
        keys = sorted({job.key for pair, _ in full for job in (pair.resident, pair.guest)})
        try:
            states = {job.key: job.state for job in await Work(self._slurm.jobs, keys)}
        except SlurmError as error:
            log.info("ended-jobs", message=error.what)
            return []
        decisions = []
        for pair, seen in full:
            for job, other in pair.sides:
                if states.get(job.key) in _FAILED:
                    need = _needed_mib(seen.records[job.raw_id], seen.records[other.raw_id])
                    self._store.workloads.raise_memory(token_of(job) or "", need)
                    log.info("out-of-memory", job=job.key, beside=other.key, mem_mib=need)
                    decisions.append(explain.noted(job, "out-of-memory", now_s, other, mem_mib=need))
        return decisions


def _used_mib(record: Record | None) -> float:
    return (record.features.mem_used_mib or 0.0) if record else 0.0


def _expected_mib(job: Job, profiles: Mapping[str, Profile]) -> float:
    profile = profiles.get(token_of(job) or "")
    return float(profile.mem_used_mib) if profile else 0.0


def _filled(pair: Pair, seen: SeenPair) -> bool:
    records = [seen.records.get(job.raw_id) for job in (pair.resident, pair.guest)]
    used = [record.features.mem_used_mib for record in records if record]
    total = max((record.features.mem_total_mib or 0.0 for record in records if record), default=0.0)
    return len(used) == 2 and total > 0 and sum(value or 0.0 for value in used) >= NEAR_FULL * total


def _needed_mib(record: Record, other: Record) -> int:
    """At least what it had, and more than what its neighbour left of the card."""
    total = record.features.mem_total_mib or other.features.mem_total_mib or 0.0
    left = total - (other.features.mem_used_mib or 0.0)
    return int(max(record.features.mem_used_mib or 0.0, left)) + 1
