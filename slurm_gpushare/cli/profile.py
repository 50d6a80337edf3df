"""``gpushare profile``: run a command and measure its first epoch."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import click

from slurm_gpushare.cli.console import settings, table, warn
from slurm_gpushare.node.delivery import send_record
from slurm_gpushare.node.measure import Identity
from slurm_gpushare.node.profile import (
    EPOCH_FILE,
    CannotRun,
    Command,
    allocation,
    check_counts,
    enough,
    epoch_file,
    measure_curve,
    sample_epoch,
    shared,
    speeds,
    wait_to_the_end,
)
from slurm_gpushare.protocol.errors import BadInput, GpushareError
from slurm_gpushare.protocol.record import MAX_CURVE_POINTS, Record
from slurm_gpushare.protocol.settings import Config
from slurm_gpushare.protocol.text import counted
from slurm_gpushare.protocol.tokens import TOKEN, TokenFile, has_wrong_letter


def _counts(_context: click.Context, _parameter: click.Parameter, value: str | None) -> list[int]:
    words = [] if value is None else value.split(",")
    if not all(word.isascii() and word.isdecimal() and 0 < int(word) < 10_000 for word in words):
        raise BadInput(f"--cpus {value}: must be whole numbers from 1, separated by commas")
    if len(words) > MAX_CURVE_POINTS:
        raise BadInput(f"--cpus: more than {MAX_CURVE_POINTS} numbers")
    return sorted({int(word) for word in words})


@click.command("profile", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--token", metavar="T", help="The workload that the command is. Default: the job's own token.")
@click.option("--name", metavar="N", help="The same by the name that 'gpushare token N' gave it.")
@click.option("--max-seconds", type=click.FloatRange(min=0, min_open=True), metavar="S", help="Sample at most so long.")
@click.option("--cpus", "counts", metavar="N,...", callback=_counts,
              help="Run it for an epoch on each of these numbers of CPUs, and say how many are enough.")  # fmt: skip
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- CMD [ARG]...")
def profile(
    token: str | None, name: str | None, max_seconds: float | None, counts: list[int], command: tuple[str, ...]
) -> int:
    """Run a command in a job and profile its first epoch.

    The epoch ends when the command ends, when S seconds have passed (default: ProbeSeconds), when the command creates
    the file that $GPUSHARE_EPOCH_FILE names, or on SIGUSR1. Sampling then stops and the command goes on. Its exit code,
    input, output and signals are its own; only numbers about the hardware leave the node.

    With --cpus the command is ended after each epoch and run again on the next number of the job's CPUs.
    """
    if counts:
        return _curve(counts, command, _token(token, name), max_seconds)
    identities = allocation(os.environ, _token(token, name))
    config = None
    try:
        config = settings()
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


def _curve(counts: list[int], command: tuple[str, ...], token: str | None, max_seconds: float | None) -> int:
    """The command on each number of CPUs. The record of those that are enough is sent, with the curve.

    Runs that lacked CPUs are no profile.
    """
    identities, config, line = allocation(os.environ, token), settings(), ProgressLine()
    check_counts(counts)

    def sample(running: Command, epoch: Path) -> Record:
        return _sampled(running, identities, epoch, config, max_seconds, line)[0]

    try:
        points = list(measure_curve(counts, command, sample))
    except CannotRun as error:
        warn(str(error))
        return error.shell_code
    line.clear()
    numbers = [("CPUS", ""), ("EPOCH_S", ".1f"), ("GPU_BUSY%", ".0f"), ("CPUS_USED", ".1f")]
    rows = [[p.cpus, p.epoch_s if p.whole else None, p.gpu_busy_pct, p.cpu_cores] for p in points]
    click.echo(table([f"{name}>{form}" for name, form in numbers], rows))
    best = enough(points)
    if best is None:
        click.echo("No epoch came to its end and no GPU was seen: touch $GPUSHARE_EPOCH_FILE at the end of one.")
        return 1
    many = counted(best.cpus, "CPU")
    click.echo(f"{many} will do (-c {best.cpus}, or cpus=auto in the comment): within 5 % of the fastest.")
    curve = speeds(points)
    if shared(points):
        warn("another job was on the card: the curve is not kept. Measure it with max=0 in the comment.")
        curve = ()
    try:
        send_record(replace(best.record, cpu_curve=curve), config)
    except GpushareError as error:
        warn(f"the profile is lost: {error}")
    return 0


def _sampled(
    running: Command,
    identities: list[Identity],
    epoch: Path,
    config: Config,
    max_seconds: float | None,
    line: ProgressLine,
) -> list[Record]:
    limit_s = max_seconds or config.probe_s
    return sample_epoch(
        running, identities, epoch, sample_s=config.sample_s, limit_s=limit_s, log=line.warn, progress=line.show
    )


def _measure(
    running: Command, identities: list[Identity], epoch: Path, config: Config, max_seconds: float | None
) -> None:
    line = ProgressLine()
    records = _sampled(running, identities, epoch, config, max_seconds, line)
    line.clear()
    for record in records:
        send_record(record, config)
    line.say(_summary(records[0]))


def _token(token: str | None, name: str | None) -> str | None:
    if token and name:
        raise BadInput("--token and --name are the same thing", "Give one of them.")
    if token is not None and (not TOKEN.fullmatch(token) or has_wrong_letter(token)):
        raise BadInput("--token: not a token, or one with a wrong letter", "See 'gpushare token list'.")
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
