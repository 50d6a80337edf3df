"""``gpushare profile``: run a command and measure its first epoch."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import click

from slurm_gpushare.cli.output import warn
from slurm_gpushare.config import Config, load_config
from slurm_gpushare.errors import BadInput, GpushareError
from slurm_gpushare.telemetry.command import CannotRun, Command
from slurm_gpushare.telemetry.profile import EPOCH_FILE, allocation, epoch_file, sample_epoch, wait_to_the_end
from slurm_gpushare.telemetry.record import Record
from slurm_gpushare.telemetry.run import Identity
from slurm_gpushare.telemetry.spool import send_record
from slurm_gpushare.tokens import TOKEN, TokenFile


@click.command("profile", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--token", metavar="T", help="The workload that the command is. Default: the job's own token.")
@click.option("--name", metavar="N", help="The same by the name that 'gpushare token N' gave it.")
@click.option("--max-seconds", type=click.FloatRange(min=0, min_open=True), metavar="S", help="Sample at most so long.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- CMD [ARG]...")
def profile(token: str | None, name: str | None, max_seconds: float | None, command: tuple[str, ...]) -> int:
    """Run a command in a job and profile its first epoch.

    The epoch ends when the command ends, when S seconds have passed (default: ProbeSeconds), when the command creates
    the file that $GPUSHARE_EPOCH_FILE names, or on SIGUSR1. Sampling then stops and the command goes on. Its exit code,
    input, output and signals are its own; only numbers about the hardware leave the node.
    """
    identities = allocation(os.environ, _token(token, name))
    config = None
    try:
        config = load_config()
    except GpushareError as error:
        warn(f"{error} The command runs without being profiled.")
    with epoch_file(os.environ) as epoch:
        try:
            running = Command(command, {**os.environ, EPOCH_FILE: str(epoch)})
        except CannotRun as error:
            warn(str(error))
            return error.shell_code
        if config:
            try:
                _measure(running, identities, epoch, config, max_seconds)
            except Exception as error:  # noqa: BLE001 - the command runs already: whatever fails here is not its fault
                warn(f"the profile is lost: {error or type(error).__name__}")
        return wait_to_the_end(running)


def _measure(
    running: Command, identities: list[Identity], epoch: Path, config: Config, max_seconds: float | None
) -> None:
    line = ProgressLine()
    records = sample_epoch(
        running,
        identities,
        epoch,
        sample_s=config.sample_s,
        limit_s=max_seconds or config.probe_s,
        log=line.warn,
        progress=line.show,
    )
    line.clear()
    for record in records:
        send_record(record, config)
    line.say(_summary(records[0]))


def _token(token: str | None, name: str | None) -> str | None:
    if token and name:
        raise BadInput("--token and --name are the same thing", "Give one of them.")
    if token is not None and not TOKEN.fullmatch(token):
        raise BadInput("--token: not a token", "See 'gpushare token list'.")
    return TokenFile().get_or_make(name) if name is not None else token


class ProgressLine:
    """One line that is rewritten, for a person who watches: a terminal's stderr, with us in its foreground."""

    def __init__(self) -> None:
        self._shown = False

    @property
    def _watched(self) -> bool:
        try:
            return sys.stderr.isatty() and os.tcgetpgrp(sys.stderr.fileno()) == os.getpgrp()
        except OSError:
            return False

    def show(self, seconds: float, latest: Mapping[str, float]) -> None:
        if not self._watched:
            return
        parts = [f"profiling {seconds:.0f} s"]
        for label, attribute, unit in (("GPU", "gpu_util_pct", "%"), ("memory", "gpu_mem_mib", "MiB")):
            parts.append(f"{label} {latest[attribute]:.0f} {unit}" if attribute in latest else f"{label} ---")
        click.echo(f"\r\x1b[Kgpushare: {', '.join(parts)}", err=True, nl=False)
        self._shown = True

    def clear(self) -> None:
        if self._shown:
            click.echo("\r\x1b[K", err=True, nl=False)
            self._shown = False

    def say(self, text: str) -> None:
        if self._watched:
            click.echo(f"gpushare: {text}", err=True)

    def warn(self, text: str) -> None:
        self.clear()
        warn(text)


def _summary(record: Record) -> str:
    features = record.features
    if features.mgup is None:
        return "no GPU activity was seen"
    return (
        f"profiled {record.profile.seconds:.0f} s: GPU at most {features.mgup:.0f} %, "
        f"{features.mem_used_mib or 0:.0f} MiB, accessing memory {features.mgtsamp or 0:.0f} %"
    )
