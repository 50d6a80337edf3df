"""One measurement: the cards of a job, its processes and its host, read step by step into records.

Of each card, or of all cards of a gang, a `RunSoFar` knows what was seen so far: samples in, a record out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from slurm_gpushare.node.host import JobCounters, NodeCounters
from slurm_gpushare.node.nvml import Cards, CardSample
from slurm_gpushare.node.processes import Members, has_left
from slurm_gpushare.node.shares import Neighbours, Share, activity, is_at_rest, joined
from slurm_gpushare.node.stats import Summaries
from slurm_gpushare.protocol.record import (
    ENOUGH,
    MAX_NEIGHBOURS,
    OUTSIDE,
    Closed,
    Features,
    Mps,
    Neighbour,
    Period,
    Record,
    RecordKind,
    Scope,
    new_id,
)

# Host counters, power and clocks change slowly and cost the most to read.
SLOW_EVERY = 4
# Once the profile is closed only the activity is of interest, and less of it.
AFTER_PROFILE = 5

AT_WORK_PCT = 5.0
"""Activity of a job's processes from which on they do not stand still."""

# Utilisation is an average over up to a second: so long after a neighbour came or went it is neither this nor that.
_SETTLE_S = 1.0
_COMES_AND_GOES_S = 5.0
"""A neighbour that comes and goes for so long, so that no reading is of one kind, is there."""
LEAST_UNSEEN_PCT = 20.0
"""Who uses so much of a card and is not seen there, hides: bursts and the card's own averages explain less."""
_UNSEEN_OVER_S = 30.0
"""Over which the mean of it is taken: the card's last second may be busier than the time since the last look."""
_SELDOM = 100.0
"""What costs time for each of a job's processes rests so many times as long: 1 % of a core, however many there are."""
_GROWTH_PART = 0.02
_TRIAL_S = 120.0
"""A new neighbour that has not come onto the card by then is waited for at the usual pace."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who is measured, where, and by whom."""

    job_id: int
    node: str
    gpu_index: int
    scope: Scope = Scope.JOB
    token: str | None = None
    others: tuple[int, ...] = ()
    """The other GPUs of a gang, which are measured as one."""

    @property
    def gpus(self) -> tuple[int, ...]:
        return self.gpu_index, *self.others


class RunSoFar:
    """One job on one card, from the prolog to the epilog, in fixed memory."""

    def __init__(self, identity: Identity, start_s: float) -> None:
        self.identity = identity
        self.closed = Closed.OPEN
        self.gpu_model: str | None = None
        self.one_process = self.blind = self.unsound = False
        self.mps: Mps | None = None
        self.latest: Mapping[str, float] = {}
        self._start_s = start_s
        self._run_id = new_id()
        self._seq = 0
        self._profile, self._alone, self._shared = Summaries(), Summaries(), Summaries()
        self._profile_alone_s = self._profile_shared_s = self._alone_s = self._shared_s = 0.0
        self._neighbours: dict[int, float] = {}
        self._mem_total_mib: float | None = None
        self._peak_mem_mib: float | None = None
        self._told_mem_mib = 0.0
        self._was_shared: bool | None = None
        self._since_change_s = _SETTLE_S
        self._unsettled_s = 0.0
        self.own_sm_pct = 0.0
        """What its busiest process used of a card at the last reading."""
        self.own_pids: set[int] = set()
        """Its processes on the card at the last reading."""
        self.beside: set[int] = set()
        self._beside_samples, self._beside_s = 0, 0.0
        self._told_samples = 0
        self._untold_s = 0.0
        self._unseen_pct = self._usually_unseen_pct = 0.0

    @property
    def begins_to_share(self) -> bool:
        """Whether too little was seen of it beside its present neighbours for a verdict: it is looked at often."""
        return bool(self.beside) and self._beside_samples < ENOUGH and self._beside_s < _TRIAL_S

    @property
    def has_news(self) -> bool:
        """Whether enough was seen for a verdict that no record has told of yet."""
        return self._told_samples < ENOUGH <= self._beside_samples

    @property
    def memory_grew(self) -> bool:
        """Whether the peak has passed that of the last record by a fiftieth of the card."""
        step_mib = _GROWTH_PART * (self._mem_total_mib or 0.0)
        return (self._peak_mem_mib or 0.0) > self._told_mem_mib + step_mib

    @property
    def profile_s(self) -> float:
        return self._profile_alone_s + self._profile_shared_s

    def add_cards(
        self,
        samples: Sequence[CardSample],
        owns: Callable[[int], bool | None],
        neighbours: Neighbours,
        elapsed_s: float,
        *,
        stopped: bool = False,
    ) -> None:
        """Take a reading of the card, or of all cards of a gang, that stands for the last `elapsed_s` seconds.

        It counts while the job is on the card; where one side stood still, `stopped` by the helper's order or at rest
        by itself, that is neither alone nor shared, and only what the job holds of its memory counts.
        """
        if set(neighbours) != self.beside:
            self.beside, self._beside_samples, self._told_samples, self._beside_s = set(neighbours), 0, 0, 0.0
            self._unseen_pct = 0.0
        self._beside_s += elapsed_s
        others = neighbours if self.identity.scope is Scope.JOB else None  # a user cannot see who was given the card
        shares = [Share(sample, owns, others) for sample in samples]
        self.own_pids = {pid for share in shares for pid in share.own}
        self.own_sm_pct = max((load.sm_pct or 0.0 for share in shares for load in share.own.values()), default=0.0)
        totals = [sample.mem_total_mib for sample in samples if sample.mem_total_mib]
        self._mem_total_mib = min(totals, default=self._mem_total_mib)
        if any(share.undecided for share in shares) or not any(share.present for share in shares):
            return
        at_rest, is_shared = is_at_rest(shares), any(share.shared for share in shares)
        hidden = not stopped and self._is_hidden(shares, elapsed_s, is_seen=is_shared and not at_rest)
        if stopped or at_rest or (hidden and not is_shared):
            self._peak([share.own_mem_mib for share in shares])
            return
        changed = self._was_shared is not None and self._was_shared is not is_shared
        self._was_shared = is_shared
        self._since_change_s = 0.0 if changed else self._since_change_s + elapsed_s
        settled = self._since_change_s >= _SETTLE_S
        self._unsettled_s = max(0.0, self._unsettled_s + (-elapsed_s if settled else elapsed_s))
        if self._unsettled_s > _COMES_AND_GOES_S:
            settled = is_shared = True
        pairs = zip(samples, shares, strict=True)
        values = joined([activity(sample, share, settled=settled) for sample, share in pairs if share.present])
        if outside_pct := sum(share.outside_pct for share in shares) / len(shares):
            values[OUTSIDE] = outside_pct
        self.latest = values
        self._peak([values.get("gpu_mem_mib")])
        if settled:
            (self._shared if is_shared else self._alone).add(values, elapsed_s)
            self._beside_samples += is_shared and "proc_sm_pct" in values  # a card tells that more seldom than we look
        if self.closed is Closed.OPEN:
            self._profile.add(values, elapsed_s)
            self._profile.add(joined([sample.other for sample in samples]))
        self._count_time(elapsed_s, is_shared, neighbours)

    def _is_hidden(self, shares: Sequence[Share], elapsed_s: float, *, is_seen: bool) -> bool:
        """Whether somebody is at work on the card, by the mean of the last half minute, whom nobody saw there.

        Somebody who stands still, or has left the card, whenever it is looked at. `is_seen`: a neighbour was seen at
        work. What a card is always busier than its processes, it was before there was a neighbour, too.
        """
        known = [share.unseen_pct for share in shares if share.unseen_pct is not None]
        unseen_pct = 0.0 if is_seen or not known else sum(known) / len(known)
        weight = min(1.0, elapsed_s / _UNSEEN_OVER_S)
        if not self.beside:
            self._usually_unseen_pct += weight * (unseen_pct - self._usually_unseen_pct)
        elif known or is_seen:
            unseen_pct -= 0.0 if is_seen else self._usually_unseen_pct
            self._unseen_pct += weight * (unseen_pct - self._unseen_pct)
        hides = self._unseen_pct > LEAST_UNSEEN_PCT
        untold = hides or any(share.untold for share in shares)
        self._untold_s = self._untold_s + elapsed_s if untold else 0.0
        return bool(self.beside) and not is_seen and (hides or unseen_pct > LEAST_UNSEEN_PCT)

    def _peak(self, mem_mib: Iterable[float | None]) -> None:
        self._peak_mem_mib = max((part for part in (*mem_mib, self._peak_mem_mib) if part is not None), default=None)

    def _count_time(self, elapsed_s: float, is_shared: bool, neighbours: Collection[int]) -> None:
        profiled_s = elapsed_s if self.closed is Closed.OPEN else 0.0
        if is_shared:
            self._shared_s += elapsed_s
            self._profile_shared_s += profiled_s
            for job_id in neighbours:
                self._neighbours[job_id] = self._neighbours.get(job_id, 0.0) + elapsed_s
        else:
            self._alone_s += elapsed_s
            self._profile_alone_s += profiled_s

    def add_host(self, values: Mapping[str, float]) -> None:
        """Take one reading of the host's counters: part of the profile only."""
        if self.closed is Closed.OPEN:
            self._profile.add(values)

    def close_profile(self, why: Closed) -> None:
        """End the profile; the job's activity alone and shared goes on being counted."""
        if self.closed is Closed.OPEN:
            self.closed = why

    def record(self, kind: RecordKind, now_s: float) -> Record:
        """All that is known, as a record that replaces the run's earlier ones."""
        if kind is RecordKind.FINAL:
            self.close_profile(Closed.END)
        self._seq += 1
        self._told_mem_mib, self._told_samples = self._peak_mem_mib or 0.0, self._beside_samples
        longest = sorted(self._neighbours.items(), key=lambda item: -item[1])[:MAX_NEIGHBOURS]
        return Record(
            record_id=new_id(),
            run_id=self._run_id,
            seq=self._seq,
            kind=kind,
            scope=self.identity.scope,
            job_id=self.identity.job_id,
            node=self.identity.node,
            gpu_index=self.identity.gpu_index,
            gpu_model=self.gpu_model,
            start_s=round(self._start_s, 3),
            end_s=round(max(now_s, self._start_s), 3),
            closed=self.closed,
            features=self._features(),
            profile=Period(round(self._profile_alone_s, 3), round(self._profile_shared_s, 3), self._profile.stats()),
            alone=Period(alone_s=round(self._alone_s, 3), stats=self._alone.stats()),
            shared=Period(shared_s=round(self._shared_s, 3), stats=self._shared.stats()),
            neighbours=tuple(Neighbour(job_id, round(seconds, 3)) for job_id, seconds in longest),
            token=self.identity.token,
            one_process=self.one_process,
            mps=self.mps,
            blind=self.blind,
            unsound=self.unsound,
            gpus=len(self.identity.gpus),
            untold_s=round(self._untold_s, 3),
        )

    def _features(self) -> Features:
        util, access = self._profile.get("gpu_util_pct"), self._profile.get("mem_access_pct")
        mem = self._profile.get("gpu_mem_pct")
        return Features(
            mgup=util and util.max,
            mgmap=mem and mem.max,
            mgtsamp=access and access.max,
            gpu_util_mean_pct=util and util.mean,
            mem_access_mean_pct=access and access.mean,
            # It decides whether two jobs fit at all, so its peak is taken over the whole run, not the profile.
            mem_used_mib=self._peak_mem_mib,
            mem_total_mib=self._mem_total_mib,
        )


class Measurement:
    """Samples taken by `step` until the caller has enough; one record for each card, or for all cards of a gang."""

    def __init__(
        self,
        identities: Sequence[Identity],
        members: Members,
        *,
        limit_s: float,
        neighbours: Callable[[int], Neighbours] = lambda _: {},
        log: Callable[[str], None],
        start_s: float | None = None,
        owner_uid: int | None = None,
    ) -> None:
        """`owner_uid`: whose processes on the card are the job's, also those that have left it; None: only its own."""
        start_s = time.time() if start_s is None else start_s
        self.runs = {identity.gpu_index: RunSoFar(identity, start_s) for identity in identities}
        self.members = members
        self._limit_s = limit_s
        self._neighbours = neighbours
        self._owner_uid = owner_uid
        self._cards = Cards(tuple(gpu for identity in identities for gpu in identity.gpus), log)
        self._node = NodeCounters()
        self._job = JobCounters()
        self._steps = 0
        self._last = time.monotonic()
        self._rests_until_s = 0.0

    @property
    def profiling(self) -> bool:
        return any(run.closed is Closed.OPEN for run in self.runs.values())

    @property
    def has_neighbours(self) -> bool:
        """Whether other jobs were given one of its cards at the last step."""
        return any(run.beside for run in self.runs.values())

    @property
    def begins_to_share(self) -> bool:
        """Whether it is to be looked at often, since a pair has begun."""
        return any(run.begins_to_share for run in self.runs.values())

    @property
    def has_news(self) -> bool:
        """Whether a record should be written now: a job's memory has grown, or a pair can be judged."""
        return any(run.memory_grew or run.has_news for run in self.runs.values())

    @property
    def pids(self) -> set[int]:
        """The job's processes on its cards at the last reading."""
        return {pid for run in self.runs.values() for pid in run.own_pids}

    def _owns(self, pid: int, neighbours: Neighbours) -> bool | None:
        """Who leaves the job (`setsid -f`) and works on its card is of it, unless its owner has another one there."""
        owner_uid, ours = self._owner_uid, self.members.owns(pid)
        if ours is False and owner_uid and owner_uid not in neighbours.values():
            return has_left(pid, owner_uid)
        return ours

    @property
    def worked(self) -> bool:
        """Whether the job's processes were at work on a card at the last reading."""
        return any(run.own_sm_pct > AT_WORK_PCT for run in self.runs.values())

    def step(self, stopped: Collection[int] = ()) -> None:
        """Read everything that is due now.

        `stopped` are the jobs that stood still by the helper's order since the last step.
        """
        rested = time.monotonic() >= self._rests_until_s
        slow = self._steps % SLOW_EVERY == 0 and rested
        self._steps += 1
        spent_s = -time.thread_time()
        if slow or (rested and not self.profiling):
            self.members.refresh()
        spent_s += time.thread_time()
        samples = self._cards.read(everything=slow and self.profiling)
        now = time.monotonic()
        elapsed, self._last = now - self._last, now
        for run in self.runs.values():
            gpus = run.identity.gpus
            run.unsound = self._cards.lost or any(samples[gpu][0].unsound for gpu in gpus if gpu in samples)
            if any(gpu not in samples for gpu in gpus):
                continue
            cards, readings = zip(*(samples[gpu] for gpu in gpus), strict=True)
            run.gpu_model, run.one_process = cards[0].model, any(card.one_process for card in cards)
            run.mps, run.blind = cards[0].mps, any(card.blind for card in cards)
            neighbours = {job: uid for gpu in gpus for job, uid in self._neighbours(gpu).items()}
            at_rest = not {run.identity.job_id, *neighbours}.isdisjoint(stopped)
            owns = partial(self._owns, neighbours=neighbours)
            run.add_cards(readings, owns, neighbours, elapsed, stopped=at_rest)
            if run.profile_s >= self._limit_s:
                run.close_profile(Closed.LIMIT)
        if slow and self.profiling and self.members.processes:
            spent_s -= time.thread_time()
            values = self._node.read() | self._job.read(self.members.processes)
            spent_s += time.thread_time()
            for run in self.runs.values():
                run.add_host(values)
        self._rests_until_s = max(self._rests_until_s, time.monotonic() + _SELDOM * spent_s)

    def close_profile(self, why: Closed) -> None:
        for run in self.runs.values():
            run.close_profile(why)

    def records(self, kind: RecordKind, end_s: float | None = None) -> list[Record]:
        """A record for each card; a final one may be written well after the job's end, `end_s`."""
        end_s = time.time() if end_s is None else end_s
        return [run.record(kind, end_s) for run in self.runs.values()]
