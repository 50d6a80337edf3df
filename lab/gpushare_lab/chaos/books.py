"""The books after a chaos run: every job once, no shard leaked, no card over-committed, no record lost or twice."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from math import comb, inf
from statistics import median
from typing import Any

from gpushare_lab.chaos.fault import Fault
from gpushare_lab.chaos.site import Vitals
from gpushare_lab.chaos.stream import Mark, Submitted
from slurm_gpushare.slurm.accounting import AccountedJob

SHORTEST_S = 2.0
"""A job that ran for less may have left no sample."""
FORGETS_S = 10.0
"""A killed slurmctld may recover a state so much older: jobs that came, started or ended since are run again or lost.

The control run shows that it does so without us too.
"""
SURPRISING = 0.01
"""With us Slurm forgot more than without, if chance alone would make such a difference less often than this."""
UNENDED = frozenset({"PENDING", "RUNNING", "SUSPENDED", "REQUEUED", "REQUEUE_HOLD", "COMPLETING", "RESIZING"})
"""States in accounting after which more is to come."""
LEVEL, SOME = 1.15, 3
"""What the helper's process holds is level up to this factor, and up to so many files or threads, which come and go."""


@dataclass(frozen=True, slots=True)
class SlurmsDoing:
    """When Slurm itself may have ended, lost or repeated jobs (unix times)."""

    killing: Collection[tuple[float, float]] = ()
    """Begin and end of the faults for which Slurm ends jobs."""
    crashes: Collection[float] = ()
    """When slurmctld was killed."""

    def ended(self, end_s: float) -> bool:
        return any(begin_s <= end_s <= until_s for begin_s, until_s in self.killing)

    def forgot(self, times: Collection[float]) -> bool:
        """Whether something that happened to a job at one of these times may have been forgotten."""
        return any(abs(at_s - crash_s) <= FORGETS_S for at_s in times for crash_s in self.crashes)


@dataclass(frozen=True, slots=True)
class Kill:
    """A ``kill -9`` of slurmctld: what it could have forgotten, and what it did."""

    at_s: float
    jobs: int
    """That came, started or ended so close to it that they may be forgotten."""
    ended: int
    """Of these: lost, run again, or ended by Slurm."""


@dataclass
class Line:
    """What became of the jobs that were submitted during one fault."""

    fault: str
    group: str
    jobs: int = 0
    completed: int = 0
    ended_by_fault: int = 0
    """By Slurm itself, because a node went down, a prolog died or slurmctld forgot: accounted as such."""
    lost: int = 0
    duplicated: int = 0
    longest_wait_s: float = 0.0
    longest_extra_wait_s: float = 0.0
    records_lost: int = 0
    took_s: float = 0.0
    back_s: float = 0.0
    """After the fault was mended, until the helper had finished a tick."""
    error: str = ""

    @property
    def verdict(self) -> str:
        if self.error:
            return self.error
        return "ok" if not (self.lost or self.duplicated or self.records_lost) else "FAILED"


@dataclass
class Books:
    """All that is claimed of a run."""

    lines: list[Line]
    over_committed: list[str] = field(default_factory=list)
    leaked: list[str] = field(default_factory=list)
    spans: int | None = None
    """Times that two jobs shared a card; None: a run without us. A run in which nobody shared proves nothing."""
    pauses: int = 0
    """Times that the helper paused a job."""
    open_spans: int = 0
    suspended: int = 0
    records: int = 0
    records_twice: list[int] = field(default_factory=list)
    disagree: list[str] = field(default_factory=list)
    """Jobs whose record and accounting differ by more than some seconds in their length."""
    lost_jobs: list[str] = field(default_factory=list)
    lost_records: list[int] = field(default_factory=list)
    grew: list[str] = field(default_factory=list)
    """What the helper's process holds more and more of."""
    kills: list[Kill] = field(default_factory=list)
    """Of slurmctld."""
    control_kills: list[Kill] = field(default_factory=list)
    """The same without us."""

    @property
    def unexplained(self) -> list[str]:
        """Why the jobs that Slurm ended after a kill are not all its own doing; empty if they are."""
        found = [f"{kill.ended} of {kill.jobs} jobs" for kill in self.kills if kill.ended > kill.jobs]
        if self.control_kills and chance(self.kills, self.control_kills) < SURPRISING:
            found.append(f"{share(self.kills)}, without us {share(self.control_kills)}")
        return found

    @property
    def sound(self) -> bool:
        left = self.leaked or self.open_spans or self.suspended or self.grew
        wrong = self.over_committed or self.records_twice or self.disagree or self.spans == 0 or self.unexplained
        return not (left or wrong) and all(line.verdict == "ok" for line in self.lines)

    def as_dict(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "lines": [{**asdict(line), "verdict": line.verdict} for line in self.lines],
            "forgotten": {"with us": share(self.kills), "without us": share(self.control_kills)},
            "unexplained": self.unexplained,
            "sound": self.sound,
        }


def share(kills: Collection[Kill]) -> str:
    """How many of the jobs that some kills could have made Slurm forget were ended by it."""
    ended, jobs = sum(kill.ended for kill in kills), sum(kill.jobs for kill in kills)
    return f"{ended} of {jobs} ({100 * ended / jobs:.0f} %)" if jobs else "0 of 0"


def chance(kills: Collection[Kill], control: Collection[Kill]) -> float:
    """How likely so many or more of the ended jobs would be in `kills`, if both were alike (Fisher's exact test)."""
    ended, jobs = sum(kill.ended for kill in kills), sum(kill.jobs for kill in kills)
    all_ended, all_jobs = (ended + sum(kill.ended for kill in control), jobs + sum(kill.jobs for kill in control))
    ways = sum(comb(jobs, one) * comb(all_jobs - jobs, all_ended - one) for one in range(ended, all_ended + 1))
    return ways / comb(all_jobs, all_ended)


def grown(vitals: Sequence[Vitals]) -> list[str]:
    """What the helper's process held clearly more of in the last third of a run than in the middle one.

    Most of the time: while 50,000 jobs wait it needs more for a moment.
    """
    third = len(vitals) // 3
    if not third:
        return []
    middle, last = vitals[third : 2 * third], vitals[2 * third :]
    found = []
    for name in ("rss_mib", "files", "threads"):
        before, after = (median(getattr(item, name) for item in part) for part in (middle, last))
        if after > LEVEL * before + (0 if name == "rss_mib" else SOME):
            found.append(f"{name}: {before:.0f} -> {after:.0f}")
    return found


def jobs_by_fault(
    faults: Collection[Fault], submitted: Collection[Submitted], accounted: Mapping[str, AccountedJob],
    marks: Collection[Mark], slurms: SlurmsDoing,
) -> tuple[list[Line], list[str]]:  # fmt: skip
    """A line for each fault, and the jobs that were lost. `accounted` is by sacct's job id (``12_0``)."""
    lines = {fault.name: Line(fault.name, fault.group) for fault in faults}
    marks_of = _by_job(marks)
    last_of_id = {job.raw: job for job in submitted}
    lost = []
    for job in submitted:
        # Slurm forgot the earlier one of two jobs with the same id.
        line, found = lines[job.fault], accounted.get(job.raw) if last_of_id[job.raw] is job else None
        line.jobs += 1
        own = marks_of[job.own]
        if found and found.start_s:
            line.longest_wait_s = max(line.longest_wait_s, found.start_s - job.submit_s)
        fate = _fate(job, found, own, slurms)
        line.completed += fate == "completed"
        line.ended_by_fault += fate in ("forgotten", "ended")
        line.duplicated += fate == "twice"
        if fate == "lost":
            line.lost += 1
            lost.append(f"{job.raw}: {found.state if found else 'not in accounting'}")
    calm_s = next((line.longest_wait_s for line in lines.values() if line.group == "calm"), 0.0)
    for line in lines.values():
        line.longest_extra_wait_s = round(max(0.0, line.longest_wait_s - calm_s), 1)
        line.longest_wait_s = round(line.longest_wait_s, 1)
    return list(lines.values()), lost


def _fate(job: Submitted, found: AccountedJob | None, own: Collection[Mark], slurms: SlurmsDoing) -> str:
    runs = sum(mark.what == "end" for mark in own)
    if found and found.state == "COMPLETED" and runs == 1:
        return "completed"
    if slurms.forgot(_times(job, own)):
        return "forgotten"
    if found and slurms.ended(found.end_s or 0):
        return "ended"
    return "twice" if runs > 1 else "lost"


def _times(job: Submitted, own: Collection[Mark]) -> list[float]:
    """When a job came, started and ended."""
    return [job.submit_s, *(mark.at_s for mark in own)]


def forgotten_at_kills(
    submitted: Collection[Submitted], accounted: Mapping[str, AccountedJob], marks: Collection[Mark],
    slurms: SlurmsDoing,
) -> list[Kill]:  # fmt: skip
    """For each kill of slurmctld, how many jobs it could have forgotten something of, and how many it ended.

    A job that is close to two kills counts for the first.
    """
    marks_of, last_of_id = _by_job(marks), {job.raw: job for job in submitted}
    fates: dict[float, list[str]] = {crash_s: [] for crash_s in slurms.crashes}
    for job in submitted:
        own, found = marks_of[job.own], accounted.get(job.raw) if last_of_id[job.raw] is job else None
        for crash_s in slurms.crashes:
            if SlurmsDoing(crashes=[crash_s]).forgot(_times(job, own)):
                fates[crash_s].append(_fate(job, found, own, slurms))
                break
    return [Kill(crash_s, len(close), close.count("forgotten")) for crash_s, close in fates.items()]


def without_end(
    submitted: Collection[Submitted], accounted: Mapping[str, AccountedJob], marks: Collection[Mark],
    slurms: SlurmsDoing,
) -> list[str]:  # fmt: skip
    """Accepted jobs of whose end accounting has not heard yet; of what Slurm forgot it may never hear."""
    marks_of = _by_job(marks)
    return [
        job.raw
        for job in submitted
        if not _has_ended(accounted.get(job.raw)) and not slurms.forgot(_times(job, marks_of[job.own]))
    ]


def _has_ended(job: AccountedJob | None) -> bool:
    return job is not None and job.end_s is not None and job.state not in UNENDED


@dataclass(frozen=True, slots=True)
class TimeOnCard:
    """A job on a card."""

    job_id: int
    node: str
    gpu: int
    begin_s: float
    end_s: float
    whole: bool


def stays(
    marks: Collection[Mark], accounted: Collection[AccountedJob], crashes: Collection[float] = ()
) -> list[TimeOnCard]:
    """Who was where, by the jobs' own word. A job that was killed wrote no end: of that accounting knows.

    `accounted` has the earlier runs of requeued jobs too. A job that slurmctld forgot in one of its `crashes` has no
    end anywhere: its node ends it some seconds later, and Slurm gives its card away meanwhile.
    """
    found = []
    for own in _by_job(marks).values():
        for mark, then in zip_longest(own, own[1:]):
            if mark.what != "start":
                continue
            ends = [then.at_s] if then and then.what == "end" else _ended(mark, accounted) or _forgotten(mark, crashes)
            found += [
                TimeOnCard(mark.job_id, mark.node, gpu, mark.at_s, min(ends, default=inf), whole=mark.shards != 1)
                for gpu in mark.gpus
            ]
    return found


def _by_job(marks: Collection[Mark]) -> defaultdict[str, list[Mark]]:
    """The marks of each job, in order of time."""
    found: defaultdict[str, list[Mark]] = defaultdict(list)
    for mark in sorted(marks, key=lambda mark: mark.at_s):
        found[mark.own].append(mark)
    return found


def _ended(mark: Mark, accounted: Collection[AccountedJob]) -> list[float]:
    """When the run that wrote a mark ended, as accounting has it."""
    return [job.end_s for job in accounted if job.raw_id == mark.job_id and job.end_s and _began(job, mark.at_s)]


def _forgotten(mark: Mark, crashes: Collection[float]) -> list[float]:
    """When slurmctld may have forgotten a run: also in a kill just before its job, which was on its way to a node."""
    return [crash_s for crash_s in crashes if crash_s >= mark.at_s - FORGETS_S]


def _began(job: AccountedJob, at_s: float) -> bool:
    """Whether a run of a job is the one that wrote a mark at that time, some seconds after its start."""
    return job.start_s is not None and job.start_s - 1 <= at_s <= (job.end_s or at_s) + 1


def over_committed(stays: Collection[TimeOnCard]) -> list[str]:
    """Cards that had more than two jobs at once, or one beside a job that has the whole card."""
    there: dict[tuple[str, int], list[TimeOnCard]] = defaultdict(list)
    found: set[str] = set()
    for stay in sorted(stays, key=lambda stay: stay.begin_s):
        card = (stay.node, stay.gpu)
        here = there[card] = [*(other for other in there[card] if other.end_s > stay.begin_s), stay]
        if len(here) > 2 or (len(here) > 1 and any(other.whole for other in here)):
            found.add(f"{stay.node}:{stay.gpu}: jobs {', '.join(str(other.job_id) for other in here)}")
    return sorted(found)
