"""Writes changes into Slurm: each job is read again first, and what an answer to a node did meanwhile comes first.

A job that moved on meanwhile is news; only Slurm's own trouble is an error.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice

from slurm_gpushare.helper import explain, log
from slurm_gpushare.helper.changes import (
    Applied,
    Change,
    Outcome,
    adoptions,
    apply_to,
    conversions,
    convertible,
    leave,
    only_measured,
    read_again,
    untagged,
    withdrawals,
)
from slurm_gpushare.helper.loop import Work
from slurm_gpushare.helper.observe import View
from slurm_gpushare.helper.placements import RecentView, as_changed
from slurm_gpushare.protocol.history import Decision, StoredJob
from slurm_gpushare.protocol.settings import Config
from slurm_gpushare.protocol.tag import clear_consent, parse_tag, with_tag
from slurm_gpushare.slurm.commands import Slurm
from slurm_gpushare.slurm.queue import Job
from slurm_gpushare.store import Store
from slurm_gpushare.store.workloads import models_of

# All changes of ticks and of answers to nodes.


MANY = 300
MANY_S = 1.0
"""What thousands of jobs may want at once is done so many a tick, and no longer: pauses and memory must not wait."""
REFUSED_S = 60.0
"""What Slurm refused is not tried again for so long, or the same jobs would keep all others from their turn."""


class Changer:
    """Remembers what was read again for the changes that come, and what Slurm has refused lately."""

    def __init__(self, slurm: Slurm, recent: RecentView, *, dry_run: bool) -> None:
        self.dry_run = dry_run
        self.recent = recent
        self.asked_s = 0.0
        """When the tick asked Slurm for the queue (monotonic clock)."""
        self._slurm = slurm
        self._fresh: dict[str, Job] = {}
        self._refused_s: dict[tuple[str, str], float] = {}
        """When Slurm refused a tick which change of which job (monotonic clock)."""

    async def read_again(self, keys: Iterable[str]) -> None:
        """Read jobs that are about to be changed in one request instead of one by one."""
        if not self.dry_run:
            self._fresh = await Work(read_again, self._slurm, list(keys))

    def not_refused(self, changes: Iterable[tuple[Job, Change]], event: str) -> Iterator[tuple[Job, Change]]:
        """Those that Slurm has not just refused under the name of `event`."""
        since_s = time.monotonic() - REFUSED_S
        self._refused_s = {key: at_s for key, at_s in self._refused_s.items() if at_s > since_s}
        return ((job, change) for job, change in changes if (event, job.key) not in self._refused_s)

    async def in_time(self, changes: Iterable[tuple[Job, Change]], event: str) -> AsyncIterator[tuple[Job, Change]]:
        """The first of many changes, as many as a tick has time for; their jobs are read again in one request."""
        some = list(islice(self.not_refused(changes, event), MANY))
        await self.read_again(job.key for job, _ in some)
        until_s = time.monotonic() + MANY_S
        for job, change in some:
            if time.monotonic() > until_s:
                self._fresh.clear()  # would be old by the next change
                return
            yield job, change

    async def apply(
        self,
        job: Job,
        change: Change,
        event: str,
        outcomes: Counter[str],
        answer: dict[str, Job] | None = None,
        **fields: object,
    ) -> Applied:
        """Change a job if it is still what the decision was about; counted in `outcomes`, and logged with `fields`.

        `answer`: in answer to a node, with the jobs that were read again for it.
        """
        if answer is None and job.key in self.recent.overtaken(self.asked_s)[0]:
            applied = Applied(job.key, Outcome.MOVED_ON, "it was placed in answer to a node meanwhile")
        elif self.dry_run:
            applied = Applied(job.key, Outcome.DRY)
        else:
            fresh = (self._fresh if answer is None else answer).pop(job.key, None)
            applied = await self._change(job, change, fresh, answered=answer is not None)
        if applied.outcome is Outcome.REFUSED and answer is None:
            self._refused_s[event, job.key] = time.monotonic()
        outcomes[f"{event}:{applied.outcome}"] += 1
        refused = applied.outcome is Outcome.REFUSED  # that Slurm was first is no news of a fault
        said = applied.message if refused else None
        if refused and "denied" in applied.message.lower():
            log.warning(event, job=job.key, outcome=applied.outcome, message=said, hint="The helper runs as SlurmUser.")
        else:
            log.noted(event, job=job.key, outcome=applied.outcome, **fields, message=said)
        return applied

    async def _change(self, job: Job, change: Change, fresh: Job | None, *, answered: bool) -> Applied:
        """While it is on its way the job counts as changed: who decides meanwhile must not give its card away."""
        expected = self.recent.update(job.key, as_changed(job, change), answered=answered)
        done = False
        try:
            applied = await Work(apply_to, self._slurm, job, change, fresh)
            done = applied.outcome is Outcome.DONE
        finally:
            if not done:
                self.recent.undo(expected, job)
        return applied


# Comments of jobs: tag those that the hook missed, and let those go whose owners opted out.


EVERY_S = 30.0
"""Comments are asked for apart, and seldom: it costs a request."""
_OUT = "opt-out"


class Comments:
    """What the helper remembers of them is when it last asked.

    Each decision is noted as soon as it is carried out: Slurm may fail before the next one.
    """

    def __init__(self, slurm: Slurm, store: Store, changer: Changer, decisions: list[Decision]) -> None:
        """`decisions` get those that are carried out."""
        self._slurm, self._store, self._changer, self._decisions = slurm, store, changer, decisions
        self._asked_s = -EVERY_S

    async def follow(self, view: View, config: Config, outcomes: Counter[str]) -> None:
        """Tag jobs that the hook missed, and take tags off where the owner took the token off."""
        missed = untagged(view.jobs.values(), config.partitions, config.shards_per_gpu)
        measured = only_measured(view.jobs.values())
        if not (missed or measured) or view.now_s - self._asked_s < EVERY_S:
            return
        self._asked_s = view.now_s
        comments = await Work(self._slurm.comments)
        found = list(self._changer.not_refused(withdrawals(measured, comments), _OUT))
        if await self._carry_out(found, _OUT, view, outcomes) < len(
            found
        ):  # an array's owner can ask for thousands at once
            self._asked_s -= EVERY_S  # the rest at the next look
        await self._adopt(missed, comments, view, config, outcomes)

    async def convert(self, view: View, config: Config, outcomes: Counter[str]) -> None:
        """Let first runs share that still wait although their workload has been measured, the next to start first."""
        waiting = convertible(view.jobs.values())
        if not waiting:
            return
        cluster_of = await Work(self._clusters, {job.tag.token for job in waiting if job.tag}, config)
        known = [job for job in waiting if job.tag and cluster_of(job.tag.token, job.uid) is not None]
        known = sorted(known, key=lambda job: (-job.priority, job.raw_id, job.task_id or 0))[:MANY]
        comments = await Work(self._slurm.comments, [job.key for job in known]) if known else {}
        await self._carry_out(conversions(known, comments, cluster_of), "convert", view, outcomes, "converted")

    async def let_go(self, view: View, outcomes: Counter[str]) -> None:
        """Take off what is left of ours in jobs whose owners opted out."""
        left = ((job, leave(job, view.now_s)) for job in view.jobs.values() if job.opted_out)
        await self._carry_out(((job, change) for job, change in left if change is not None), _OUT, view, outcomes)

    async def restore_tags(self, view: View, known: Mapping[str, StoredJob], outcomes: Counter[str]) -> None:
        """Write tags again that somebody else's AdminComment has replaced: without them nobody could undo us."""
        lost = (
            (job, Change(job.key, {"AdminComment": with_tag(job.admin_comment, tag)}))
            for job in (view.jobs[key] for key in known if key in view.jobs)
            if job.tag is None and (tag := parse_tag(known[job.key].tag)) is not None
        )
        await self._carry_out(lost, "restore-tag", view, outcomes)

    async def _carry_out(
        self, found: Iterable[tuple[Job, Change]], event: str, view: View, outcomes: Counter[str], kind: str = "tagged"
    ) -> int:
        """Make as many changes as there is time for, each noted as a decision; how many were tried."""
        tried = 0
        async for job, change in self._changer.in_time(found, event):
            tried += 1
            if (await self._changer.apply(job, change, event, outcomes)).outcome is not Outcome.DONE:
                continue
            if event == _OUT:
                await Work(self._store.jobs.take_off, [job.key])
                self._decisions.append(explain.opted_out(job, view.now_s))
            else:
                self._decisions.append(explain.noted(job, kind, view.now_s))
        return tried

    async def _adopt(
        self, missed: Sequence[Job], comments: Mapping[str, str], view: View, config: Config, outcomes: Counter[str]
    ) -> None:
        """Tag jobs that the hook missed."""
        consents = (clear_consent(comments.get(job.key, "")) for job in missed)
        cluster_of = await Work(self._clusters, {consent.token for consent in consents if consent}, config)
        found = adoptions(missed, comments, cluster_of)
        # The hook leaves srun and salloc alone, and says so.
        batch = await Work(self._slurm.batch_jobs, [job.key for job, _ in found]) if found else frozenset()
        await self._carry_out(((job, change) for job, change in found if job.key in batch), "tag", view, outcomes)

    def _clusters(self, tokens: Collection[str | None], config: Config) -> Callable[[str | None, int], int | None]:
        """Tells the cluster of a token of a user's that was measured on all of the site's models."""
        profiles = self._store.profiles.by_model({token for token in tokens if token})
        own_names, anew = (
            models_of(self._store.database, config.gpu_models).values(),
            self._store.violations.to_measure(),
        )

        def cluster_of(token: str | None, uid: int) -> int | None:
            known = [profiles.get(model, {}).get(token or "") for model in own_names]
            first = known[0] if known and token not in anew else None
            return first.cluster if all(known) and first is not None and first.owner_uid == uid else None

        return cluster_of
