"""``gpushare-lab testbed up|down|status|run``."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from gpushare_lab.testbed.configuration import PARTITION
from gpushare_lab.testbed.layout import Shape, default_dir
from gpushare_lab.testbed.rootfs import SUITES
from gpushare_lab.testbed.testbed import Testbed
from slurm_gpushare.protocol.errors import Exit, GpushareError

Command = TypeVar("Command", bound=Callable[..., Any])

_dir = click.option("--dir", "directory", type=click.Path(path_type=Path, file_okay=False), default=default_dir,
                    show_default="GPUSHARE_TESTBED, else /var/lib/gpushare-testbed",
                    help="The testbed's own directory.")  # fmt: skip


SLURM = click.option("--slurm", "suite", type=click.Choice(list(SUITES)),
                     help="Run the Slurm of another Debian: bookworm 22.05, trixie 24.11, forky 26.05.")  # fmt: skip


def throw_away_dir(default: str) -> Callable[[Command], Command]:
    """The option of commands that start a testbed of their own."""
    return click.option("--dir", "directory", type=click.Path(path_type=Path), default=Path(default),
                        show_default=True, help="The testbed's directory; it is removed at the end.")  # fmt: skip


class Steps:
    """A line for each step, with the time since the start."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def __call__(self, step: str) -> None:
        click.echo(f"[{time.monotonic() - self._start:5.1f} s] {step}", err=True)


def stop_on_sigterm() -> None:
    """Clean up on SIGTERM as on Ctrl-C; also where a shell started us in the background, deaf to Ctrl-C."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@click.group()
def testbed() -> None:
    """A real throw-away Slurm with emulated V100s."""


@testbed.command()
@click.option("--nodes", default=4, show_default=True, help="Compute nodes (one slurmd each).")
@click.option("--gpus", default=4, show_default=True, help="GPUs a node.")
@click.option("--shards", default=2, show_default=True, help="Shards a GPU.")
@click.option("--accounting/--no-accounting", default=True, show_default=True, help="With MariaDB and slurmdbd.")
@SLURM
@click.option("--plain", is_flag=True, help="Slurm as it is without us: to try the set-up itself.")
@_dir
def up(nodes: int, gpus: int, shards: int, accounting: bool, suite: str | None, plain: bool, directory: Path) -> None:
    """Start a testbed."""
    stop_on_sigterm()
    Testbed(directory, Steps()).up(Shape(nodes, gpus, shards), accounting=accounting, suite=suite, plain=plain)
    suffix = "" if directory == default_dir() else f" --dir {directory}"
    click.echo(f"Try: gpushare-lab testbed run{suffix} -- sinfo")


@testbed.command()
@click.option("--purge", is_flag=True, help="Remove the directory too, logs and all.")
@_dir
def down(purge: bool, directory: Path) -> None:
    """Stop every process of a testbed."""
    Testbed(directory, Steps()).down(purge=purge)


@testbed.command()
@_dir
def status(directory: Path) -> None:
    """Show a testbed's daemons, nodes and GPUs. Exit code 3 if something is dead."""
    bed = Testbed(directory)
    if bed.layout.read_state() is None and (left := bed.strays()):
        click.echo(f"{bed.dir}: a start or stop did not finish; processes left: {', '.join(map(str, sorted(left)))}")
        raise click.exceptions.Exit(Exit.PROBLEMS)
    state = bed.state
    click.echo(f"{bed.dir}: Slurm {state.release} ({state.suite}){'' if state.ready else ', start did not finish'}")
    running = bed.running()
    for name, pid in running.items():
        click.echo(f"  {name:<14} {f'pid {pid}' if pid else 'dead'}")
    if running["slurmctld"] and running["munged"]:
        columns = "NodeList:10,StateLong:12,Gres:.60,GresUsed:.80"
        click.echo(bed.run(["sinfo", "-N", "-p", PARTITION, "-O", columns], timeout_s=20).stdout.rstrip())
    if not all(running.values()) or not state.ready:
        raise click.exceptions.Exit(Exit.PROBLEMS)


@testbed.command(context_settings={"ignore_unknown_options": True})
@click.option("--user", help="Run as this user of the machine, e.g. games or nobody.")
@_dir
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(user: str | None, directory: Path, command: tuple[str, ...]) -> None:
    """Run COMMAND in a testbed: sbatch, squeue, sacct, gpushare just work."""
    bed = Testbed(directory)
    _ = bed.state  # says so when there is none
    argv, env = bed.command(command, user=user)
    try:
        os.execvpe(argv[0], argv, env)
    except OSError as why:
        raise GpushareError(f"{argv[0]}: {why.strerror}") from why
