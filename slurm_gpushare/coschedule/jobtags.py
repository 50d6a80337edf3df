"""The store's question "whose job was it, and which token?", answered by Slurm."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from slurm_gpushare.slurm.errors import SlurmError
from slurm_gpushare.slurm.interface import Slurm
from slurm_gpushare.slurm.tags import JobTags
from slurm_gpushare.store.tags import JobTag


class SlurmTags:
    """`slurm_gpushare.store.tags.JobTags` on a real Slurm; where Slurm does not answer, records wait."""

    def __init__(self, slurm: Slurm) -> None:
        self.queue = JobTags(slurm)

    def __call__(self, job_ids: Collection[int]) -> Mapping[int, JobTag]:
        try:
            found = self.queue.resolve(job_ids)
        except SlurmError:
            return {}
        return {raw_id: JobTag(job.tag.token if job.tag else None, job.uid) for raw_id, job in found.items()}
