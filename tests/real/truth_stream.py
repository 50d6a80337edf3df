"""A stream of emulated jobs of every kind that a report meets, each of which says itself what it got.

Their last lines are the truth: when a job computed, on which card, and how much work it did. Whatever is reported of
them is held against that.
"""

from __future__ import annotations

import os
import random
import re
import shlex
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from emulated import Asker
from gpushare_lab.emulator.card import Demand
from gpushare_lab.emulator.node import MEM_TOTAL_MIB
from gpushare_lab.experiment.helper_process import HelperProcess
from gpushare_lab.experiment.submitting import submit
from gpushare_lab.job import contention
from gpushare_lab.job.light_job import build_light_job
from gpushare_lab.known_profiles import KnownProfile, enter_profiles
from gpushare_lab.testbed.testbed import Testbed

from slurm_gpushare.helper.pair_speeds import ACTIVITY
from slurm_gpushare.protocol.settings import load_config
from slurm_gpushare.store import Store
from slurm_gpushare.store.hookfile import HookFile

SETTINGS = {"SampleSeconds": "0.5", "InterimSeconds": "5", "LeaseSeconds": "30", "ExtendTimeLimit": "yes"}
DEMANDS = {
    "light": Demand(25, 8, 1500, profile="light"),
    "small": Demand(40, 15, 2500, profile="small"),
    "middle": Demand(55, 25, 4000, profile="middle"),
    "busy": Demand(75, 35, 5000, profile="busy"),
    "heavy": Demand(92, 60, 6000, profile="heavy"),
    "rough": Demand(60, 25, 3000, profile="rough"),
}
ROUGH_RATE = 0.55
"""How fast others run beside the rough one, which no telemetry says: the helper pauses it."""
MEAN_OF_PEAK = 0.946
"""What the light job's loading, training and validation make of its peak."""
KINDS = (
    "shared", "shared", "array", "shared", "requeued", "shared", "cancelled", "shared", "shared", "probe",
    "shared", "plain", "shared", "cancelled", "shared", "shared", "never started", "shared", "requeued", "shared",
)  # fmt: skip
"""In turn; an array has three tasks."""
_LINE = re.compile(r"^(done|stopped) node=(\S+) gpu=(\d+) joined_s=([\d.]+) ended_s=([\d.]+) work_s=([\d.]+)$", re.M)


def rate(victim: str, neighbour: str) -> float:
    """How fast one of them really runs beside another."""
    return ROUGH_RATE if neighbour == "rough" else contention.rate(DEMANDS[victim], [DEMANDS[neighbour]])


@dataclass(frozen=True, slots=True)
class Truth:
    """One run of a job, by its own word; unix times."""

    name: str
    """Of its workload."""
    done: bool
    card: tuple[str, int]
    joined_s: float
    ended_s: float
    work_s: float

    @property
    def isd_pct(self) -> float:
        return 100.0 * ((self.ended_s - self.joined_s) / self.work_s - 1.0)

    def beside_s(self, other: Truth) -> float:
        """How long the two had one card."""
        if self is other or self.card != other.card:
            return 0.0
        return max(min(self.ended_s, other.ended_s) - max(self.joined_s, other.joined_s), 0.0)


@dataclass
class Stream:
    """Jobs that come, are cancelled and requeued, and end. The same seed gives the same."""

    testbed: Testbed
    jobs: int
    work_s: tuple[float, float]
    every_s: float
    seed: int = 1
    names: dict[str, str] = field(default_factory=dict)
    """The workload of each job, by key."""
    drawn: list[tuple[float, tuple[str, int], float]] = field(default_factory=list)
    """When, which card, and how much energy in Wh it has drawn since the last look."""

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._home = self.testbed.layout.home
        self.tokens = {name: self._token(name) for name in DEMANDS}
        self.token_of: dict[str, str] = {}
        self._ends: list[tuple[float, str, str]] = []
        self._looked_s = time.monotonic()

    def _token(self, name: str) -> str:
        return self.gpushare("token", name).strip()

    def gpushare(self, *arguments: str) -> str:
        """What a command answers its owner, who administers Slurm too."""
        return self.testbed.run(["gpushare", *arguments], env={"HOME": str(self._home)}, timeout_s=300).stdout

    @contextmanager
    def helped(self) -> Iterator[None]:
        """All workloads but those of probes are known, and a helper is at work."""
        self.testbed.configure(gpushare=SETTINGS)
        config = load_config(self.testbed.layout.gpushare_conf)
        self._binary = build_light_job(self.testbed.layout.lib)
        for victim in DEMANDS:
            text = "".join(f"{other} {rate(victim, other):.4f}\n" for other in DEMANDS)
            (self._home / f"rates.{victim}").write_text(text)
        with Store.create(config.store_url) as store:
            enter_profiles(store, [self._known(name) for name in DEMANDS])
            HookFile(config.hook_file, config.gpu_models).sync(store, 0)
        with HelperProcess(self.testbed, "gpushare"):
            yield

    def _known(self, name: str) -> KnownProfile:
        demand, kind = DEMANDS[name], list(DEMANDS).index(name) % 3
        features = {
            "mgup": demand.gpu_util_pct, "mgmap": 100 * demand.mem_mib / MEM_TOTAL_MIB,
            "mgtsamp": demand.mem_access_pct, f"{ACTIVITY}_mean": MEAN_OF_PEAK * demand.gpu_util_pct,
        }  # fmt: skip
        return KnownProfile(self.tokens[name], os.getuid(), "V100", demand.mem_mib, MEM_TOTAL_MIB, kind, None, features)

    def run(self, asker: Asker) -> None:
        """Submit all of them, and wait until the queue is empty."""
        for number in range(self.jobs):
            if len(self.names) < self.jobs:
                self._submit(KINDS[number % len(KINDS)], number)
                self._until(time.monotonic() + self.every_s, asker)
        while self._queue():
            self._until(time.monotonic() + 1.0, asker)

    def _submit(self, kind: str, number: int) -> None:
        name = self._random.choice(list(DEMANDS))
        work_s, demand = self._random.uniform(*self.work_s), DEMANDS[name]
        words = [str(self._binary), f"{work_s:.3f}", "4", f"{demand.gpu_util_pct}", f"{demand.mem_access_pct}"]
        words += [str(demand.mem_mib), name, str(self._home / f"rates.{name}")]
        options = ["--gres=gpu:1", "--mem=100", f"--time={int(work_s // 60) + self._random.randint(2, 5)}", "--requeue"]
        options += [f"--output={self._home}/%A_%a.out" if kind == "array" else f"--output={self._home}/%j.out"]
        options += ["--open-mode=append", *(["--array=0-2"] if kind == "array" else [])]
        token = self._token(f"new{number}") if kind == "probe" else self.tokens[name]
        options += [] if kind == "plain" else [f"--comment=gpushare:{token}"]
        options += ["--begin=now+1hour"] if kind == "never started" else []
        job = str(submit(self.testbed, f"exec {shlex.join(words)}\n", *options))
        keys = [f"{job}_{task}" for task in range(3)] if kind == "array" else [job]
        self.names |= dict.fromkeys(keys, name)
        self.token_of |= dict.fromkeys(keys, "" if kind == "plain" else token)
        if kind in ("cancelled", "requeued", "never started"):
            self._ends.append((self._random.uniform(0.3, 0.7) * work_s, job, kind))

    def _until(self, end_s: float, asker: Asker) -> None:
        while True:
            self._meter(asker)
            self._disturb()
            if (left_s := end_s - time.monotonic()) <= 0:
                return
            time.sleep(min(1.0, left_s))

    def _disturb(self) -> None:
        """Cancel or requeue who has run for long enough; cancel who waits for a time that does not come."""
        if not self._ends:
            return
        running = self._queue("--state=RUNNING")
        for end in list(self._ends):
            after_s, job, kind = end
            if kind == "never started" or running.get(job, 0.0) >= after_s:
                command = ["scontrol", "requeue", job] if kind == "requeued" else ["scancel", job]
                self.testbed.run(command, check=False)
                self._ends.remove(end)

    def _queue(self, *options: str) -> dict[str, float]:
        """Seconds that each job of the queue has run."""
        now_s, found = time.time(), {}
        for line in self.testbed.run(["squeue", "-h", "-a", "-r", *options, "-o", "%i %S"]).stdout.splitlines():
            job, start = line.split()
            known = start != "N/A"
            found[job] = now_s - time.mktime(time.strptime(start, "%Y-%m-%dT%H:%M:%S")) if known else 0.0
        return found

    def _meter(self, asker: Asker) -> None:
        """Read what the cards draw, as their own sensors show it."""
        shape, now_s = self.testbed.shape, time.monotonic()
        base = {"GPUSHARE_EMU_DIR": str(self.testbed.layout.emu), "PATH": os.environ["PATH"]}
        asked = ", ".join(f"n.nvmlDeviceGetPowerUsage(n.nvmlDeviceGetHandleByIndex({i}))" for i in range(shape.gpus))
        for node in shape.node_names:
            answer = asker.ask(asked, {**base, "GPUSHARE_EMU_NODE": node})
            for index, milliwatts in enumerate(answer.split()):
                drawn_wh = float(milliwatts) / 1000.0 * (now_s - self._looked_s) / 3600.0
                self.drawn.append((time.time(), (node, index), drawn_wh))
        self._looked_s = now_s

    def energy_wh(self, run: Truth, others: Iterable[Truth]) -> float:
        """What a run's card drew for it: of two that share it each has half."""
        beside, total = [other for other in others if run.beside_s(other)], 0.0
        for at_s, card, drawn_wh in self.drawn:
            if card == run.card and run.joined_s < at_s <= run.ended_s:
                total += drawn_wh / (1 + sum(other.joined_s < at_s <= other.ended_s for other in beside))
        return total

    def runs(self) -> dict[str, list[Truth]]:
        """Every run of every job that began, by key, in order."""
        found = {}
        for key, name in self.names.items():
            text = (self._home / f"{key}.out").read_text() if (self._home / f"{key}.out").exists() else ""
            runs = [
                Truth(name, how == "done", (node, int(gpu)), float(joined), float(ended), float(work))
                for how, node, gpu, joined, ended, work in _LINE.findall(text)
            ]
            if runs:
                found[key] = runs
        return found


def busy_s(runs: Sequence[Truth]) -> float:
    """Time in which cards had a job that computed."""
    total = 0.0
    for card in {run.card for run in runs}:
        until_s = 0.0
        for run in sorted((run for run in runs if run.card == card), key=lambda run: run.joined_s):
            total += max(run.ended_s - max(run.joined_s, until_s), 0.0)
            until_s = max(until_s, run.ended_s)
    return total
