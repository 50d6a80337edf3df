"""What is known so far of one job on one card, or on all cards of a gang: samples in, a record out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from slurm_gpushare.node.nvml import CardSample, ProcessLoad
from slurm_gpushare.node.processes import stands_still
from slurm_gpushare.node.stats import Summaries
from slurm_gpushare.protocol.record import (
    MAX_NEIGHBOURS,
    Closed,
    Features,
    Neighbour,
    Period,
    Record,
    RecordKind,
    Scope,
    Stat,
    new_id,
)

# Utilisation is an average over up to a second: so long after a neighbour came or went it is neither this nor that.
_SETTLE_S = 1.0
_GROWTH_PART = 0.02


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


class Share:
    """How one reading of a card divides: ours, other people's, and what cannot be told."""

    def __init__(self, sample: CardSample, owns: Callable[[int], bool | None], neighbours: Collection[int]) -> None:
        processes = sample.processes
        self.undecided = False
        self.own: list[ProcessLoad] = []
        self.pids: dict[int, bool] = {}
        """Who is on the card, and whether they are ours."""
        if processes is None:  # the card does not say who is on it: go by who was given it
            self.present, self.shared = True, bool(neighbours)
            return
        verdicts = {pid: owns(pid) for pid in processes}
        self.own = [processes[pid] for pid, ours in verdicts.items() if ours]
        self.present = bool(self.own)
        self.shared = any(ours is False for ours in verdicts.values())
        self.undecided = not self.shared and any(ours is None for ours in verdicts.values())
        self.pids = {pid: bool(ours) for pid, ours in verdicts.items()}

    @property
    def own_mem_mib(self) -> float | None:
        return _total([load.mem_mib for load in self.own])


def activity(sample: CardSample, share: Share, *, settled: bool) -> dict[str, float]:
    """The activity attributes of one reading; what is not known is left out."""
    alone = settled and not share.shared
    total = sample.mem_total_mib
    own_sm = _total([load.sm_pct for load in share.own])
    own_access = _total([load.mem_access_pct for load in share.own])
    own_mem = share.own_mem_mib
    if own_mem is None and alone:
        own_mem = sample.mem_used_mib  # some drivers do not give memory by process
    values = {
        "gpu_util_pct": sample.util_pct if alone else own_sm,
        "mem_access_pct": sample.mem_access_pct if alone else own_access,
        "gpu_mem_mib": own_mem,
        "gpu_mem_pct": 100 * own_mem / total if own_mem is not None and total else None,
        "proc_sm_pct": own_sm,
        "proc_mem_access_pct": own_access,
        "card_util_pct": sample.util_pct,
        "card_mem_access_pct": sample.mem_access_pct,
        "card_mem_pct": 100 * sample.mem_used_mib / total if sample.mem_used_mib is not None and total else None,
    }
    return {name: value for name, value in values.items() if value is not None}


def is_paused(shares: Sequence[Share]) -> bool:
    """Whether we or our neighbours are paused: all of their processes on these cards stand still.

    One that is stopped among others, which anybody can have, must not hide what the others do.
    """
    on_card = [who for share in shares for who in share.pids.items()]
    sides = ([pid for pid, ours in on_card if ours], [pid for pid, ours in on_card if not ours])
    return any(side and all(map(stands_still, side)) for side in sides)


_HIGHEST = frozenset({"gpu_mem_mib", "gpu_mem_pct", "card_mem_pct"})
"""Of a gang the fullest card counts: a neighbour must fit on each of them. Of all else the mean."""


def joined(readings: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Readings of a gang's cards at one instant as one; what a card does not tell is left out."""
    if len(readings) == 1:
        return dict(readings[0])
    names = [name for name in readings[0] if all(name in reading for reading in readings)]
    values = {name: [reading[name] for reading in readings] for name in names}
    return {name: max(some) if name in _HIGHEST else sum(some) / len(some) for name, some in values.items()}


def _total(parts: list[float | None]) -> float | None:
    known = [part for part in parts if part is not None]
    return sum(known) if parts and len(known) == len(parts) else None


class RunSoFar:
    """One job on one card, from the prolog to the epilog, in fixed memory."""

    def __init__(self, identity: Identity, start_s: float) -> None:
        self.identity = identity
        self.closed = Closed.OPEN
        self.gpu_model: str | None = None
        self.one_process = False
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
        neighbours: Collection[int],
        elapsed_s: float,
    ) -> None:
        """Take a reading of the card, or of all cards of a gang, that stands for the last `elapsed_s` seconds.

        It counts while the job is on the card; while one side of the card is paused, which is neither alone nor
        shared, only what the job holds of its memory does.
        """
        shares = [Share(sample, owns, neighbours) for sample in samples]
        totals = [sample.mem_total_mib for sample in samples if sample.mem_total_mib]
        self._mem_total_mib = min(totals, default=self._mem_total_mib)
        if any(share.undecided for share in shares) or not any(share.present for share in shares):
            return
        if is_paused(shares):
            self._peak([share.own_mem_mib for share in shares])
            return
        is_shared = any(share.shared for share in shares)
        changed = self._was_shared is not None and self._was_shared is not is_shared
        self._was_shared = is_shared
        self._since_change_s = 0.0 if changed else self._since_change_s + elapsed_s
        settled = self._since_change_s >= _SETTLE_S
        pairs = zip(samples, shares, strict=True)
        values = joined([activity(sample, share, settled=settled) for sample, share in pairs if share.present])
        self.latest = values
        self._peak([values.get("gpu_mem_mib")])
        if settled:
            (self._shared if is_shared else self._alone).add(values)
        if self.closed is Closed.OPEN:
            self._profile.add(values)
            self._profile.add(joined([sample.other for sample in samples]))
        self._count_time(elapsed_s, is_shared, neighbours)

    def _peak(self, mem_mib: Iterable[float | None]) -> None:
        known = [part for part in (*mem_mib, self._peak_mem_mib) if part is not None]
        self._peak_mem_mib = max(known, default=None)

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
        self._told_mem_mib = self._peak_mem_mib or 0.0
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
            gpus=len(self.identity.gpus),
        )

    def _features(self) -> Features:
        util, access = self._profile.get("gpu_util_pct"), self._profile.get("mem_access_pct")
        mem = self._profile.get("gpu_mem_pct")
        return Features(
            mgup=_max(util),
            mgmap=_max(mem),
            mgtsamp=_max(access),
            gpu_util_mean_pct=_mean(util),
            mem_access_mean_pct=_mean(access),
            # It decides whether two jobs fit at all, so its peak is taken over the whole run, not the profile.
            mem_used_mib=self._peak_mem_mib,
            mem_total_mib=self._mem_total_mib,
        )


def _max(stat: Stat | None) -> float | None:
    return stat.max if stat else None


def _mean(stat: Stat | None) -> float | None:
    return stat.mean if stat else None
