"""An emulated training job: ``python -m gpushare_lab.job.workload --gpu-util 60 --work-s 30 --epochs 3``.

It takes a seat on the card that CUDA_VISIBLE_DEVICES names, does its work at the speed that its neighbours leave it,
and publishes the load that NVML then reports. Standard library only, so that it starts fast in any Python 3.11.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from gpushare_lab.emulator.card import CardInfo, Demand, EmulatedCard, OutOfMemory
from gpushare_lab.emulator.node import CHECKPOINTS, card_path
from gpushare_lab.job import contention
from gpushare_lab.job.demands import infer_demand, read_demand
from gpushare_lab.job.pair_rates import EmulatedRates, read_pairs
from gpushare_lab.job.progress import RateOf
from gpushare_lab.job.training import EmulatedJob, Stopped, train
from slurm_gpushare.protocol.errors import BadInput, Exit, GpushareError

DEFAULT = Demand(gpu_util_pct=50, mem_access_pct=20, mem_mib=2048)


def rate_function(demand: Demand, table: EmulatedRates | None) -> RateOf:
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


def visible_card(environ: Mapping[str, str]) -> Path:
    """The file of the card that this job may use, from the environment that Slurm gives it."""
    emu_dir = environ.get("GPUSHARE_EMU_DIR")
    if not emu_dir:
        raise BadInput(
            "GPUSHARE_EMU_DIR is not set", "Run the job in a testbed: gpushare-lab testbed run -- sbatch ..."
        )
    node = environ.get("SLURMD_NODENAME") or environ.get("GPUSHARE_EMU_NODE")
    if not node:
        raise BadInput("neither SLURMD_NODENAME nor GPUSHARE_EMU_NODE is set", "They say which node this is")
    count = sum(1 for _ in (Path(emu_dir) / node).glob("card*"))
    if not count:
        raise BadInput(f"node {node} has no emulated GPUs in {emu_dir}", "Is the testbed up?")
    wanted = environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    for gpu in range(count):
        path = card_path(Path(emu_dir), node, gpu)
        if wanted == str(gpu):
            return path
        if wanted.startswith("GPU-"):  # CUDA takes the beginning of a UUID too
            with EmulatedCard(path) as card:
                if card.info.uuid.startswith(wanted):
                    return path
    which = f"GPU {wanted}" if wanted else "the GPU named by an empty list"
    raise BadInput(f"{which} does not exist on node {node}, which has {count}", "Check CUDA_VISIBLE_DEVICES")


class _OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BadInput(message, "Try --help")


def _parser() -> argparse.ArgumentParser:
    parser = _OneLineParser(prog="workload", description="An emulated training job on an emulated GPU.")

    def option(name: str, kind: type, metavar: str, text: str) -> None:
        parser.add_argument(name, type=kind, metavar=metavar, help=text)

    option("--work-s", float, "S", "seconds it takes alone (default 60)")
    option("--epochs", int, "N", "epochs (default 1)")
    option("--gpu-util", float, "PCT", "GPU utilisation while training alone (default 50)")
    option("--mem-access", float, "PCT", "time spent accessing GPU memory (default 20)")
    option("--mem-mib", int, "MIB", "GPU memory, context included (default 2048)")
    option("--mem-grow-mib", int, "MIB", "memory allocated on top, halfway (default 0)")
    option("--pcie-mib-s", float, "N", "input over PCIe (default 4 x GPU utilisation)")
    option("--cpu-pct", float, "PCT", "of one core, really used (default 0)")
    option("--profile", str, "NAME", "name in the files of --pairs and --profiles")
    option("--pairs", Path, "FILE", "measured rates beside other profiles; else the contention model holds")
    option("--profiles", Path, "FILE", "telemetry of profiles: the demand, where no option says it")
    option("--seed", int, "N", "of the noise (default: the job id)")
    option("--checkpoint", Path, "FILE", "save and resume here (default: by job id, resumed after a requeue)")
    return parser


def _between(option: str, value: float | None, default: float, low: float, high: float) -> float:
    chosen = default if value is None else value
    if not low <= chosen <= high:
        raise BadInput(f"{option} {chosen:g} is out of range", f"It is {low:g} to {high:g}")
    return chosen


def _demand(options: argparse.Namespace, table: EmulatedRates | None, info: CardInfo) -> Demand:
    """Each figure from its option, else from the profile's telemetry, else from its pairs, else a default."""
    profile = options.profile or ""
    if bool(profile) != bool(table or options.profiles):
        raise BadInput("--profile goes with --pairs or --profiles, and they with it")
    if table and profile not in table.profiles:
        raise BadInput(f"no profile {profile!r} in {options.pairs}")
    stated = None not in (options.gpu_util, options.mem_access, options.mem_mib)
    base = DEFAULT
    if options.profiles:
        base = read_demand(options.profiles, profile)
    elif table and not stated:
        base = infer_demand(table, profile, info.mem_usable_mib)
    gpu = _between("--gpu-util", options.gpu_util, base.gpu_util_pct, 0, 100)
    return Demand(
        gpu,
        _between("--mem-access", options.mem_access, base.mem_access_pct, 0, 100),
        int(_between("--mem-mib", options.mem_mib, base.mem_mib, 0, 1e7)),
        _between("--pcie-mib-s", options.pcie_mib_s, 4 * gpu, 0, 16000),
        _between("--cpu-pct", options.cpu_pct, 0, 0, 90),
        profile,
    )


def _job(
    options: argparse.Namespace, demand: Demand, table: EmulatedRates | None, environ: Mapping[str, str]
) -> EmulatedJob:
    job_id = environ.get("SLURM_JOB_ID", "")
    path, resume = options.checkpoint, True
    if path is None and job_id:
        folder = Path(environ["GPUSHARE_EMU_DIR"]) / CHECKPOINTS
        path = folder / f"{job_id}.{environ.get('SLURM_STEP_ID', 'batch')}.{environ.get('SLURM_PROCID', '0')}"
        resume = environ.get("SLURM_RESTART_COUNT", "0") != "0"  # job ids begin again in a new testbed
    epoch_file = environ.get("GPUSHARE_EPOCH_FILE")
    seed = options.seed if options.seed is not None else int(job_id) if job_id.isdecimal() else 0
    return EmulatedJob(
        demand,
        work_s=_between("--work-s", options.work_s, 60, 0.01, 1e8),
        epochs=int(_between("--epochs", options.epochs, 1, 1, 1e6)),
        seed=seed,
        mem_grow_mib=int(_between("--mem-grow-mib", options.mem_grow_mib, 0, 0, 1e7)),
        checkpoint=path,
        resume=resume,
        epoch_file=Path(epoch_file) if epoch_file else None,
        clashes=table.clashes(demand.profile) if table else frozenset(),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one job; what goes wrong is one line on stderr and an exit code."""
    try:
        options = _parser().parse_args(argv)
        with EmulatedCard(visible_card(os.environ)) as card:
            table = read_pairs(options.pairs, card.info.name) if options.pairs else None
            demand = _demand(options, table, card.info)
            train(_job(options, demand, table, os.environ), card, rate_function(demand, table))
    except Stopped as stopped:
        return 128 + stopped.number
    except OutOfMemory as error:
        print(f"torch.cuda.OutOfMemoryError: {error}", file=sys.stderr)
        return Exit.FAILURE
    except GpushareError as error:
        print(f"workload: error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        sys.stderr.close()  # nobody reads our epochs any more
        return Exit.FAILURE
    except OSError as error:
        print(f"workload: error: {error}", file=sys.stderr)
        return Exit.FAILURE
    return Exit.OK


if __name__ == "__main__":
    sys.exit(main())
