"""Which rule keeps a job from sharing: asked for those that the plan left without a place.

The plan only says who is placed. Here its rules are applied one after the other to the lanes that the job could join,
and the one that leaves none is the reason.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from slurm_gpushare.helper.explain import Code, Reason
from slurm_gpushare.helper.lanes import Asked, PlanInput, Ranked, SiteHalves
from slurm_gpushare.helper.places import Sites, first_wanting, open_lanes
from slurm_gpushare.helper.plan import by_rates, owners_of_next
from slurm_gpushare.helper.rules import LONG_GUEST_RULES, RULES, Offers
from slurm_gpushare.helper.snapshot import LeftToSlurm, PendingJob, Plan, Snapshot
from slurm_gpushare.knowledge.rates import Bools, Knowledge, KnowledgeByModel
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
    queue = list(enumerate(view.snapshot.pending))
    wanted, next_owner = first_wanting(view.sites, queue, width), owners_of_next(view, queue, {})
    found: dict[str, Reason] = {}
    for lanes in by_rates(view.snapshot, open_lanes(view.snapshot.gpus, width)):
        model = view.snapshot.gpus[lanes[0].gpu].model
        here = [(rank, on) for rank, job in asked if job.key not in found and (on := job.on(model)) is not None]
        if here:
            halves = SiteHalves(view, Asked(width, here, lanes, wanted, next_owner, waits_s))
            rows, columns = halves.open()
            offers = Offers(scene := halves.scene(rows, columns), rows, columns, scene.waits_s(rows))
            free = np.array([lane.resident.key not in taken for lane in lanes], bool)
            found |= {job.key: reason for (_, job), reason in zip(here, _reasons(offers, free), strict=True)}
    return {job.key: found.get(job.key, Reason(Code.NO_PARTNER)) for _, job in asked}


def _reasons(offers: Offers, free: Bools) -> list[Reason]:
    """Of each row, the first rule that says no for its best lane, or that the lanes to which none does are not `free`.

    The best lane is the one against which fewest rules speak, and of several the one that passes the most in a row.
    """
    rules = RULES if offers.scene.settings.policy == "gpushare" else LONG_GUEST_RULES
    shape = (len(offers.rows), len(offers.columns))
    no = np.array([~np.broadcast_to(rule.mask(offers), shape) for rule in rules])
    against, first = no.sum(axis=0), np.where(no.any(axis=0), no.argmax(axis=0), len(rules))
    if not shape[1]:
        return [Reason(Code.NO_PARTNER)] * shape[0]
    found = []
    for row, lane in enumerate(np.argmax(first - (len(rules) + 1) * against, axis=1).tolist()):
        if against[row, lane]:
            rule = rules[int(first[row, lane])]
            have = np.broadcast_to(rule.have(offers), shape)[row, lane] if rule.have else None
            need = float(rule.need(offers)[row]) if rule.need else None
            found.append(Reason(rule.code, need, None if have is None else float(have)))
        else:
            found.append(Reason(Code.NO_GAIN if (free & ~no[:, row].any(axis=0)).any() else Code.OTHERS_FIRST))
    return found


# The reasons of the jobs that wait, kept between ticks: worked out for new ones at once, for all now and then.


REFRESH_S = 15.0
SLOWLY = 0.1
"""How much a single start changes what is thought of forecasts."""
STEADY = 0.3
"""How far a job's forecast follows what the plan expects now, at each look at all jobs."""
LEAST_FORECAST_S = 10.0


class Forecasts:
    """When jobs that wait will start: what the plan expects, as far as it was right lately, and without jumps.

    The plan knows when a job would have a whole card. Many have half of one sooner, which is seen as they start.
    """

    def __init__(self) -> None:
        self.ratio = 1.0
        """How long jobs wait, over what the plan had expected of a whole card when they came."""
        self._expected: dict[str, tuple[float, float]] = {}
        """By key: when it was expected first, and how long."""
        self._start_s: dict[str, float] = {}

    def look(self, snapshot: Snapshot, plan: Plan) -> None:
        """Learn from jobs that have begun since, and forget all that wait no more."""
        begun = {placement.key for placement in plan.placements}
        begun |= {occupant.key for gpu in snapshot.gpus for occupant in gpu.occupants}
        for key in self._expected.keys() & begun:
            at_s, wait_s = self._expected[key]
            came = (snapshot.now_s - at_s) / max(wait_s, LEAST_FORECAST_S)
            self.ratio += SLOWLY * (min(max(came, 0.0), 3.0) - self.ratio)
        waiting = {left.key for left in plan.left}
        self._expected = {key: told for key, told in self._expected.items() if key in waiting}
        self._start_s = {key: start_s for key, start_s in self._start_s.items() if key in waiting}

    def wait_s(self, key: str, expected_s: float | None, now_s: float) -> float | None:
        """How long the job will wait; `expected_s` is the plan's wait for a whole card."""
        if expected_s is None or not np.isfinite(expected_s):
            return expected_s
        self._expected.setdefault(key, (now_s, expected_s))
        start_s = now_s + self.ratio * expected_s
        before_s = self._start_s.get(key, start_s)
        self._start_s[key] = before_s + STEADY * (start_s - before_s)
        return max(self._start_s[key] - now_s, 0.0)


class WaitReasons:
    """Why jobs wait, by key. The plan itself does not need it, so it is not asked for at every tick."""

    def __init__(self) -> None:
        self._reasons: dict[str, Reason] = {}
        self._all_at_s = float("-inf")
        self.forecasts = Forecasts()

    def update(
        self, snapshot: Snapshot, knowledge: Knowledge | KnowledgeByModel, settings: PolicySettings, plan: Plan
    ) -> Mapping[str, Reason]:
        """The reasons of the jobs that `plan` leaves to Slurm."""
        now_s = snapshot.now_s
        self.forecasts.look(snapshot, plan)
        old = now_s - self._all_at_s >= REFRESH_S or now_s < self._all_at_s
        asked = [left for left in plan.left if old or left.key not in self._reasons]
        taken = {placement.partner_key for placement in plan.placements if placement.partner_key}
        found = why_left(snapshot, knowledge, settings, asked, taken) if asked else {}
        if old:
            self._all_at_s = now_s
        forecast = {
            key: replace(reason, wait_s=self.forecasts.wait_s(key, reason.wait_s, now_s))
            for key, reason in found.items()
        }
        known = self._reasons | forecast
        self._reasons = {left.key: known[left.key] for left in plan.left if left.key in known}
        return self._reasons
