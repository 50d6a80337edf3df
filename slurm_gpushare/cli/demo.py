"""``gpushare demo``."""

from __future__ import annotations

from pathlib import Path

import click

from slurm_gpushare.cli.output import Column, table
from slurm_gpushare.cli.testbed import Steps, stop_on_sigterm
from slurm_gpushare.testbed import demo as the_demo
from slurm_gpushare.testbed.cluster import Testbed
from slurm_gpushare.testbed.layout import Shape
from slurm_gpushare.testbed.rootfs import SUITES


@click.command()
@click.option("--slurm", "suite", type=click.Choice(list(SUITES)),
              help="Run the Slurm of another Debian: bookworm 22.05, trixie 24.11, forky 26.05.")  # fmt: skip
@click.option("--dir", "directory", type=click.Path(path_type=Path), default=Path("/tmp/gpushare-demo"),
              show_default=True, help="The testbed's directory; it is removed at the end.")  # fmt: skip
def demo(suite: str | None, directory: Path) -> None:
    """Show jobs sharing GPUs on a throw-away Slurm."""
    steps = Steps()
    stop_on_sigterm()
    testbed = Testbed(directory, steps).up(Shape(nodes=2, gpus=2, shards=2), suite=suite)
    try:
        _show(testbed, steps)
    finally:
        testbed.down(purge=True)
    steps("stopped; nothing is left running")


def _show(testbed: Testbed, steps: Steps) -> None:
    jobs = the_demo.start(testbed)
    steps(f"{len(jobs)} jobs submitted, on 3 GPUs")
    places = the_demo.placed(testbed, jobs)
    click.echo()
    where = [
        Column("JOBID", align="right"),
        Column("NAME"),
        Column("STATE"),
        Column("NODE"),
        Column("GPU"),
        Column("BESIDE"),
    ]
    click.echo(
        table(
            where,
            [
                (
                    job.job_id,
                    job.name,
                    job.state,
                    job.node,
                    job.gpu,
                    ",".join(o.name for o in places if o != job and (o.node, o.gpu) == (job.node, job.gpu)),
                )
                for job in places
            ],
        )
    )
    click.echo()
    results = the_demo.costs(testbed, jobs)
    cost = [
        Column("JOBID", align="right"),
        Column("NAME"),
        Column("ALONE_S", ".1f", "right"),
        Column("TOOK_S", ".1f", "right"),
        Column("ISD%", ".1f", "right"),
    ]
    click.echo(table(cost, [(row.job_id, row.name, row.alone_s, row.took_s, row.isd_pct) for row in results]))
    click.echo("\nWhat sacct has kept:")
    columns = "JobID,JobName,State,Elapsed,NodeList,AllocTRES%60"
    click.echo(testbed.run(["sacct", "-X", "-o", columns]).stdout)
