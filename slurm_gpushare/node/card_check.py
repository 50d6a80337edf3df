"""What slurm-gpushare relies on, tried on a real card: ``gpushare card-check``.

    python -m slurm_gpushare.node.card_check TRY INDEX SECONDS

Each try runs in a child of its own, bounded in time, so that a driver that hangs or fails is a row of the table and
not its end. A try hands back numbers, model names and the driver's own error names: nothing that tells of a site.
"""

from __future__ import annotations

import glob
import json
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any

import pynvml

from slurm_gpushare.node.load_generator import KINDS, CudaError, Load, asked, together
from slurm_gpushare.node.measure import Identity, Measurement
from slurm_gpushare.node.mps import CONTROL, MpsError, answer_of
from slurm_gpushare.node.nvml import NvmlCard, NvmlError, open_cards
from slurm_gpushare.node.processes import Members, descendants_lister
from slurm_gpushare.protocol.attributes import ACTIVITY, ATTRIBUTES, CARD
from slurm_gpushare.protocol.record import RecordKind

_NEAR_PCT = 10.0
_NEAR = 0.1
_LOOK_S = 0.1
_LIMITED_MIB = 1024
GRID = tuple(
    (kind, duty) for kind, duties in zip(KINDS, ((0.25, 0.5, 1.0), (0.3, 1.0)), strict=True) for duty in duties
)
"""The loads whose rates beside each other are measured, 5 x 5."""
_KILL_AFTER_S = 5.0
_DIED = '{"verdict": "failed", "found": "the child has died", "figures": {}}'


class Verdict(StrEnum):
    """What a try says of the assumption behind it."""

    WORKS = "works"
    DIFFERS = "differs"  # the card does something, but not what we rely on
    FAILED = "failed"  # an error of the driver's, or no answer in time
    UNTRIED = "untried"


BAD = (Verdict.DIFFERS, Verdict.FAILED)


@dataclass(frozen=True, slots=True)
class CardOutcome:
    """What a try has found."""

    verdict: Verdict
    found: str
    figures: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Bench:
    """The card, and how long to look at it."""

    index: int
    seconds: float
    card: NvmlCard
    environ: Mapping[str, str]
    """What a process of ours needs to be on this card alone, without MPS."""

    @classmethod
    def of(cls, index: int, seconds: float) -> Bench:
        """NvmlError where there is no such card."""
        card = open_cards([index])[index]
        try:
            uuid = pynvml.nvmlDeviceGetUUID(card.handle)
        except pynvml.NVMLError as error:
            raise NvmlError(str(error)) from error
        environ = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_MPS")}
        # A directory without a daemon: one that somebody runs in the default place is not to serve us.
        environ |= {"CUDA_VISIBLE_DEVICES": uuid, "CUDA_MPS_PIPE_DIRECTORY": "/nonexistent"}
        return cls(index, seconds, card, environ)

    def load(self, kind: str = "arithmetic", duty: float = 1.0, **more: Any) -> Load:
        return Load(self.environ, kind, duty, **more)

    def watch(self, seconds: float) -> dict[int, list[tuple[float, float]]]:
        """(when, SM utilisation) of each process that the card tells of, so long; seconds count from now."""
        seen: dict[int, list[tuple[float, float]]] = {}
        began = time.monotonic()
        while (at := time.monotonic() - began) < seconds:
            for pid, load in (self.card.read(everything=False).processes or {}).items():
                looks = seen.setdefault(pid, [])
                if load.sm_pct is not None:
                    looks.append((at, load.sm_pct))
            time.sleep(_LOOK_S)
        return seen

    def worked(self, *loads: Load, times: float = 1.0) -> tuple[list[float], dict[int, float]]:
        """Loads at work at the same time: steps a second of each, and the mean utilisation by process."""
        seconds = self.seconds * times
        for load in loads:
            load.begin(seconds)
        seen = self.watch(seconds)
        speeds = [load.steps_s() for load in loads]
        means = {pid: _mean(looks, seconds / 2) for pid, looks in seen.items()}
        return speeds, {pid: mean for pid, mean in means.items() if mean is not None}


def _mean(looks: Sequence[tuple[float, float]], since_s: float) -> float | None:
    settled = [pct for at, pct in looks if at >= since_s]  # a figure is an average over up to a second before it
    return sum(settled) / len(settled) if settled else None


def _judged(right: bool, found: str, **figures: Any) -> CardOutcome:
    return CardOutcome(Verdict.WORKS if right else Verdict.DIFFERS, found, figures)


def _driver(bench: Bench) -> CardOutcome:
    facts = asked(bench.environ, "facts")
    found = f"compute capability {facts['compute_capability']}, CUDA {facts['cuda_version']}, both kernels load"
    return _judged(float(facts["compute_capability"]) >= 7.0, found, **facts)


def _attributes(bench: Bench) -> CardOutcome:
    with bench.load(duty=0.5) as load:
        who = Identity(0, "card-check", bench.index)
        members = Members(descendants_lister(load.pid))
        measurement = Measurement([who], members, limit_s=1e9, log=lambda _: None)
        load.begin(2 * bench.seconds)
        until = time.monotonic() + 2 * bench.seconds
        while time.monotonic() < until:
            measurement.step()
            time.sleep(_LOOK_S)
        load.steps_s()
        stats = measurement.records(RecordKind.FINAL)[0].profile.stats
    missing = [name for name in ATTRIBUTES if name not in stats]
    found = f"{len(ATTRIBUTES) - len(missing)} of {len(ATTRIBUTES)} attributes"
    means = {item.name: round(stats[item.name].mean, 3) for item in (*ACTIVITY, *CARD) if item.name in stats}
    return _judged(not missing, found + (f", without {', '.join(missing)}" if missing else ""), **means)


def _alone(bench: Bench) -> CardOutcome:
    with bench.load(duty=0.5) as load:
        _, seen = bench.worked(load, times=2)
    pct = seen.get(load.pid)
    if pct is None:
        return _judged(False, "no figure of the process")
    return _judged(
        abs(pct - 50.0) <= _NEAR_PCT, f"{pct:.0f} % of a process that is busy for 50 %", sm_pct=round(pct, 1)
    )


def _beside(bench: Bench, uid: int | None = None) -> CardOutcome:
    with bench.load(duty=0.25) as one, bench.load(duty=0.5, uid=uid) as other:
        _, seen = bench.worked(one, other, times=2)
    figures = {"first": seen.get(one.pid), "second": seen.get(other.pid), "blind": bench.card.blind}
    told = [pct for pct in (seen.get(one.pid), seen.get(other.pid)) if pct is not None]
    if len(told) == 2:
        found = f"{told[0]:.0f} and {told[1]:.0f} % of processes busy for 25 and 50 %"
        return _judged(told[1] > told[0], found, **figures)
    whose = ": an MPS server has them all" if bench.card.blind else ""
    return _judged(False, f"figures of {len(told)} of the 2 processes{whose}", **figures)


def _activity(bench: Bench) -> CardOutcome:
    with bench.load(duty=0.5) as one, bench.load() as other:
        one.begin(2 * bench.seconds)
        looks = bench.watch(2 * bench.seconds).get(one.pid, [])
        alone, alone_pct = one.steps_s(), _mean(looks, bench.seconds)
        speeds, seen = bench.worked(one, other, times=2)
    shared_pct = seen.get(one.pid)
    if not alone_pct or shared_pct is None or not alone:
        return _judged(False, "no figure of the process")
    told, true = shared_pct / alone_pct, speeds[0] / alone
    delay_s = next((at for at, pct in looks if pct >= alone_pct / 2), None)
    found = f"by its activity it keeps {told:.2f} of its speed, by its steps {true:.2f}"
    return _judged(abs(told - true) <= _NEAR, found, told=told, true=true, delay_s=delay_s)


def _stop(bench: Bench, beside: bool = False) -> CardOutcome:
    """Stopped in the middle third of its time: what is left of its steps, and what of its neighbour's."""
    third = bench.seconds
    with ExitStack() as stack:
        one = stack.enter_context(bench.load())
        others = [stack.enter_context(bench.load())] if beside else []
        alone, *free = together([one], third) + [together([other], third)[0] for other in others]
        one.begin(3 * third)
        time.sleep(third)
        os.kill(one.pid, signal.SIGSTOP)
        for other in others:
            other.begin(third)
        stopped_pct = _mean(bench.watch(third).get(one.pid, []), third / 2)
        kept = [other.steps_s() / max(speed, 1e-6) for other, speed in zip(others, free, strict=True)]
        os.kill(one.pid, signal.SIGCONT)
        left = one.steps_s() / max(alone, 1e-6)
    found = f"{left:.2f} of its steps where 0.67 are expected; {stopped_pct or 0:.0f} % busy while stopped"
    found += f"; its neighbour had {kept[0]:.2f} of its speed alone" if kept else ""
    right = abs(left - 2 / 3) <= _NEAR and (stopped_pct or 0) <= _NEAR_PCT and all(speed >= 0.9 for speed in kept)
    return _judged(right, found, left=left, stopped_pct=stopped_pct, neighbour=kept[0] if kept else None)


def _memory(bench: Bench) -> CardOutcome:
    with bench.load(duty=0.5) as neighbour:
        alone = together([neighbour], bench.seconds)[0]
        most_mib, why = asked(bench.environ, "memory").values()
        after = together([neighbour], bench.seconds)[0]
    found = f"after {most_mib} MiB {why}; its neighbour goes on with {after / max(alone, 1e-6):.2f} of its speed"
    return _judged("OUT_OF_MEMORY" in why and after >= 0.9 * alone, found, most_mib=most_mib)


def _compute_mode(bench: Bench) -> CardOutcome:
    mode = pynvml.nvmlDeviceGetComputeMode(bench.card.handle)
    if mode != pynvml.NVML_COMPUTEMODE_DEFAULT:
        return _judged(False, f"the card is in compute mode {mode}: the second job's CUDA fails", mode=mode)
    if os.geteuid():
        return CardOutcome(Verdict.UNTRIED, "DEFAULT; whether EXCLUSIVE_PROCESS turns a second process away takes root")
    pynvml.nvmlDeviceSetComputeMode(bench.card.handle, pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS)
    try:
        with bench.load():
            try:
                bench.load().__exit__()
            except CudaError as error:
                return _judged(True, f"DEFAULT; in EXCLUSIVE_PROCESS a second process gets {error}")
        return _judged(False, "DEFAULT; EXCLUSIVE_PROCESS lets a second process in")
    finally:
        pynvml.nvmlDeviceSetComputeMode(bench.card.handle, mode)


def _devices(_: Bench) -> CardOutcome:
    given = len(re.findall(r"\d+", os.environ.get("SLURM_JOB_GPUS", "")))
    if not given:
        return CardOutcome(Verdict.UNTRIED, "run it in a job that has one of several cards")
    opened = 0
    for path in glob.glob("/dev/nvidia[0-9]*"):
        try:
            os.close(os.open(path, os.O_RDWR))
            opened += 1
        except OSError:
            continue
    return _judged(opened <= given, f"the job can open {opened} of the node's cards and was given {given}")


def _dcgm(bench: Bench) -> CardOutcome:
    if shutil.which("dcgmi") is None:
        return CardOutcome(Verdict.UNTRIED, "there is no dcgmi")
    with bench.load() as load:
        load.begin(5)
        argv = ["dcgmi", "dmon", "-i", str(bench.index), "-e", "1001,1002,1003,1004,1005", "-c", "3"]
        lines = subprocess.run(argv, capture_output=True, text=True, check=False).stdout.splitlines()
        load.steps_s()
    values = re.findall(r"(?<![\w.])\d+\.\d+(?![\w.])", lines[-1]) if lines else []
    return _judged(len(values) == 5, f"{len(values)} of 5 profiling fields have a value", fields=[*map(float, values)])


def _grid(bench: Bench) -> CardOutcome:
    with ExitStack() as stack:
        sides = [[stack.enter_context(bench.load(*kind, mib=256)) for kind in GRID] for _ in range(2)]
        alone = [max(together([load], bench.seconds)[0], 1e-6) for load in sides[0]]
        pairs = []
        for a in range(len(GRID)):
            for b in range(a, len(GRID)):
                first, second = together([sides[0][a], sides[1][b]], bench.seconds)
                pairs.append([a, b, round(first / alone[a], 4), round(second / alone[b], 4)])
    rates = [rate for pair in pairs for rate in pair[2:]]
    names = [f"{kind}-{100 * duty:.0f}" for kind, duty in GRID]
    found = f"{len(pairs)} pairs, mean rate {sum(rates) / len(rates):.2f}, sum of a pair's {2 * sum(rates) / len(rates):.2f}"
    return CardOutcome(Verdict.WORKS, found, {"loads": names, "pairs": pairs})


@contextmanager
def _daemon(bench: Bench, *options: str) -> Iterator[tuple[Bench, Callable[[str], list[str]]]]:
    """A control daemon of our own for this card alone: the bench of its clients, and how it is asked."""
    program = shutil.which(CONTROL)
    if program is None:
        raise NotHere(f"there is no {CONTROL}")
    with tempfile.TemporaryDirectory(prefix="card-check-") as directory:
        os.chmod(directory, 0o755)
        environ = {**bench.environ, "CUDA_MPS_PIPE_DIRECTORY": directory, "CUDA_MPS_LOG_DIRECTORY": directory}
        ask = partial(answer_of, [program], environ, limit_s=10.0)
        answer_of([program, "-d", *options], environ, "", 10.0)
        try:
            # The daemon shows its clients one card, whatever the node calls it.
            yield Bench(bench.index, bench.seconds, bench.card, {**environ, "CUDA_VISIBLE_DEVICES": "0"}), ask
        finally:
            ask("quit")


def _mps(trial: Callable[[Bench], CardOutcome], bench: Bench, *options: str) -> CardOutcome:
    with _daemon(bench, *options) as (client, _):
        return trial(client)


def _mps_memory(bench: Bench) -> CardOutcome:
    with _daemon(bench) as (client, ask):
        ask(f"set_default_device_pinned_mem_limit 0 {_LIMITED_MIB}M")
        most_mib, why = asked(client.environ, "memory").values()
        half = {**client.environ, "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": f"0={_LIMITED_MIB // 2}M"}
        own_mib = asked(half, "memory")["mib"]
    found = f"of {_LIMITED_MIB} MiB that are allowed a process gets {most_mib}, then {why}; of its own half {own_mib}"
    right = most_mib <= _LIMITED_MIB and own_mib <= _LIMITED_MIB // 2
    return _judged(right, found, most_mib=most_mib, own_mib=own_mib)


def _mps_terminate(bench: Bench) -> CardOutcome:
    with _daemon(bench) as (client, ask), client.load() as one, client.load() as other:
        alone = together([other], bench.seconds)[0]
        one.begin(60)
        server = ask("get_server_list")[0].strip()
        ask(f"terminate_client {server} {one.pid}")
        os.kill(one.pid, signal.SIGKILL)
        left = together([other], bench.seconds)[0] / max(alone, 1e-6)
        status = " ".join(ask(f"get_server_status {server}"))
    return _judged(left >= 0.9, f"its neighbour goes on with {left:.2f} of its speed; the server says {status[:20]}")


class NotHere(Exception):
    """What a try needs is not on this machine."""


def _other_user() -> int:
    if os.geteuid():
        raise NotHere("takes root, for a process of another user")
    return pwd.getpwnam("nobody").pw_uid


@dataclass(frozen=True, slots=True)
class Try:
    """One row: what is relied upon, how it is tried, and what to do where it is not so."""

    relies_on: str
    run: Callable[[Bench], CardOutcome]
    set_: str
    looks: int = 4
    """How many looks it takes at the most."""


_MPS_OFF = "Keep Mps=off."
TRIES: Mapping[str, Try] = {
    "driver": Try("libcuda compiles our kernels; Volta or newer", _driver, "Update the driver; older cards are not supported."),
    "attributes": Try("NVML and /proc give every attribute of a profile", _attributes, "Tell us: rates are kept without those that are missing."),
    "process-alone": Try("NVML gives the activity of a process", _alone, "Policy=shadow: no promise can be kept here."),
    "process-beside": Try("NVML tells two processes of one user apart", _beside, "Policy=shadow: no promise can be kept here."),
    "process-other-user": Try("NVML tells processes of two users apart", lambda bench: _beside(bench, _other_user()), "ShareAcross=user"),
    "activity-is-speed": Try("activity beside another over activity alone is the rate of a job", _activity, "Trust slow-downs by elapsed times alone; tell us.", 8),
    "stop": Try("a stopped process leaves the card at once and goes on unhurt", _stop, "ResidentBudget=0: nobody can be paused.", 6),
    "stop-beside": Try("the neighbour of a stopped process has the card to itself", partial(_stop, beside=True), "ResidentBudget=0: nobody can be paused.", 8),
    "memory": Try("who asks too much memory fails, and nobody else", _memory, "ShareAcross=user", 30),
    "compute-mode": Try("the card is in DEFAULT mode; in EXCLUSIVE_PROCESS a second process fails", _compute_mode, "nvidia-smi -c DEFAULT"),
    "devices": Try("ConstrainDevices hides the cards of others", _devices, "ConstrainDevices=yes in cgroup.conf"),
    "dcgm": Try("DCGM's profiling fields could be used beside NVML's", _dcgm, "Nothing: they are not used yet."),
    "slices": Try("the rates of two processes without MPS", _grid, "gpushare card-check --pairs FILE, then 'gpushare kb fit'.", 40),
    "mps-figures": Try("under MPS NVML gives the activity of each client", partial(_mps, _beside), _MPS_OFF),
    "mps-other-user": Try("-multiuser-server serves two users at once", lambda bench: _mps(partial(_beside, uid=_other_user()), bench, "-multiuser-server"), "Mps=user, not all."),
    "mps-stop": Try("a stopped client of MPS goes on unhurt, and so does its neighbour", partial(_mps, partial(_stop, beside=True)), "Nobody is paused under MPS.", 8),
    "mps-memory": Try("MPS limits the memory of a process", _mps_memory, _MPS_OFF, 30),
    "mps-terminate": Try("terminate_client, then a signal, leaves the neighbour alone", _mps_terminate, _MPS_OFF),
    "mps": Try("the rates of two clients of MPS", partial(_mps, _grid), "gpushare card-check --pairs FILE, then 'gpushare kb fit'.", 40),
}  # fmt: skip


def limit_s(name: str, seconds: float) -> float:
    """How long a try may take."""
    return 5.0 + 2 * seconds * (TRIES[name].looks + 5)


def outcome(name: str, index: int, seconds: float) -> CardOutcome:
    """Try it in a child, which is ended when its time is over."""
    argv = [sys.executable, "-m", "slurm_gpushare.node.card_check", name, str(index), str(seconds)]
    child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                             start_new_session=True)  # fmt: skip
    most_s = limit_s(name, seconds)
    try:
        answer: dict[str, Any] = json.loads(child.communicate(timeout=most_s)[0] or _DIED)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGTERM)  # what it has set it puts back
        try:
            child.wait(_KILL_AFTER_S)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
        return CardOutcome(Verdict.FAILED, f"no answer within {most_s:.0f} s")
    return CardOutcome(Verdict(answer["verdict"]), answer["found"], answer["figures"])


def about(index: int) -> dict[str, Any]:
    """What card and driver this is; NvmlError where there is none."""
    card = open_cards([index])[index]
    sample = card.read(everything=False)
    driver = pynvml.nvmlSystemGetDriverVersion()
    return {"gpu_model": card.model, "mem_total_mib": sample.mem_total_mib, "driver": driver}


def main(arguments: Sequence[str]) -> None:
    """Run one try and print its outcome as JSON."""
    name, index, seconds = arguments
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        found = TRIES[name].run(Bench.of(int(index), float(seconds)))
    except NotHere as why:
        found = CardOutcome(Verdict.UNTRIED, str(why))
    except (CudaError, MpsError, NvmlError, pynvml.NVMLError) as error:
        found = CardOutcome(Verdict.FAILED, str(error))
    print(json.dumps(asdict(found)), flush=True)
    os._exit(0)  # a driver in trouble must not keep us in its destructors


if __name__ == "__main__":
    main(sys.argv[1:])
