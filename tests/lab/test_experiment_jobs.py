"""The jobs of experiments on a testbed."""

from __future__ import annotations

import pytest
from gpushare_lab.paper.jobs import Queue, paper_jobs

from slurm_gpushare.protocol.errors import BadInput
from slurm_gpushare.protocol.tokens import TOKEN


def test_every_job_of_the_paper_has_a_token_of_its_own() -> None:
    tokens = [job.token for job in paper_jobs(None, Queue(60))]
    assert len(set(tokens)) == 60
    assert all(TOKEN.fullmatch(token) for token in tokens)


def test_each_workload_comes_as_often_as_is_said_and_takes_as_long_each_time() -> None:
    jobs = paper_jobs(None, Queue(36, 4), seed=4)
    by_token = {token: [job for job in jobs if job.token == token] for token in {job.token for job in jobs}}
    assert [len(runs) for runs in by_token.values()] == [4] * 9
    assert all(len({(job.work_s, job.cluster) for job in runs}) == 1 for runs in by_token.values())
    assert len({job.number for job in jobs}) == 36


def test_jobs_that_cannot_be_divided_are_refused_before_anything_starts() -> None:
    with pytest.raises(BadInput, match="multiple of 12"):
        Queue(10, 4)
