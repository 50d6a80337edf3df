"""An emulated training job: ``python -m slurm_gpushare.testbed.workload --gpu-util 60 --work-s 30 --epochs 3``.

It takes a seat on the card that CUDA_VISIBLE_DEVICES names, does its work at the speed that its neighbours leave it,
and publishes the load that NVML then reports. Standard library only, so that it starts fast in any Python 3.11.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from slurm_gpushare.errors import BadInput, Exit, GpushareError
from slurm_gpushare.testbed import checkpoint, contention, load
from slurm_gpushare.testbed.emulator.card import Card, CardInfo, Demand, OutOfMemory, Seat, now_us
from slurm_gpushare.testbed.emulator.node import CHECKPOINTS, card_path
from slurm_gpushare.testbed.pairs import PairTable, read_pairs
from slurm_gpushare.testbed.progress import RateOf, advance

TICK_S = 0.25  # how often load is published; accuracy does not depend on it
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
SIGNALS = (*STOP_SIGNALS, signal.SIGCONT)


@dataclass(frozen=True)
class Job:
    """What to run."""

    demand: Demand
    work_s: float
    epochs: int
    seed: int
    checkpoint: Path | None
    resume: bool
    epoch_file: Path | None


class Stopped(Exception):
    """A signal asked the job to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def run(job: Job, card: Card, rate_of: RateOf) -> None:
    """Train to the end, or raise Stopped with the progress saved."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # they end our sleep instead of interrupting a step
    begun_s = checkpoint.load(job.checkpoint, job.work_s, job.epochs) if job.checkpoint and job.resume else 0.0
    seat = card.join(job.demand)
    try:
        _train(job, card, seat, rate_of, begun_s)
    except BaseException:
        seat.leave(now_us())
        raise
    if job.checkpoint:
        job.checkpoint.unlink(missing_ok=True)


def _train(job: Job, card: Card, seat: Seat, rate_of: RateOf, begun_s: float) -> None:
    noise = random.Random(job.seed)
    epoch_s = job.work_s / job.epochs
    epoch = min(int(begun_s / epoch_s + 1e-9), job.epochs - 1)
    done_s, at_us, epoch_at_us, epoch_done_s = begun_s, seat.joined_us, seat.joined_us, begun_s
    _say(f"training on GPU {card.info.index} ({card.info.name}): {job.epochs} epochs, {job.work_s:g} s alone")
    if begun_s:
        _say(f"resumed from checkpoint: {begun_s:.3f} of {job.work_s:g} s done, epoch {epoch + 1}/{job.epochs}")
    burnt_s = time.process_time()
    wait_s = 0.0
    while True:
        got = signal.sigtimedwait(SIGNALS, wait_s)
        look_us = now_us()
        if got and got.si_signo == signal.SIGCONT and look_us - at_us > 2e6 * TICK_S:
            at_us = look_us  # it was suspended: that time was not worked
        others = [stay for stay in card.residents(at_us) if stay.slot != seat.slot]
        step = advance(at_us, max(look_us, at_us), (epoch + 1) * epoch_s - done_s, others, rate_of)
        done_s, at_us = done_s + step.work_s, step.until_us
        if got and got.si_signo in STOP_SIGNALS:
            _save(job, done_s)
            raise Stopped(got.si_signo)
        if done_s >= (epoch + 1) * epoch_s - 1e-9:
            spent_s = (at_us - epoch_at_us) / 1e6
            speed = (done_s - epoch_done_s) / spent_s if spent_s > 0 else 1.0
            epoch, epoch_at_us, epoch_done_s = epoch + 1, at_us, done_s
            loss = 2.3 * 0.8**epoch * (1 + noise.uniform(-0.03, 0.03))
            _say(f"epoch {epoch}/{job.epochs} loss {loss:.4f} time_s={spent_s:.3f} rate={speed:.4f}")
            if epoch == 1 and job.epoch_file:
                _touch(job.epoch_file)
            if epoch == job.epochs:
                break
            _save(job, done_s)
        seat.publish(load.sample(job.demand, done_s / epoch_s - epoch, step.rate, at_us, noise))
        burnt_s = _burn(job.demand.cpu_pct, burnt_s, wait_s)
        ahead_s = ((epoch + 1) * epoch_s - done_s) / step.rate - (now_us() - at_us) / 1e6
        wait_s = min(TICK_S, max(ahead_s, 0.0005))
    seat.leave(at_us)
    elapsed_s = (at_us - seat.joined_us) / 1e6
    worked_s = job.work_s - begun_s
    _say(
        f"done work_s={worked_s:.3f} time_s={elapsed_s:.3f} rate={worked_s / elapsed_s:.4f} "
        f"isd_pct={100 * (elapsed_s / worked_s - 1):.2f}"
    )


def _burn(cpu_pct: float, burnt_s: float, passed_s: float) -> float:
    """Use the CPU for real, so that the host's counters show the job's share."""
    if cpu_pct <= 0:
        return burnt_s
    target_s = burnt_s + min(cpu_pct, 90.0) / 100 * passed_s
    while time.process_time() < target_s:
        pass
    return time.process_time()


def _save(job: Job, done_s: float) -> None:
    if job.checkpoint:
        try:
            checkpoint.save(job.checkpoint, checkpoint.Checkpoint(job.work_s, job.epochs, done_s))
        except GpushareError as error:
            print(f"workload: warning: {error}", file=sys.stderr, flush=True)  # the work itself goes on


def _touch(path: Path) -> None:
    try:
        path.touch()
    except OSError as error:
        print(f"workload: warning: cannot touch GPUSHARE_EPOCH_FILE: {error}", file=sys.stderr, flush=True)


def _say(line: str) -> None:
    print(line, flush=True)


def rate_function(demand: Demand, table: PairTable | None) -> RateOf:
    """A job's speed beside others: measured where the table has the pair, else by the contention model."""

    def rate_of(neighbours: Sequence[Demand]) -> float:
        product, unmeasured = 1.0, []
        for neighbour in neighbours:
            measured = table.rates.get((demand.profile, neighbour.profile)) if table else None
            if measured is None:
                unmeasured.append(neighbour)
            else:
                product *= measured
        return product * contention.rate(demand, unmeasured)

    return rate_of


def visible_card(environ: dict[str, str]) -> Path:
    """The file of the card that this job may use, from the environment that Slurm gives it."""
    emu_dir = environ.get("GPUSHARE_EMU_DIR")
    if not emu_dir:
        raise BadInput("GPUSHARE_EMU_DIR is not set", "Run the job in a testbed: gpushare testbed run -- sbatch ...")
    node = environ.get("SLURMD_NODENAME") or environ.get("GPUSHARE_EMU_NODE")
    if not node:
        raise BadInput("neither SLURMD_NODENAME nor GPUSHARE_EMU_NODE says which node this is")
    cards = sorted((Path(emu_dir) / node).glob("card*"), key=lambda path: int(path.name[4:]))
    if not cards:
        raise BadInput(f"node {node} has no emulated GPUs in {emu_dir}")
    wanted = environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    if wanted.isdecimal():
        path = card_path(Path(emu_dir), node, int(wanted))
        if path in cards:
            return path
    elif wanted.startswith("GPU-"):
        for path in cards:
            with Card(path) as card:
                if card.info.uuid.startswith(wanted):
                    return path
    raise BadInput(
        f"GPU {wanted or '(none)'} does not exist on node {node}, which has {len(cards)}", "Check CUDA_VISIBLE_DEVICES"
    )


class _OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BadInput(message, "Try --help")


def _parser() -> argparse.ArgumentParser:
    parser = _OneLineParser(prog="workload", description="An emulated training job on an emulated GPU.")
    demand = parser.add_argument_group("demand, as when it runs alone")
    demand.add_argument("--gpu-util", type=float, metavar="PCT", help="GPU utilisation while training (default 50)")
    demand.add_argument(
        "--mem-access", type=float, metavar="PCT", help="time spent accessing GPU memory (default 40 %% of --gpu-util)"
    )
    demand.add_argument("--mem-mib", type=int, metavar="MIB", help="GPU memory, context included (default 2048)")
    demand.add_argument("--pcie-mib-s", type=float, metavar="N", help="input over PCIe (default 4 x --gpu-util)")
    demand.add_argument(
        "--cpu-pct", type=float, default=0.0, metavar="PCT", help="of one core, really used (default 0)"
    )
    demand.add_argument("--profile", default="", metavar="NAME", help="name in the pairs file")
    demand.add_argument("--pairs", type=Path, metavar="FILE", help="measured rates; else the contention model holds")
    parser.add_argument("--work-s", type=float, default=60.0, metavar="S", help="seconds it takes alone (default 60)")
    parser.add_argument("--epochs", type=int, default=1, metavar="N", help="epochs (default 1)")
    parser.add_argument("--seed", type=int, help="of the noise (default: the job id)")
    parser.add_argument(
        "--checkpoint",
        type=Path,
        metavar="FILE",
        help="save and resume here (default: by job id, resumed after a requeue)",
    )
    return parser


def _between(name: str, value: float, low: float, high: float) -> float:
    if not low <= value <= high:
        raise BadInput(f"{name} {value:g} is out of range", f"It is {low:g} to {high:g}")
    return value


def _job(options: argparse.Namespace, info: CardInfo, environ: dict[str, str]) -> tuple[Job, PairTable | None]:
    if bool(options.profile) != bool(options.pairs):
        raise BadInput("--profile and --pairs go together")
    table = read_pairs(options.pairs, info.name) if options.pairs else None
    if table and options.profile not in table.profiles:
        raise BadInput(f"no profile {options.profile!r} in {options.pairs}")
    gpu_util = _between("--gpu-util", 50.0 if options.gpu_util is None else options.gpu_util, 0, 100)
    access = 0.4 * gpu_util if options.mem_access is None else options.mem_access
    demand = Demand(
        gpu_util,
        _between("--mem-access", access, 0, 100),
        int(_between("--mem-mib", 2048 if options.mem_mib is None else options.mem_mib, 0, 1e7)),
        _between("--pcie-mib-s", 4 * gpu_util if options.pcie_mib_s is None else options.pcie_mib_s, 0, 16000),
        _between("--cpu-pct", options.cpu_pct, 0, 90),
        options.profile,
    )
    _between("--work-s", options.work_s, 0.01, 1e7)
    _between("--epochs", options.epochs, 1, 1e6)
    job_id = environ.get("SLURM_JOB_ID", "")
    seed = options.seed if options.seed is not None else int(job_id) if job_id.isdecimal() else 0
    path, resume = options.checkpoint, True
    if path is None and job_id:
        folder = Path(environ["GPUSHARE_EMU_DIR"]) / CHECKPOINTS
        path = folder / f"{job_id}.{environ.get('SLURM_STEP_ID', 'batch')}.{environ.get('SLURM_PROCID', '0')}"
        resume = int(environ.get("SLURM_RESTART_COUNT") or 0) > 0  # job numbers start again in a new testbed
    epoch_file = environ.get("GPUSHARE_EPOCH_FILE")
    return (
        Job(demand, options.work_s, options.epochs, seed, path, resume, Path(epoch_file) if epoch_file else None),
        table,
    )


def main(argv: list[str] | None = None) -> int:
    """Run one job; what goes wrong is one line on stderr and an exit code."""
    try:
        options = _parser().parse_args(argv)
        environ = dict(os.environ)
        with Card(visible_card(environ)) as card:
            job, table = _job(options, card.info, environ)
            run(job, card, rate_function(job.demand, table))
    except Stopped as stopped:
        _say(f"stopped by signal {stopped.number}")
        return 128 + stopped.number
    except OutOfMemory as error:
        print(f"torch.cuda.OutOfMemoryError: {error}", file=sys.stderr)
        return Exit.FAILURE
    except GpushareError as error:
        print(f"workload: error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"workload: error: {error}", file=sys.stderr)
        return Exit.FAILURE
    return Exit.OK


if __name__ == "__main__":
    sys.exit(main())
