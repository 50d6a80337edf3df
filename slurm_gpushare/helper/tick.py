"""One tick of the backfill helper: observe, plan, apply. `daemon` calls it again and again."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from slurm_gpushare.helper import explain, log
from slurm_gpushare.helper.changes import (
    Change,
    Outcome,
    ends_soon,
    extension,
    most_lost_s,
    place,
    restore,
    stopped_s,
    touched,
)
from slurm_gpushare.helper.explain import Reason
from slurm_gpushare.helper.loop import Work, at_once, retry_s
from slurm_gpushare.helper.observe import View, observe
from slurm_gpushare.helper.occupancy import GpuAddress, parse_card
from slurm_gpushare.helper.pairs import PairChanges, follow, pairs_now, past_spans
from slurm_gpushare.helper.plan import plan
from slurm_gpushare.helper.preemption import Eviction, PreemptionRules
from slurm_gpushare.helper.profile_check import spare_memory_pct
from slurm_gpushare.helper.promises import dying, let_go_in_slurm, tell_nodes
from slurm_gpushare.helper.queue_facts import SharingCost
from slurm_gpushare.helper.shadow_policy import as_if_shareable, with_open_cards
from slurm_gpushare.helper.snapshot import How, Placement, Plan
from slurm_gpushare.helper.state import Requeue, State
from slurm_gpushare.knowledge.rates import Knowledge, KnowledgeByModel
from slurm_gpushare.protocol.policy import PolicySettings
from slurm_gpushare.protocol.settings import PLACES_NOBODY, Config
from slurm_gpushare.protocol.stop_orders import ACTS_WITHIN_S, StopOrder
from slurm_gpushare.slurm.commands import Slurm
from slurm_gpushare.slurm.nodes import Node
from slurm_gpushare.slurm.queue import Job
from slurm_gpushare.slurm.runner import ControllerDown, JobMovedOn, SlurmMissing
from slurm_gpushare.store import Store, StoreError

NOBODY_ANSWERS = (ControllerDown, SlurmMissing, StoreError)
"""Slurm or the store is away: the rest of a look would only wait for it again."""
REQUEUE_TRIES = 20
"""What Slurm has refused for nine minutes it will refuse for ever; both owners have been told of the slow-down."""


@dataclass(slots=True)
class TickReport:
    """What one tick saw and did."""

    jobs: int = 0
    pending: int = 0
    pairs: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    calls: int = 0
    plan_s: float = 0.0
    total_s: float = 0.0
    view: View | None = None
    reasons: Mapping[str, Reason] = field(default_factory=dict)
    """Why jobs wait, by key."""


class Helper:
    """One look after the other, by the settings in force and on the one `State`."""

    def __init__(
        self,
        config: Config,
        slurm: Slurm,
        store: Store,
        knowledge: Knowledge | KnowledgeByModel,
        *,
        policy: str | None = None,
        partners: tuple[int, ...] | None = None,
        dry_run: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.dry_run = dry_run
        self._slurm = slurm
        self._store = store
        self.knowledge = knowledge
        self._clock = clock
        self._policy = policy
        self.partners = partners
        """For each cluster the one beside it under the policy `paper`; `configure` puts it in force."""
        self.state = State(slurm, store, dry_run=dry_run, stopwatch=time.monotonic if clock is time.time else None)
        self._changer = self.state.changer
        self.recent, self.faults = self.state.recent, self.state.faults
        self.orders: Mapping[str, StopOrder] = {}
        """What each node is to be told now of who must stand still."""
        self.configure(config)

    def configure(self, config: Config) -> None:
        """Take over settings: at the start, and on SIGHUP. Nothing that is remembered changes with them."""
        self.config = config
        settings = PolicySettings.from_config(config)
        settings = settings if self._policy is None else replace(settings, policy=self._policy)
        self.settings = settings if self.partners is None else replace(settings, partners=self.partners)

    def let_all_go(self) -> None:
        """Tell the nodes that nobody is to stand still: the helper stops."""
        tell_nodes(self.config, self._store, self.state.watch.pauses.let_all_go(self._clock()))

    def shares(self, node: Node) -> bool:
        """Whether jobs may share on the node."""
        return bool(node.gpus) and bool(set(node.partitions) & set(self.config.partitions))

    def tick(self, jobs: list[Job] | None = None, asked_s: float | None = None) -> TickReport:
        """`look` from end to end, with nothing beside it, and the nodes are told."""
        report = at_once(self.look(jobs, asked_s))
        tell_nodes(self.config, self._store, self.orders)
        return report

    async def look(self, jobs: list[Job] | None = None, asked_s: float | None = None) -> TickReport:
        """Look once and act on it. `jobs` may be given if the queue was just read, at `asked_s` (monotonic clock).

        A fault in placing keeps no promise from being kept, nor one in a comment jobs from being placed.
        """
        begun, now_s, report = time.monotonic(), self._clock(), TickReport()
        self._changer.asked_s = begun if asked_s is None else asked_s
        calls = self._slurm.calls
        view = report.view = await self._observe(now_s, jobs)
        report.jobs = len(view.jobs)
        report.pending = len(view.snapshot.pending)
        contained, placed = self.faults.contained, set[str]()
        with contained("promises", *NOBODY_ANSWERS):
            await self._follow_pairs(view, report)
        with contained("preemption", *NOBODY_ANSWERS):
            await self._preempt(view, self.recent.rules, report)
        with contained("comments", *NOBODY_ANSWERS):
            await self._follow_comments(view, report)
        with contained("take-back", *NOBODY_ANSWERS):
            await self._take_back(view, report)
        with contained("place", *NOBODY_ANSWERS):
            planned = time.monotonic()
            decided = await Work(plan, view.snapshot, self.knowledge, self.settings.for_plan)
            report.plan_s = time.monotonic() - planned
            placed = await self._place_all(decided, view, report)
            self.state.somebody_waits = not self.places_nobody and any(
                job.workload.token is not None and job.key not in placed for job in view.snapshot.pending
            )
            report.reasons = self.state.reasons.update(view.snapshot, self.knowledge, self.settings, decided)
        with contained("wait", *NOBODY_ANSWERS):
            await self._end_leases(view, placed, report)
        await self._keep_decisions()
        log.flush()
        report.calls = self._slurm.calls - calls
        report.total_s = time.monotonic() - begun
        return report

    @property
    def places_nobody(self) -> bool:
        """Whether no job is given a card under the policy in force."""
        return self.settings.policy in PLACES_NOBODY

    async def _place_all(self, decided: Plan, view: View, report: TickReport) -> set[str]:
        """Send jobs where the plan wants them, or only record it; the keys of those that go."""
        if self.settings.policy == "shadow":
            new = self.state.shadow.first_time(decided.placements, view)
            self.state.decisions += new
            if new:
                report.outcomes["shadow"] = len(new)
            return set()
        await self._changer.read_again(item.key for item in decided.placements)
        done = (Outcome.DONE, Outcome.DRY)
        return {item.key for item in decided.placements if await self.place(item, view, report.outcomes) in done}

    async def _observe(self, now_s: float, jobs: list[Job] | None) -> View:
        jobs = await Work(self._slurm.jobs) if jobs is None else jobs
        in_shadow = self.settings.policy == "shadow"
        jobs = [as_if_shareable(job, self.config.shards_per_gpu) for job in jobs] if in_shadow else jobs
        nodes = await Work(self._slurm.nodes)
        self.state.lost_shards.look((node for node in nodes if self.shares(node)), self.config.shards_per_gpu)
        if not self.dry_run:
            self.state.known = await Work(follow, self._store, jobs, self.state.known, now_s)
        if not self.state.recalled:
            known = self.state.known or {}
            spans = await Work(past_spans, self._store, self._slurm, jobs, now_s, self.dry_run, known)
            self.state.pairs.recall(spans, now_s, {job.raw_id: job.paused_s(now_s) for job in jobs if job.running})
            self.state.recalled = True
        avoid = self.state.placements.avoid([node.name for node in nodes], now_s)
        facts = self.state.store_facts.read(jobs, self.state.pairs.sharing(), avoid, now_s, self.config.gpu_models)
        await self.state.site.refresh(nodes, jobs, now_s)
        facts = self.state.site.added_to(facts)
        preemption = replace(facts.preemption, hopeless=self.state.preemptors.hopeless)
        facts = replace(facts, preemption=preemption)
        told, self.state.store_facts.to_tell = self.state.store_facts.to_tell, []
        by_id = {job.raw_id: job for job in jobs}
        self.state.decisions += [explain.noted(by_id[job], kind, now_s) for job, kind in told if job in by_id]
        view = await Work(observe, jobs, nodes, self.config, facts, now_s)
        mean_s = self.state.durations.mean_s(view.snapshot)
        snapshot = with_open_cards(view.snapshot) if in_shadow else view.snapshot
        view = replace(view, snapshot=replace(snapshot, mean_duration_s=mean_s))
        self.recent.take(view, facts, self._changer.asked_s)
        self.state.handovers.settle(view.jobs, view.cards, self._changer.asked_s)
        return view

    async def _follow_comments(self, view: View, report: TickReport) -> None:
        if not self.places_nobody:
            await self.state.comments.restore_tags(view, self.state.known or {}, report.outcomes)
            await self.state.comments.follow(view, self.config, report.outcomes)
            await self.state.comments.convert(view, self.config, report.outcomes)
        await self.state.comments.let_go(view, report.outcomes)

    async def _follow_pairs(self, view: View, report: TickReport) -> None:
        current = pairs_now(view.cards, self.knowledge, view.now_s, self.state.pairs.pairs, view.gpu_models)
        changes = self.state.pairs.follow(current, (job for job in view.jobs.values() if job.running), view.now_s)
        report.pairs = len(changes.now)
        for pair in changes.begun:
            log.noted("pair", gpu=pair.card, resident=pair.resident.key, guest=pair.guest.key)
        if self.dry_run:
            return
        state, jobs, records = self.state, view.jobs.values(), self.state.store_facts.records
        headroom_pct = spare_memory_pct(self.config)
        with self.faults.contained("spans", *NOBODY_ANSWERS):
            await state.spans.keep(changes, view.now_s)
        with self.faults.contained("profiles", *NOBODY_ANSWERS):
            state.decisions += state.profile_watch.look(jobs, records, changes.now, view.now_s, headroom_pct)
            state.decisions += state.profile_watch.ended(view.now_s, headroom_pct)
        await self._keep_promises(changes, view, report)
        if self.config.extend_time_limit:
            await self._extend(view, report)

    async def _keep_promises(self, changes: PairChanges, view: View, report: TickReport) -> None:
        """Watch the pairs, and see to it that who must stand still does, and who need not any more goes on."""
        state, pauses, now_s = self.state, self.state.watch.pauses, view.now_s
        running = {job.raw_id: job for job in view.jobs.values() if job.running}
        pauses.take(state.store_facts.records, running)
        if not pauses.started:
            marked = [job for job in running.values() if job.paused]
            await Work(let_go_in_slurm, self._slurm, marked)
            pauses.start({node for job in marked for node in job.nodes})
        todo = await state.watch.look(changes, view, self.config)
        state.decisions += todo.decisions
        await self._changer.read_again(mark.job.key for mark in todo.marks)
        for mark in todo.marks:
            applied = await self._changer.apply(mark.job, mark.change, mark.event, report.outcomes, why=mark.why)
            if applied.outcome is Outcome.DONE:
                state.decisions.append(mark.decision)
                if mark.event == "pause":
                    pauses.begin(mark.job, now_s)
        conf, lead_s = state.site.slurm_conf, self.config.tick_s + ACTS_WITHIN_S
        killed = dying(view.jobs.values(), conf, lead_s, now_s) if self.config.mps != "off" else []
        self.orders = pauses.orders(now_s, killed)
        await self._requeue(todo.requeues, running, now_s)

    async def _requeue(self, new: Iterable[tuple[Job, Job, str]], running: Mapping[int, Job], now_s: float) -> None:
        """Put jobs back into the queue; what Slurm refuses is tried again ever later, and not without end."""
        waiting = self.state.requeues
        waiting.update((job.raw_id, Requeue(job, other, why)) for job, other, why in new)
        for raw_id in waiting.keys() - running.keys():
            del waiting[raw_id]
        for raw_id, item in [(raw_id, item) for raw_id, item in waiting.items() if item.due_s <= now_s]:
            item.tries += 1
            item.due_s = now_s + retry_s(item.tries)
            with self.faults.contained("requeue", *NOBODY_ANSWERS):
                if item.tries == REQUEUE_TRIES:
                    del waiting[raw_id]  # after the last one
                await Work(self._slurm.requeue, item.job.key)
                waiting.pop(raw_id, None)
                log.info("requeue", job=item.job.key, why=item.why)
                self.state.decisions.append(explain.noted(item.job, "requeued", now_s, item.beside, why=item.why))

    async def _preempt(self, view: View, rules: PreemptionRules, report: TickReport) -> None:
        """Free cards for jobs that may preempt their sharers, where Slurm by itself does not: all in one call."""
        slurm, todo = self._slurm, dict[str, list[Eviction]]()
        for found in self.state.preemptors.look(rules, view.jobs, view.cards, view.snapshot, view.now_s):
            job, mode = found.victim.job, found.victim.terms.mode
            done = "warned" if found.warn else "requeued" if mode == "REQUEUE" and job.requeue else "cancelled"
            todo.setdefault(done, []).append(found)
            log.info(
                "preempt", job=job.key, to=found.preemptor.key, mode=mode, outcome="dry-run" if self.dry_run else done
            )
            report.outcomes[f"preempt:{done}"] += 1
        acts: dict[str, Callable[..., None]] = {
            "warned": partial(slurm.signal, "TERM"), "requeued": slurm.requeue, "cancelled": slurm.cancel,
        }  # fmt: skip
        for done, evictions in todo.items() if not self.dry_run else ():
            with suppress(JobMovedOn):  # one of them has ended by itself
                await Work(acts[done], *(found.victim.job.key for found in evictions))
            for (job, terms), preemptor, warn in evictions:
                why = f"{done} by the site's own rules (PreemptMode={terms.mode}), for job {preemptor.key}"
                if not warn:
                    self.state.decisions.append(explain.noted(job, "preempted", view.now_s, why=why))

    async def _extend(self, view: View, report: TickReport) -> None:
        """Give jobs the time back that neighbours, also those that have left, and pauses by a signal cost them."""
        costs = self.state.pairs.sharing()
        shared = [job for job in view.jobs.values() if job.running and job.raw_id in costs] if costs else []
        found = ((job, self._extension(job, costs[job.raw_id], view)) for job in shared)
        changes = [(job, change) for job, change in found if change is not None]
        await self._changer.read_again(job.key for job, _ in changes)
        for job, change in changes:
            if (await self._changer.apply(job, change, "extend", report.outcomes)).outcome is Outcome.DONE:
                self.state.decisions.append(
                    explain.noted(job, "extended", view.now_s, limit=change.fields["TimeLimit"])
                )

    def _extension(self, job: Job, cost: SharingCost, view: View) -> Change | None:
        """What gives the job back that it has lost; None if that is nothing, or cannot be given."""
        lost_s = stopped_s(job, view.now_s)
        if self.state.watch.measured(job.raw_id) or ends_soon(job, view.now_s):
            site_pct = self.config.promises.of(guest=cost.joined, own_pct=None)  # asking for less costs no time
            lost_s += min(cost.lost_s, most_lost_s(job, site_pct))
        return extension(job, lost_s, self.state.site.most_s(job.partitions), view.free_until_s(job))

    async def _take_back(self, view: View, report: TickReport) -> None:
        bound_s = float(self.config.lease_s)
        for job, why in self.state.placements.overdue(view.jobs.values(), view.nodes, view.now_s, bound_s):
            change = restore(job, self._slurm.release, view.now_s)
            self.state.placements.failed(job, view.nodes, view.now_s)
            if change is None:
                continue
            if (await self._changer.apply(job, change, "take-back", report.outcomes, why=why)).outcome is Outcome.DONE:
                card = parse_card(job.tag.placed if job.tag else None)
                self.state.decisions.append(explain.taken_back(job, card, why, view.now_s))

    async def place(
        self, placement: Placement, view: View, outcomes: Counter[str], answer: dict[str, Job] | None = None
    ) -> Outcome | None:
        """Send a job to its card; None if this Slurm cannot change its request so. `answer` is as for `Changer`."""
        job = view.jobs[placement.key]
        node, first = view.nodes[placement.place.node], placement.place.first
        total = node.shards_per_gpu[first]
        shards = total if placement.how is How.UNSHARED else max(1, total // 2)
        card = GpuAddress(node.name, first)
        guest = placement.how in (How.BESIDE, How.TOGETHER)
        successor = placement.how is How.SUCCEEDS
        change = place(job, card, node.gpus[first], shards, self._slurm.release, view.now_s, guest, successor)
        if change is None:
            outcomes["unchangeable"] += 1
            return None
        cards = {GpuAddress(node.name, index) for index in placement.place.cards}
        overtaken = node.name in self.state.answering or cards & self.recent.overtaken(self._changer.asked_s)[1]
        if answer is None and overtaken:
            outcomes["place:overtaken"] += 1
            return Outcome.MOVED_ON
        applied = await self._changer.apply(
            job, change, "place", outcomes, answer, gpu=card, how=placement.how, beside=placement.partner_key,
            isd_pct=placement.reasons.guest_isd_pct, resident_isd_pct=placement.reasons.resident_isd_pct,
        )  # fmt: skip
        if applied.outcome is Outcome.DONE:
            self.state.placements.sent(job, view.now_s)
            partner = view.jobs.get(placement.partner_key or "")
            self.state.decisions.append(explain.placed(job, placement, partner, self.settings.policy, view.now_s))
        return applied.outcome

    async def _end_leases(self, view: View, placed: set[str], report: TickReport) -> None:
        """Jobs without a place become visible to Slurm now, as they were asked for."""
        leased = (
            (job, restore(job, self._slurm.release, view.now_s))
            for job in view.jobs.values()
            if job.key not in placed
            and touched(job)
            and not (job.tag and job.tag.placed)
            and job.begins_later(view.now_s)
            and not job.held
            and not job.dependency
        )
        changes = ((job, change) for job, change in leased if change is not None)
        async for job, change in self._changer.in_time(changes, "wait"):
            reason = report.reasons.get(job.key)
            await self._changer.apply(job, change, "wait", report.outcomes, why=reason.code if reason else None)
        self._note_waits(view, report)

    async def _keep_decisions(self) -> None:
        """Put them into the store. Where that fails they are kept for the next tick: what was done stays done."""
        decisions = list(self.state.decisions)
        if not self.dry_run:
            await Work(self._store.decisions.add, decisions)
        del self.state.decisions[: len(decisions)]

    def _note_waits(self, view: View, report: TickReport) -> None:
        """Record why jobs wait, once for each reason: its numbers change from tick to tick."""
        for key, reason in report.reasons.items():
            if self.state.told.get(key) != reason.code:
                self.state.told[key] = reason.code
                self.state.decisions.append(explain.waits(view.jobs[key], reason, view.now_s))
        self.state.told = {key: code for key, code in self.state.told.items() if key in view.jobs}
