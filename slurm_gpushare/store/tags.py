"""What ingest asks of Slurm: whose job was it, and which token did it carry?"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple, Protocol


class JobTag(NamedTuple):
    """A job as far as the store is concerned."""

    token: str | None
    """None: the job took no part in sharing."""
    uid: int


class JobTags(Protocol):
    """Looks jobs up, in the queue and then in accounting."""

    def __call__(self, job_ids: Collection[int]) -> Mapping[int, JobTag]:
        """The jobs that could be found; one that is absent is asked for again later."""


def no_tags(job_ids: Collection[int]) -> Mapping[int, JobTag]:
    """Where Slurm cannot be asked: every record waits."""
    return {}
