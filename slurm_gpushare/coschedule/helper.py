"""One tick of the backfill helper: observe, plan, apply. `daemon` calls it again and again."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from slurm_gpushare.config import Config
from slurm_gpushare.coschedule import explain, log
from slurm_gpushare.coschedule.adopt import adoptions
from slurm_gpushare.coschedule.apply import Applied, Outcome, apply
from slurm_gpushare.coschedule.changes import Change, place, restore, touched
from slurm_gpushare.coschedule.extend import extension
from slurm_gpushare.coschedule.facts import StoreFacts
from slurm_gpushare.coschedule.lately import Lately
from slurm_gpushare.coschedule.ledger import Ledger, Turn, pairs_now
from slurm_gpushare.coschedule.observe import View, observe
from slurm_gpushare.coschedule.occupancy import Card, parse_card
from slurm_gpushare.coschedule.plan import plan
from slurm_gpushare.coschedule.settings import PolicySettings
from slurm_gpushare.coschedule.site import Site
from slurm_gpushare.coschedule.snapshot import How, Placement
from slurm_gpushare.coschedule.takeback import Placements
from slurm_gpushare.coschedule.watch import Watch
from slurm_gpushare.knowledge.rates import Knowledge
from slurm_gpushare.slurm.interface import Slurm
from slurm_gpushare.slurm.queue import Job
from slurm_gpushare.store import Store
from slurm_gpushare.store.decisions import Decision

# Leases that find no place are ended by the helper a few hundred a tick; the rest end by themselves in time.
LEASES_A_TICK = 300


@dataclass(slots=True)
class TickReport:
    """What one tick saw and did."""

    jobs: int = 0
    pending: int = 0
    pairs: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    calls: int = 0
    plan_s: float = 0.0
    total_s: float = 0.0

    def count(self, what: str) -> None:
        self.outcomes[what] = self.outcomes.get(what, 0) + 1


class Helper:
    """The helper's state between ticks. Everything that matters can be rebuilt from Slurm and the store."""

    def __init__(
        self,
        config: Config,
        slurm: Slurm,
        store: Store,
        knowledge: Knowledge,
        *,
        policy: str | None = None,
        dry_run: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.dry_run = dry_run
        self._slurm = slurm
        self._store = store
        self._knowledge = knowledge
        self._clock = clock
        self._policy = policy
        self._facts = StoreFacts(store)
        self._ledger = Ledger()
        self._lately = Lately()
        self._site = Site(slurm)
        self._decisions: list[Decision] = []
        self._told: dict[str, str] = {}
        self.configure(config)
        self._ledger.recall(store.sharing.open(), clock())

    def configure(self, config: Config) -> None:
        """Take over settings: at the start, and on SIGHUP."""
        self.config = config
        settings = PolicySettings.from_config(config)
        self.settings = settings if self._policy is None else settings.with_policy(self._policy)
        self._placements = Placements(bound_s=float(config.lease_s))
        self._watch = Watch(config, self._store, self._slurm, self._ledger)

    def tick(self, jobs: list[Job] | None = None) -> TickReport:
        """Look once and act on it. `jobs` may be given if the queue was just read."""
        begun, now_s, report = time.monotonic(), self._clock(), TickReport()
        calls = self._slurm.calls
        view = self._look(now_s, jobs)
        report.jobs = len(view.jobs)
        report.pending = len(view.snapshot.pending)
        self._follow_pairs(view, report)
        self._adopt(view, report)
        self._take_back(view, report)
        planned = time.monotonic()
        decided = plan(view.snapshot, self._knowledge, self.settings)
        report.plan_s = time.monotonic() - planned
        placed = {placement.job_id for placement in decided.placements if self._place(placement, view, report)}
        self._end_leases(view, placed, {left.job_id: left.why for left in decided.left}, report)
        if not self.dry_run:
            self._store.decisions.add(self._decisions)
        self._decisions.clear()
        report.calls = self._slurm.calls - calls
        report.total_s = time.monotonic() - begun
        return report

    def _look(self, now_s: float, jobs: list[Job] | None) -> View:
        jobs = self._slurm.jobs() if jobs is None else jobs
        nodes = self._slurm.nodes()
        avoid = self._placements.avoid((node.name for node in nodes), now_s)
        facts = self._facts.read(jobs, self._ledger, avoid, now_s)
        reservations = self._site.reservations(nodes, jobs, now_s)
        view = observe(jobs, nodes, reservations, self.config, facts, now_s, self._site.tiers(now_s))
        mean_s = self._lately.mean_s(view.snapshot, self.settings.limit_use)
        return replace(view, snapshot=replace(view.snapshot, mean_duration_s=mean_s))

    def _follow_pairs(self, view: View, report: TickReport) -> None:
        current = pairs_now(view.cards, self._knowledge, view.now_s)
        turn = self._ledger.turn(current, (job for job in view.jobs.values() if job.running), view.now_s)
        report.pairs = len(turn.now)
        for pair in turn.begun:
            log.info("pair", gpu=pair.card, resident=pair.resident.key, guest=pair.guest.key)
        if self.dry_run:
            return
        self._facts.keep(turn, self.config.gpu_model, view.now_s)
        self._decisions += self._watch.look(turn, view.now_s)
        if self.config.extend_time_limit:
            self._extend(turn, view, report)

    def _extend(self, turn: Turn, view: View, report: TickReport) -> None:
        """Give sharers the time back that their neighbours cost them."""
        lost = self._ledger.sharing()
        for job in (job for pair in turn.now.values() for job in (pair.resident, pair.guest)):
            if not self._watch.measured(job.raw_id):
                continue
            change = extension(
                job, lost[job.raw_id].lost_s, self._site.most_s(job.partitions), self._free_until(job, view)
            )
            if change is not None and self._apply(job, change, "extend", report).outcome is Outcome.DONE:
                self._decisions.append(explain.noted(job, "extended", view.now_s, limit=change.fields["TimeLimit"]))

    def _free_until(self, job: Job, view: View) -> float:
        """When the next reservation of one of its nodes begins."""
        nodes = view.snapshot.nodes
        return min((nodes[name].reserved_from_s for name in job.nodes if name in nodes), default=float("inf"))

    def _adopt(self, view: View, report: TickReport) -> None:
        profiles = self._store.profiles

        def cluster_of(token: str, uid: int) -> int | None:
            profile = profiles.get(token)
            return profile.cluster if profile and profile.owner_uid == uid else None

        for job, change in adoptions(
            view.jobs.values(), self.config.partitions, self.config.shards_per_gpu, cluster_of
        ):
            applied = self._apply(job, change, "tag", report)
            if applied.outcome is Outcome.DONE:
                self._decisions.append(explain.noted(job, "tagged", view.now_s))

    def _take_back(self, view: View, report: TickReport) -> None:
        for job, why in self._placements.overdue(view.jobs.values(), view.nodes, view.now_s):
            change = restore(job, self._slurm.release, view.now_s)
            self._placements.failed(job, view.now_s)
            if change is not None and self._apply(job, change, "take-back", report, why=why).outcome is Outcome.DONE:
                card = parse_card(job.tag.placed if job.tag else None)
                self._decisions.append(explain.taken_back(job, card, why, view.now_s))

    def _place(self, placement: Placement, view: View, report: TickReport) -> bool:
        job = view.jobs[placement.job_id]
        node = view.nodes[placement.node]
        total = node.shards_per_gpu[placement.index]
        shards = total if placement.how is How.UNSHARED else max(1, total // 2)
        card = Card(placement.node, placement.index)
        guest = placement.how in (How.BESIDE, How.TOGETHER)
        heir = placement.how is How.SUCCEEDS
        change = place(job, card, node.gpus[placement.index], shards, self._slurm.release, view.now_s, guest, heir)
        if change is None:
            report.count("unchangeable")
            return False
        applied = self._apply(
            job, change, "place", report, gpu=card, how=placement.how, beside=placement.partner_job_id,
            isd_pct=placement.reasons.guest_isd_pct, resident_isd_pct=placement.reasons.resident_isd_pct,
        )  # fmt: skip
        if applied.outcome is Outcome.DONE:
            self._placements.sent(job, view.now_s)
            partner = view.jobs.get(placement.partner_job_id or "")
            self._decisions.append(explain.placed(job, placement, partner, self.settings.policy, view.now_s))
        return applied.outcome in (Outcome.DONE, Outcome.DRY)

    def _end_leases(self, view: View, placed: set[str], why: dict[str, str], report: TickReport) -> None:
        """Jobs without a place become visible to Slurm now, as they were asked for."""
        ended = 0
        for job in view.jobs.values():
            if job.key in placed or not touched(job) or (job.tag and job.tag.placed):
                continue
            reason = why.get(job.key, "")
            self._note_wait(job, reason, view)
            running_lease = job.eligible_s is None or job.eligible_s > view.now_s
            if not running_lease or ended >= LEASES_A_TICK or job.held or job.dependency:
                continue
            change = restore(job, self._slurm.release, view.now_s)
            if change is not None:
                self._apply(job, change, "wait", report, why=reason)
                ended += 1
        for key, reason in why.items():
            self._note_wait(view.jobs[key], reason, view)
        self._told = {key: reason for key, reason in self._told.items() if key in view.jobs}

    def _note_wait(self, job: Job, reason: str, view: View) -> None:
        """Record why a job waits, once for each reason."""
        if reason and self._told.get(job.key) != reason:
            self._told[job.key] = reason
            self._decisions.append(explain.waits(job, reason, view.now_s))

    def _apply(self, job: Job, change: Change, event: str, report: TickReport, **fields: object) -> Applied:
        applied = apply(self._slurm, change, self.dry_run)
        report.count(f"{event}:{applied.outcome}")
        tell = log.warning if applied.outcome is Outcome.REFUSED else log.info
        tell(event, job=job.key, outcome=applied.outcome, **fields, message=applied.message or None)
        return applied
