"""The jobs of experiments on a testbed."""

from __future__ import annotations

from gpushare_lab.paper.jobs import Queue, paper_jobs

from slurm_gpushare.protocol.tokens import TOKEN


def test_every_job_of_the_paper_has_a_token_of_its_own() -> None:
    tokens = [job.token for job in paper_jobs(None, Queue(60))]
    assert len(set(tokens)) == 60
    assert all(TOKEN.fullmatch(token) for token in tokens)
