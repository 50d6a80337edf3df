"""Is a running job still what was measured of its token? Three questions, which need three answers:

- *Past its profile*, `ProfileCheck`: has its owner changed the workload, or hidden what it does? It is written down
  against the owner and the token is measured anew, so it must be sure.
- *Unlike its profile*, `unlike_profile`: whose promise comes first now that one of two must be paused? It holds until
  the next look, and one of the two must be chosen, so one record decides, by round margins.
- *Outgrown*, `memory.MemoryWatch`: how much memory does it really need? Every MiB more counts from now on, and two that
  no longer fit cannot wait for a second record.

A job may be past its profile because its owner changed it, or because the profile was made to look harmless. Both
cost a neighbour more than it was promised. One interim record may show a phase that the profile averages out, so two
in a row are needed. A run that is over before it has two is judged by its final record; what is missing then comes from
the next short run of the same token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from slurm_gpushare.coschedule.pairs.final_records import ACTIVITY, ACTIVITY_MEAN, ENOUGH
from slurm_gpushare.coschedule.pairs.measuring import Tally
from slurm_gpushare.store.combine import Numbers, sd_name, tolerance_points
from slurm_gpushare.store.workloads import Profile
from slurm_gpushare.telemetry.record import Record

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

    def __init__(self, headroom_pct: float) -> None:
        self._headroom_pct = headroom_pct
        self._jobs: dict[int, _Followed] = {}
        self._over: dict[int, _Followed] = {}
        """Jobs that are gone from the queue, until their final record comes."""
        self._short_runs: dict[str, int] = {}
        """Records past the profile in a row, of short runs, by token."""

    def look(self, records: Iterable[Record], profiles: Mapping[int, Profile]) -> dict[int, Excess]:
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
            judged, excess = self._judge(followed, record, profile)
            if judged:
                followed.judged += 1
                followed.in_a_row = followed.in_a_row + 1 if excess else 0
            if excess and followed.in_a_row >= IN_A_ROW and not followed.past:
                followed.past = True
                found[record.job_id] = excess
        return found

    def ended(self, record: Record, profile: Profile) -> Excess | None:
        """Judge a run that is over by its final record, if it was too short for enough interim ones."""
        followed = self._over.pop(record.job_id, None) or self._jobs.get(record.job_id)
        if followed is None or followed.run_id != record.run_id:
            followed = _Followed(record.run_id)
        if followed.judged >= IN_A_ROW:
            return None
        judged, excess = self._judge(followed, record, profile)
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

    def _judge(self, followed: _Followed, record: Record, profile: Profile) -> tuple[bool, Excess | None]:
        """Whether there was enough to judge by, and what is past the profile. Few samples wait for more."""
        found = memory_excess(record, profile, self._headroom_pct)
        judged = found is not None
        for feature, attribute in _MEANS.items():
            now, before = Tally.of(attribute, record.alone, record.shared), followed.before.get(attribute, Tally())
            mean = now.since(before)
            if mean is None or now.n - before.n < LEAST_SAMPLES:
                continue
            followed.before[attribute] = now
            judged = True
            found = found or activity_excess(feature, mean, profile.features, profile.scatter)
        return judged, found
