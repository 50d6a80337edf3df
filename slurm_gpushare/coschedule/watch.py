"""Is sharing what it was promised to be? Pairs are compared with their prediction while they last.

A job's own share of the GPU's time, while shared over while alone, is how fast it runs: the same work needs the
same time on the GPU. What is seen replaces what was predicted in the resident's budget, breaks up pairs that
break their promise, and is learned from as soon as it has full weight, or when the pair ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from slurm_gpushare.config import Config
from slurm_gpushare.coschedule import explain, log
from slurm_gpushare.coschedule.ledger import Ledger, Pair, PairKey, Turn, is_heir
from slurm_gpushare.coschedule.observe import whose
from slurm_gpushare.slurm.errors import SlurmError
from slurm_gpushare.slurm.interface import Slurm
from slurm_gpushare.slurm.queue import Job
from slurm_gpushare.store import Store
from slurm_gpushare.store.decisions import Decision
from slurm_gpushare.store.sharing import Observation
from slurm_gpushare.store.workloads import Profile
from slurm_gpushare.telemetry.record import Period, Record, gpu_model

ACTIVITY = "proc_sm_pct"
MIN_ACTIVITY_PCT = 3.0
"""Below it the ratio of two samples says nothing."""
MIN_SAMPLES = 20
FULL_WEIGHT_S = 120.0
"""A pair that was watched so long is learned from at once: its own end may be days away."""
PAST_PROMISE = 1.5
"""How far past its promise a job must be slowed before anything is done about it."""
NEAR_FULL = 0.9
"""Both jobs' memory over the card's: from here on a failure is taken for out-of-memory."""
TELL_CHANGE = 0.02
_FAILED = frozenset({"FAILED", "OUT_OF_MEMORY"})


@dataclass(frozen=True, slots=True)
class Tally:
    """Samples of a job's activity while shared, up to some moment."""

    n: int = 0
    total: float = 0.0

    @classmethod
    def of(cls, period: Period) -> Tally:
        stat = period.stats.get(ACTIVITY)
        return cls(stat.n, stat.n * stat.mean) if stat else cls()


def seen_rate(record: Record, before: Tally, profile: Profile | None) -> float | None:
    """How fast the job runs beside its present neighbour; None while too little was seen.

    `before` are the samples of earlier neighbours, which the record sums up with the present one's.
    """
    alone = record.alone.stats.get(ACTIVITY)
    if alone is not None and alone.n >= MIN_SAMPLES:
        alone_pct = alone.mean
    elif profile is not None and f"{ACTIVITY}_mean" in profile.features:
        alone_pct = profile.features[f"{ACTIVITY}_mean"]
    else:
        return None
    now = Tally.of(record.shared)
    n = now.n - before.n
    if n < MIN_SAMPLES or alone_pct < MIN_ACTIVITY_PCT:
        return None
    return min(1.0, max(0.02, (now.total - before.total) / n / alone_pct))


@dataclass(slots=True)
class _Seen:
    """What was measured of a pair so far."""

    before: dict[int, Tally]
    records: dict[int, Record]
    rates: dict[int, float]
    told: dict[int, float]
    """Rates as the store has them."""
    reported: bool = False
    learned: bool = False


class Watch:
    """Follows the pairs that share."""

    def __init__(self, config: Config, store: Store, slurm: Slurm, ledger: Ledger) -> None:
        self._config = config
        self._store = store
        self._slurm = slurm
        self._ledger = ledger
        self._seen: dict[PairKey, _Seen] = {}

    def look(self, turn: Turn, now_s: float) -> list[Decision]:
        """Compare, act, learn; returns what was decided about jobs."""
        decisions: list[Decision] = []
        pairs = list(turn.now.values())
        jobs = {job.raw_id for pair in pairs for job in (pair.resident, pair.guest)}
        records = self._store.live.of_jobs(jobs) if jobs else {}
        profiles = self._store.profiles.of({token for pair in pairs for token in _tokens(pair)}) if pairs else {}
        for pair in pairs:
            seen = self._measure(pair, records, profiles)
            self._ledger.measured(pair.key, seen.rates.get(pair.resident.raw_id), seen.rates.get(pair.guest.raw_id))
            if not seen.reported and (why := self._broken(pair, seen, profiles, now_s)):
                seen.reported = True
                decisions += self._act(pair, why, now_s)
            if not seen.learned and len(seen.rates) == 2 and now_s - pair.since_s >= FULL_WEIGHT_S:
                seen.learned = True
                self._store.observations.add(list(self._observations(pair, seen, now_s)))
        self._tell_store(pairs)
        decisions += self._finish(turn.ended, now_s)
        return decisions

    def measured(self, raw_id: int) -> bool:
        """Whether a running job's rate was measured, not only predicted."""
        return any(raw_id in seen.rates for seen in self._seen.values())

    def _tell_store(self, pairs: Iterable[Pair]) -> None:
        """Keep what status shows up to date: rates that are new or have changed."""
        changed = {
            pair.key: self._seen[pair.key]
            for pair in pairs
            if any(
                abs(rate - self._seen[pair.key].told.get(job, 0.0)) > TELL_CHANGE
                for job, rate in self._seen[pair.key].rates.items()
            )
        }
        if not changed:
            return
        spans = {PairKey(span.resident_job, span.guest_job): span.id for span in self._store.sharing.open()}
        known = {spans[key]: (key, seen) for key, seen in changed.items() if key in spans}
        self._store.sharing.seen(
            {span: seen.rates[key.resident] for span, (key, seen) in known.items() if key.resident in seen.rates},
            {span: seen.rates[key.guest] for span, (key, seen) in known.items() if key.guest in seen.rates},
        )
        for seen in changed.values():
            seen.told = dict(seen.rates)

    def _measure(self, pair: Pair, records: dict[int, Record], profiles: dict[str, Profile]) -> _Seen:
        seen = self._seen.get(pair.key)
        if seen is None:
            sides = (pair.resident.raw_id, pair.guest.raw_id)
            before = {job: Tally.of(records[job].shared) if job in records else Tally() for job in sides}
            seen = self._seen[pair.key] = _Seen(before, {}, {}, {})
        for job in (pair.resident, pair.guest):
            record = records.get(job.raw_id)
            if record is None:
                continue
            seen.records[job.raw_id] = record
            rate = seen_rate(record, seen.before[job.raw_id], profiles.get(whose(job) or ""))
            if rate is not None:
                seen.rates[job.raw_id] = rate
        return seen

    def _broken(self, pair: Pair, seen: _Seen, profiles: dict[str, Profile], now_s: float) -> str:
        """Why the pair breaks its promise, or the empty string."""
        guest_rate = seen.rates.get(pair.guest.raw_id)
        if guest_rate is not None and not is_heir(pair.guest):
            slowed, promised = 100.0 * (1.0 / guest_rate - 1.0), _promise(pair.guest, self._config.guest_cap_pct)
            if slowed > promised * PAST_PROMISE + 5.0:
                return f"job {pair.guest.key} is slowed by {slowed:.0f} %, promised was {promised:.0f} %"
        for job in (pair.resident, pair.guest) if is_heir(pair.guest) else (pair.resident,):
            profile = profiles.get(whose(job) or "")
            expected_s = profile.duration_s if profile and profile.duration_s else job.limit_s
            if job.raw_id not in seen.rates or not expected_s:
                continue
            shared = self._ledger.sharing()[job.raw_id]
            site_pct = self._config.guest_cap_pct if shared.joined else self._config.resident_budget_pct
            slowed, promised = 100.0 * shared.lost_s / expected_s, _promise(job, site_pct)
            if slowed > promised * PAST_PROMISE:
                return f"job {job.key} has lost {slowed:.0f} % of its run, promised was {promised:.0f} %"
        return ""

    def _act(self, pair: Pair, why: str, now_s: float) -> list[Decision]:
        resident_token, guest_token = _tokens(pair)
        self._store.sharing.forbid(resident_token, guest_token)
        log.warning("slowdown", gpu=pair.card, resident=pair.resident.key, guest=pair.guest.key, why=why)
        decisions = [
            explain.noted(pair.resident, "slowed", now_s, pair.guest, why=why),
            explain.noted(pair.guest, "slowed", now_s, pair.resident, why=why),
        ]
        if self._config.on_slowdown == "requeue" and pair.guest.requeue:
            try:
                self._slurm.requeue(pair.guest.key)
            except SlurmError as error:
                log.warning("requeue", job=pair.guest.key, message=error.what)
            else:
                log.info("requeue", job=pair.guest.key, why=why)
                decisions.append(explain.noted(pair.guest, "requeued", now_s, pair.resident, why=why))
        return decisions

    def _finish(self, ended: Iterable[Pair], now_s: float) -> list[Decision]:
        """Learn from pairs that ended, and find out whether memory was the reason."""
        over = [(pair, self._seen.pop(pair.key)) for pair in ended if pair.key in self._seen]
        if not over:
            return []
        new = [item for pair, seen in over if not seen.learned for item in self._observations(pair, seen, now_s)]
        self._store.observations.add(new)
        resident = {pair.key: seen.rates.get(pair.resident.raw_id) for pair, seen in over}
        guest = {pair.key: seen.rates.get(pair.guest.raw_id) for pair, seen in over}
        spans = {
            PairKey(span.resident_job, span.guest_job): span.id
            for pair, _ in over
            for span in self._store.sharing.of_job(pair.guest.raw_id)
        }
        self._store.sharing.seen(
            {spans[key]: rate for key, rate in resident.items() if rate is not None and key in spans},
            {spans[key]: rate for key, rate in guest.items() if rate is not None and key in spans},
        )
        return self._memory(over, now_s)

    def _observations(self, pair: Pair, seen: _Seen, now_s: float) -> Iterable[Observation]:
        model = gpu_model(self._config.gpu_model) or self._config.gpu_model
        weight = min(1.0, max(0.05, (now_s - pair.since_s) / FULL_WEIGHT_S))
        for job, other in ((pair.resident, pair.guest), (pair.guest, pair.resident)):
            rate = seen.rates.get(job.raw_id)
            if rate is not None:
                source = f"activity:{job.raw_id}:{other.raw_id}:{pair.since_s}"
                yield Observation(source, model, whose(job) or "", whose(other) or "", rate, weight, int(now_s))

    def _memory(self, over: Iterable[tuple[Pair, _Seen]], now_s: float) -> list[Decision]:
        """Raise the memory estimate of a job that failed while the two filled the card."""
        full = [(pair, seen) for pair, seen in over if _filled(pair, seen)]
        if not full:
            return []
        keys = sorted({job.key for pair, _ in full for job in (pair.resident, pair.guest)})
        try:
            states = {job.key: job.state for job in self._slurm.jobs(keys)}
        except SlurmError as error:
            log.warning("ended-jobs", message=error.what)
            return []
        decisions = []
        for pair, seen in full:
            for job, other in ((pair.resident, pair.guest), (pair.guest, pair.resident)):
                if states.get(job.key) in _FAILED:
                    need = _needed_mib(seen.records[job.raw_id], seen.records[other.raw_id])
                    self._store.workloads.raise_memory(whose(job) or "", need)
                    log.warning("out-of-memory", job=job.key, beside=other.key, mem_mib=need)
                    decisions.append(explain.noted(job, "out-of-memory", now_s, other, mem_mib=need))
        return decisions


def _tokens(pair: Pair) -> tuple[str, str]:
    return whose(pair.resident) or "", whose(pair.guest) or ""


def _promise(job: Job, site_pct: float) -> float:
    own = job.tag.max_isd_pct if job.tag else None
    return site_pct if own is None else min(site_pct, float(own))


def _filled(pair: Pair, seen: _Seen) -> bool:
    records = [seen.records.get(job.raw_id) for job in (pair.resident, pair.guest)]
    used = [record.features.mem_used_mib for record in records if record]
    total = max((record.features.mem_total_mib or 0.0 for record in records if record), default=0.0)
    return len(used) == 2 and total > 0 and sum(value or 0.0 for value in used) >= NEAR_FULL * total


def _needed_mib(record: Record, other: Record) -> int:
    """At least what it had, and more than what its neighbour left of the card."""
    total = record.features.mem_total_mib or other.features.mem_total_mib or 0.0
    left = total - (other.features.mem_used_mib or 0.0)
    return int(max(record.features.mem_used_mib or 0.0, left)) + 1
