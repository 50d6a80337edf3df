"""Which rule keeps a job from sharing: asked for those that the plan left without a place.

The plan only says who is placed. Here its rules are applied one after the other to the lanes that the job could join,
and the one that leaves none is the reason.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from slurm_gpushare.helper.lanes import Asked, PlanInput, Ranked, SiteHalves
from slurm_gpushare.helper.places import Sites, first_wanting, open_lanes
from slurm_gpushare.helper.plan import by_rates
from slurm_gpushare.helper.reasons import Code, Reason
from slurm_gpushare.helper.rules import LONG_GUEST_RULES, RULES, Bools, Offers
from slurm_gpushare.helper.snapshot import LeftToSlurm, PendingJob, Plan, Snapshot
from slurm_gpushare.knowledge.rates import Knowledge, KnowledgeByModel
from slurm_gpushare.protocol.policy import PolicySettings
from slurm_gpushare.protocol.record import Mps
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
    queue = [(rank, job) for rank, job in enumerate(snapshot.pending) if job.key in waits_s]
    if settings.policy in PLACES_NOBODY:
        return {job.key: Reason(Code(settings.policy), wait_s=waits_s[job.key]) for _, job in queue}
    shapes: dict[object, list[Ranked]] = {}
    by_user = settings.mps == "user" or any(gpu.mps is Mps.ONE_USER for gpu in snapshot.gpus)
    across = "user" if by_user else settings.share_across
    for rank, job in queue:
        shapes.setdefault(_shape(job, across), []).append((rank, job))
    few = list(shapes.values())[:SHAPES]
    # All jobs of one shape get one answer: that of the first of them.
    view = PlanInput(snapshot, knowledge, settings, Sites(snapshot))
    asked = [group[0] for group in few if group[0][1].shares]
    known_s = {rank: np.inf if (wait_s := waits_s[job.key]) is None else wait_s for rank, job in asked}
    answers: dict[str, Reason] = {}
    for width in {job.workload.width for _, job in asked}:
        answers |= _explained(view, [(rank, job) for rank, job in asked if job.workload.width == width], known_s, taken)
    found: dict[str, Reason] = {}
    for group in few:
        reason = answers.get(group[0][1].key, Reason(Code.OWN_CAP, need=0.0, have=None))
        found |= {job.key: replace(reason, wait_s=waits_s[job.key]) for _, job in group}
    return found


def _shape(job: PendingJob, across: str) -> object:
    """Equal for jobs that get one answer; `across`: as ShareAcross."""
    owner = "" if across == "any" else getattr(job.workload, across)
    workload = replace(job.workload, user=owner, account=job.workload.account if across == "user" else "")
    alike = replace(job, key="", eligible_s=0.0, workload=workload, measured=None)
    return alike, tuple((job.measured or {}).items())


def _explained(
    view: PlanInput, asked: Sequence[Ranked], waits_s: Mapping[int, float], taken: Collection[str]
) -> dict[str, Reason]:
    """The reasons of jobs of one width, by key; of several GPU models on the first that has anybody to join."""
    width = asked[0][1].workload.width
    wanted = first_wanting(view.sites, enumerate(view.snapshot.pending), width)
    found: dict[str, Reason] = {}
    for lanes in by_rates(view.snapshot, open_lanes(view.snapshot.gpus, width)):
        model = view.snapshot.gpus[lanes[0].gpu].model
        here = [(rank, on) for rank, job in asked if job.key not in found and (on := job.on(model)) is not None]
        if here:
            halves = SiteHalves(view, Asked(width, here, lanes, wanted, waits_s))
            rows, columns = halves.open()
            offers = Offers(scene := halves.scene(rows, columns), rows, columns, scene.waits_s(rows))
            free = np.array([lane.resident.key not in taken for lane in lanes], bool)
            found |= {job.key: reason for (_, job), reason in zip(here, _reasons(offers, free), strict=True)}
    return {job.key: found.get(job.key, Reason(Code.NO_PARTNER)) for _, job in asked}


def _reasons(offers: Offers, free: Bools) -> list[Reason]:
    """Of each row, the first rule that leaves no lane, or that those left are not `free`."""
    ok = np.ones((len(offers.rows), len(offers.columns)), bool)
    found: dict[int, Reason] = {}
    for rule in RULES if offers.scene.settings.policy == "gpushare" else LONG_GUEST_RULES:
        passes = ok & rule.mask(offers)
        stopped = [row for row in np.flatnonzero(~passes.any(axis=1)).tolist() if row not in found]
        need = rule.need(offers) if stopped and rule.need else None
        have = np.broadcast_to(rule.have(offers), ok.shape) if stopped and rule.have else None
        best = np.min if rule.code is Code.OWN_CAP else np.max
        for row in stopped:
            offered = None if have is None else float(best(have[row][ok[row]]))
            found[row] = Reason(rule.code, None if need is None else float(need[row]), offered)
        ok = passes
    others = [Reason(Code.NO_GAIN if (row & free).any() else Code.OTHERS_FIRST) for row in ok]
    return [found.get(row, otherwise) for row, otherwise in enumerate(others)]


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
