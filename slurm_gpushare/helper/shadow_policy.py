"""`Policy=shadow`: what would be done about each job, worked out and recorded, and not done.

Under it the hook only tags jobs, so that all of them run on whole cards. The plan is shown the queue as it would be if
the hook had made them shareable: what it then decides at a moment is what it would have begun to do.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from slurm_gpushare.helper.changes import one_card
from slurm_gpushare.helper.explain import SHADOW, shadowed
from slurm_gpushare.helper.observe import View
from slurm_gpushare.helper.occupancy import token_of
from slurm_gpushare.helper.snapshot import Occupant, Placement, Snapshot
from slurm_gpushare.protocol.history import Decision
from slurm_gpushare.slurm.queue import Job
from slurm_gpushare.store import Store


def as_if_shareable(job: Job, shards_per_gpu: int) -> Job:
    """A waiting job of a known workload as the hook would have made it; any other as it is."""
    tag = job.tag
    if tag is None or not job.pending or token_of(job) is None or tag.original or not one_card(job, shards_per_gpu):
        return job
    (asked,) = (gres for gres in job.gres if gres.count)
    if asked.type:
        return job
    return replace(
        job,
        tag=replace(tag, original=str(asked)),
        per_job="",
        per_node=f"gres/{asked}",
        per_socket="",
        per_task="",
        per_gpu_extras=False,
    )


def with_open_cards(snapshot: Snapshot) -> Snapshot:
    """The same where jobs of known workloads have half of their card: it is whole only because nobody shares."""

    def open_(job: Occupant) -> Occupant:
        return replace(job, whole=job.whole and job.workload.token is None)

    gpus = tuple(replace(gpu, occupants=tuple(open_(job) for job in gpu.occupants)) for gpu in snapshot.gpus)
    return replace(snapshot, gpus=gpus)


class ShadowRecord:
    """Which jobs have their first decision recorded; after a restart the store says it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._recorded: set[str] = set()

    def first_time(self, placements: Iterable[Placement], view: View) -> list[Decision]:
        """The decisions about jobs that none was recorded of before."""
        self._recorded &= view.jobs.keys()
        new = [placement for placement in placements if placement.key not in self._recorded]
        asked = {job.raw_id: [(job.submit_s, view.now_s)] for job in (view.jobs[item.key] for item in new)}
        earlier = self._store.decisions.of_jobs(asked)
        self._recorded |= {str(decision.reasons.get("key")) for decision in earlier if decision.kind == SHADOW}
        found = [
            shadowed(view.jobs[placement.key], placement, view.jobs.get(placement.partner_key or ""), view.now_s)
            for placement in new
            if placement.key not in self._recorded
        ]
        self._recorded |= {placement.key for placement in new}
        return found
