"""Which rule keeps a job from sharing: asked for those that the plan left without a place.

The plan only says who is placed. Here its rules are applied one after the other to the cards that the job could
join, and the one that leaves no card is the reason.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np

from slurm_gpushare.helper.durations import longest_guest_s
from slurm_gpushare.helper.guest_arrays import (
    OpenResident,
    has_room_beside,
    open_gangs,
    pair_arrays,
    residents_by_model,
)
from slurm_gpushare.helper.guests import together, within_promise
from slurm_gpushare.helper.reasons import Code, Reason
from slurm_gpushare.helper.snapshot import LeftToSlurm, PendingJob, Plan, Snapshot
from slurm_gpushare.helper.whole_gpus import Bools, Floats, Ints, Sites, first_wanting, mean_duration_s
from slurm_gpushare.knowledge.rates import Knowledge, KnowledgeByModel, known_on
from slurm_gpushare.protocol.policy import PolicySettings
from slurm_gpushare.protocol.settings import PLACES_NOBODY

SHAPES = 256
"""Different kinds of waiting jobs that are explained at once; the queue's head comes first."""


def why_left(
    snapshot: Snapshot,
    knowledge: Knowledge | KnowledgeByModel,
    settings: PolicySettings,
    left: Collection[LeftToSlurm],
    taken: Collection[str] = (),
) -> dict[str, Reason]:
    """The reasons of jobs that the plan left, by key; `taken` are the residents that it gave to others."""
    waits_s = {item.key: item.wait_s for item in left}
    jobs = [job for job in snapshot.pending if job.key in waits_s]
    if settings.policy in PLACES_NOBODY:
        return {job.key: Reason(Code(settings.policy), wait_s=waits_s[job.key]) for job in jobs}
    shapes: dict[object, list[PendingJob]] = {}
    for job in jobs:
        shapes.setdefault(_shape(job, settings), []).append(job)
    few = list(shapes.values())[:SHAPES]
    # All jobs of one shape get one answer: that of the first of them.
    answers: dict[str, Reason] = {}
    for gangs in (False, True):
        asked = [group[0] for group in few if group[0].max_isd_pct != 0 and group[0].gang is gangs]
        asked = [job for job in asked if gangs or job.gpus == 1]
        reasons = _explain(snapshot, knowledge, settings, asked, waits_s, taken, gangs)
        answers.update((job.key, reason) for job, reason in zip(asked, reasons, strict=True))
    found: dict[str, Reason] = {}
    for group in few:
        reason = answers.get(group[0].key, Reason(Code.OWN_CAP, need=0.0, have=None))
        for job in group:
            found[job.key] = Reason(reason.code, reason.need, reason.have, waits_s[job.key])
    return found


def _shape(job: PendingJob, settings: PolicySettings) -> object:
    owner = None if settings.share_across == "any" else getattr(job, settings.share_across)
    where = (job.partitions, job.features, job.nodes_wanted, job.nodes_excluded, job.reservation)
    card = (job.gpus, job.gang, job.gpu_index, job.gpu_model, tuple((job.measured or {}).items()))
    return (job.token, job.expected_s, job.limit_s, job.max_isd_pct, job.cpus, job.node_mem_mib, owner, where, card)


def _explain(
    snapshot: Snapshot,
    knowledge: Knowledge | KnowledgeByModel,
    settings: PolicySettings,
    jobs: Sequence[PendingJob],
    waits_s: Mapping[str, float | None],
    taken: Collection[str],
    gangs: bool,
) -> Iterator[Reason]:
    """Of a job that was measured on several GPU models, the reason on the first that has anybody to join."""
    single = [OpenResident(i, gpu.occupants[0]) for i, gpu in enumerate(snapshot.gpus) if has_room_beside(gpu)]
    open_cards = open_gangs(snapshot.gpus) if gangs else single
    found: dict[str, Reason] = {}
    for model, residents in residents_by_model(snapshot, open_cards).items():
        asked = [here for job in jobs if job.key not in found and (here := job.on(model)) is not None]
        if not asked:
            continue
        bench = _Bench(snapshot, known_on(knowledge, model), settings, asked, residents, waits_s)
        free = np.array([resident.job.key not in taken for resident in residents], bool)
        found.update((job.key, bench.reason(row, free)) for row, job in enumerate(asked))
    yield from (found.get(job.key, Reason(Code.NO_PARTNER)) for job in jobs)


class _Bench:
    """The rules for some jobs (rows) and all open residents (columns)."""

    def __init__(
        self,
        snapshot: Snapshot,
        knowledge: Knowledge,
        settings: PolicySettings,
        jobs: Sequence[PendingJob],
        residents: Sequence[OpenResident],
        waits_s: Mapping[str, float | None],
    ) -> None:
        self.settings, self.jobs, self.residents = settings, jobs, residents
        self.sites, self.all = Sites(snapshot), np.arange(len(residents))
        rank = {job.key: at for at, job in enumerate(snapshot.pending)}
        wanted = first_wanting(self.sites, enumerate(snapshot.pending), gangs=jobs[0].gang)
        guests = [(rank[job.key], job) for job in jobs]
        arrays = pair_arrays(snapshot, knowledge, settings, self.sites, wanted, guests, residents)
        self.waiting, self.lanes, self.gpus = arrays.waiting, arrays.lanes, arrays.gpus
        self.terms, self.compatible = arrays.terms, arrays.compatible
        self.waits_s = [waits_s.get(job.key) for job in jobs]
        self.longest_s = longest_guest_s(mean_duration_s(snapshot, jobs[0].gang), settings)

    def reason(self, row: int, free: Bools) -> Reason:
        """The rule that leaves no card for job `row`."""
        ok = np.ones(len(self.residents), bool)
        for code, passes, need, have in self._rules(row):
            if not (ok & passes).any():
                best = np.min if code is Code.OWN_CAP else np.max
                return Reason(code, need, None if have is None else float(best(have[ok])))
            ok &= passes
        return Reason(Code.OTHERS_FIRST if not (ok & free).any() else Code.NO_GAIN)

    def _rules(self, row: int) -> Iterator[tuple[Code, Bools, float | None, Floats | None]]:
        """In order: code, the cards that pass, what is needed, what each card offers."""
        job, settings, lanes, terms = self.jobs[row], self.settings, self.lanes, self.terms
        rows: Ints = np.array([row])
        yield Code.PLACE, self.sites.room_for([job], self.gpus)[0], None, None
        if settings.share_across != "any":
            own = getattr(job, settings.share_across)
            same = [getattr(resident.job, settings.share_across) == own for resident in self.residents]
            yield Code.OWNERS, np.array(same, bool), None, None
        need_mib = np.inf if job.mem_used_mib is None else float(job.mem_used_mib)
        free_mib = np.maximum(self.compatible.free_mib, 0.0)
        yield Code.MEMORY, self.compatible.free_mib >= need_mib, need_mib, free_mib
        cell = (np.full(len(self.all), self.waiting.kind[row]), lanes.kind)
        yield Code.FORBIDDEN, terms.can_share[cell], None, None
        d = float(self.waiting.expected_s[row])
        if settings.policy == "gpushare":
            long = np.full(len(self.all), self.longest_s)
            yield Code.TOO_LONG, d <= long, d, long
        promised = within_promise(self.waiting.high_s[row], terms, cell, lanes.budget_s, lanes.bears)
        unknown = bool((terms.explored[cell] & ~promised).any())
        yield Code.EXPLORATION if unknown else Code.PROMISE, promised, None, None
        outlives = terms.outlives[cell] * lanes.limit_left_s
        in_time = (self.waiting.limit_s[row] <= outlives) | (self.waiting.rank[row] <= lanes.wanted_rank)
        yield Code.PRIORITY, in_time, float(self.waiting.limit_s[row]), np.maximum(outlives, 0.0)
        yield Code.TIME_LIMIT, self.compatible(rows, self.all)[0], None, None
        if job.max_isd_pct is not None and job.max_isd_pct < settings.guest_cap_pct:
            # After the site's own rules: a higher cap helps only where these leave a card.
            worst_pct = (terms.stay_high[cell] - 1.0) * 100.0
            yield Code.OWN_CAP, worst_pct <= job.max_isd_pct, float(job.max_isd_pct), worst_pct
        stay, delay = together(np.array([d]), lanes.left_s, terms, cell)
        wait_s = self.waits_s[row]
        yield Code.NO_GAIN, (np.inf if wait_s is None else wait_s) + d - stay - delay > 0.0, None, None


# The reasons of the jobs that wait, kept between ticks: worked out for new ones at once, for all now and then.


REFRESH_S = 15.0


class WaitReasons:
    """Why jobs wait, by key. The plan itself does not need it, so it is not asked for at every tick."""

    def __init__(self) -> None:
        self._reasons: dict[str, Reason] = {}
        self._all_at_s = float("-inf")

    def update(
        self, snapshot: Snapshot, knowledge: Knowledge | KnowledgeByModel, settings: PolicySettings, plan: Plan
    ) -> Mapping[str, Reason]:
        """The reasons of the jobs that `plan` leaves to Slurm."""
        old = snapshot.now_s - self._all_at_s >= REFRESH_S or snapshot.now_s < self._all_at_s
        asked = [left for left in plan.left if old or left.key not in self._reasons]
        taken = {placement.partner_key for placement in plan.placements if placement.partner_key}
        found = why_left(snapshot, knowledge, settings, asked, taken) if asked else {}
        if old:
            self._all_at_s = snapshot.now_s
        known = self._reasons | found
        self._reasons = {left.key: known[left.key] for left in plan.left if left.key in known}
        return self._reasons
