"""``gpushare job ID``: why was it placed so, why does it wait, what did sharing cost it?"""

from __future__ import annotations

import click

from slurm_gpushare.cli.access import config_or_defaults, readable_store
from slurm_gpushare.errors import BadInput
from slurm_gpushare.report.story import Known, tell
from slurm_gpushare.slurm.accounting import AccountingQuery
from slurm_gpushare.slurm.interface import Slurm, connect


@click.command("job")
@click.argument("job_id", metavar="ID")
def job(job_id: str) -> None:
    """Explain a job: its cluster, its place, why it waits, what sharing costs it.

    Works for every user from Slurm alone; whoever may read the store is told each decision with its reasons.
    """
    if not job_id.replace("_", "").replace("+", "").isdecimal():
        raise BadInput(f"'{job_id}' is no job id", "Give it as squeue prints it: 14, 6_2.")
    known = _find(connect(), job_id)
    store = readable_store(config_or_defaults(), loud=False)
    if store is None:
        lines = tell(known, (), ())
    else:
        with store:
            lines = tell(known, store.decisions.of_job(known.raw_id), store.sharing.of_job(known.raw_id))
    click.echo("\n".join(lines))


def _find(slurm: Slurm, job_id: str) -> Known:
    for found in slurm.jobs([job_id]):
        if job_id in (found.key, str(found.raw_id)):
            return Known(
                found.key, found.raw_id, found.state, found.reason, ",".join(found.partitions), found.nodes, found.tag
            )
    for past in slurm.accounting(AccountingQuery(jobs=[job_id])):
        return Known(past.key, past.raw_id, past.state, "", past.partition, past.nodes, past.tag)
    raise BadInput(f"no job {job_id}", "Neither slurmctld nor accounting knows it, or it is not yours to see.")
