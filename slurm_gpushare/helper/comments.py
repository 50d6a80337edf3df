"""Follows the comments of jobs: tags those that the hook missed, and lets those go whose owners opted out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from slurm_gpushare.helper import explain
from slurm_gpushare.helper.apply import Outcome
from slurm_gpushare.helper.changer import Changer
from slurm_gpushare.helper.changes import Change, leave
from slurm_gpushare.helper.observe import View
from slurm_gpushare.helper.tagging import adoptions, only_measured, untagged, withdrawals
from slurm_gpushare.protocol.history import Decision
from slurm_gpushare.protocol.settings import Config
from slurm_gpushare.slurm.commands import Slurm
from slurm_gpushare.slurm.queue import Job
from slurm_gpushare.store import Store
from slurm_gpushare.store.workloads import models_of

EVERY_S = 30.0
"""Comments are asked for apart, and seldom: it costs a request."""
_OUT = "opt-out"


class Comments:
    """What the helper remembers of them is when it last asked.

    Each decision is told as soon as it is carried out: Slurm may fail before the next one.
    """

    def __init__(self, slurm: Slurm, store: Store, changer: Changer) -> None:
        self._slurm, self._store, self._changer = slurm, store, changer
        self._asked_s = -EVERY_S

    def follow(self, view: View, config: Config, outcomes: Counter[str]) -> Iterator[Decision]:
        """Tag jobs that the hook missed, and take tags off where the owner took the token off."""
        missed = untagged(view.jobs.values(), config.partitions, config.shards_per_gpu)
        measured = only_measured(view.jobs.values())
        if not (missed or measured) or view.now_s - self._asked_s < EVERY_S:
            return
        self._asked_s = view.now_s
        comments = self._slurm.comments()
        yield from self._withdraw(withdrawals(measured, comments), view, outcomes)
        yield from self._adopt(missed, comments, view, config, outcomes)

    def let_go(self, view: View, outcomes: Counter[str]) -> Iterator[Decision]:
        """Take off what is left of ours in jobs whose owners opted out."""
        left = ((job, leave(job, view.now_s)) for job in view.jobs.values() if job.opted_out)
        changes = ((job, change) for job, change in left if change is not None)
        for job, change in self._changer.in_time(changes, _OUT):
            if self._done(job, change, _OUT, outcomes):
                yield explain.opted_out(job, view.now_s)

    def _withdraw(self, found: Sequence[tuple[Job, Change]], view: View, outcomes: Counter[str]) -> Iterator[Decision]:
        """Take tags off, a bounded number: an array's owner can ask for thousands at once."""
        tried, found = 0, list(self._changer.not_refused(found, _OUT))
        for job, change in self._changer.in_time(found, _OUT):
            tried += 1
            if self._done(job, change, _OUT, outcomes):
                yield explain.opted_out(job, view.now_s)
        if tried < len(found):
            self._asked_s -= EVERY_S  # the rest at the next look

    def _adopt(
        self, missed: Sequence[Job], comments: Mapping[str, str], view: View, config: Config, outcomes: Counter[str]
    ) -> Iterator[Decision]:
        """Tag jobs that the hook missed."""
        profiles, anew = self._store.profiles, self._store.conduct.to_measure()
        own_names = models_of(self._store.database, config.gpu_models).values()

        def cluster_of(token: str, uid: int) -> int | None:
            found = {} if token in anew else profiles.by_model({token})
            known = [found[model][token] for model in own_names if model in found]
            return known[0].cluster if known and known[0].owner_uid == uid else None

        found = adoptions(missed, comments, cluster_of)
        # The hook leaves srun and salloc alone, and says so.
        batch = self._slurm.batch_jobs([job.key for job, _ in found]) if found else frozenset()
        for job, change in found:
            if job.key in batch and self._done(job, change, "tag", outcomes):
                yield explain.noted(job, "tagged", view.now_s)

    def _done(self, job: Job, change: Change, event: str, outcomes: Counter[str]) -> bool:
        return self._changer.apply(job, change, event, outcomes).outcome is Outcome.DONE
