"""The paper's experiment on a testbed: the same 24 jobs on 4 GPUs under one policy after another."""

from __future__ import annotations

import math
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

from slurm_gpushare.config import load_config
from slurm_gpushare.errors import GpushareError
from slurm_gpushare.slurm import runner
from slurm_gpushare.slurm.commands import CommandSlurm
from slurm_gpushare.slurm.queue import Job
from slurm_gpushare.store import Store
from slurm_gpushare.store.hookfile import HookFile
from slurm_gpushare.store.known import KnownProfile, enter_profiles
from slurm_gpushare.store.sharing import Observation
from slurm_gpushare.testbed.cluster import Testbed
from slurm_gpushare.testbed.daemons import last_lines
from slurm_gpushare.testbed.emulator.card import Demand
from slurm_gpushare.testbed.jobs import submit
from slurm_gpushare.testbed.pairs import read_pairs
from slurm_gpushare.testbed.processes import wait_until
from slurm_gpushare.testbed.reset import reset
from slurm_gpushare.testbed.workload import rate_function

EXCLUSIVE = "exclusive"
POLICIES = (EXCLUSIVE, "fcfs", "random", "paper", "gpushare")
SHORT = (EXCLUSIVE, "fcfs", "gpushare")
CARD_MIB = 16384
_WORKLOAD = f"exec {shlex.quote(sys.executable)} -m slurm_gpushare.testbed.workload"
_DONE = re.compile(r"^done .*?\btime_s=(?P<time_s>[\d.]+)", re.MULTILINE)
_LETTERS = "abcdefghijklmnopqrstuvwxyz234567"


@dataclass(frozen=True, slots=True)
class Training:
    """One job of the experiment."""

    number: int
    cluster: int
    demand: Demand
    work_s: float
    pairs: Path | None

    @property
    def limit_min(self) -> int:
        """Time limit. Slurm counts minutes, so a second of work stands for a minute: four times what it takes."""
        return math.ceil(4.0 * self.work_s)

    @property
    def token(self) -> str:
        return "gs-" + "".join(_LETTERS[(self.number * 7 + place * 5 + self.number // 4) % 32] for place in range(20))

    def script(self) -> str:
        demand = self.demand
        options = [f"--work-s {self.work_s:g}", "--epochs 4", f"--seed {self.number}"]
        options += [f"--gpu-util {demand.gpu_util_pct:.1f}", f"--mem-access {demand.mem_access_pct:.1f}"]
        options += [f"--mem-mib {demand.mem_mib}"]
        if self.pairs is not None:
            options += [f"--profile {shlex.quote(demand.profile)}", f"--pairs {shlex.quote(str(self.pairs))}"]
        return f"{_WORKLOAD} {' '.join(options)}\n"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One job's fate under a policy. Times are seconds since the first submission."""

    training: Training
    node: str
    submit_s: float
    start_s: float
    end_s: float
    took_s: float
    """By the job's own clock: Slurm counts whole seconds."""

    @property
    def isd_pct(self) -> float:
        return 100.0 * (self.took_s / self.training.work_s - 1.0)


@dataclass(frozen=True, slots=True)
class Result:
    """A policy's run."""

    policy: str
    jobs: tuple[Outcome, ...]

    @property
    def makespan_s(self) -> float:
        return max(job.end_s for job in self.jobs)

    @property
    def mean_jct_s(self) -> float:
        return sum(job.end_s - job.submit_s for job in self.jobs) / len(self.jobs)

    @property
    def isd_pct(self) -> float:
        return sum(job.isd_pct for job in self.jobs) / len(self.jobs)

    @property
    def worst_isd_pct(self) -> float:
        return max(job.isd_pct for job in self.jobs)

    @property
    def ps_pct(self) -> float:
        """GPU time saved against running each job alone."""
        alone_s = sum(job.training.work_s for job in self.jobs)
        return 100.0 * (1.0 - self.busy_s / alone_s)

    @property
    def start_s(self) -> float:
        """From one job's end to the moment at which the next on that card computes: mean of what Slurm needs."""
        gaps = [0.0]
        for node in {job.node for job in self.jobs}:
            row = sorted((job for job in self.jobs if job.node == node), key=lambda job: job.end_s)
            gaps += [b.end_s - b.took_s - a.end_s for a, b in pairwise(row)]
        return max(0.0, sum(gaps) / max(1, len(gaps) - 1))

    @property
    def busy_s(self) -> float:
        """Time in which cards had a job. Slurm's whole seconds are mended by the jobs' own clocks."""
        busy = 0.0
        for node in {job.node for job in self.jobs}:
            spans = sorted((job.end_s - job.took_s, job.end_s) for job in self.jobs if job.node == node)
            reached = float("-inf")
            for start, end in spans:
                busy += max(0.0, end - max(start, reached))
                reached = max(reached, end)
        return busy

    @property
    def shared(self) -> int:
        """Jobs that had company for at least a second."""
        return sum(
            any(
                other is not job
                and other.node == job.node
                and min(other.end_s, job.end_s) - max(other.start_s, job.start_s) > 1.0
                for other in self.jobs
            )
            for job in self.jobs
        )


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is."""

    policy: str
    done: int
    running: int
    pairs: int
    total: int
    elapsed_s: float


Tell = Callable[[Progress], None]


def work_seconds(count: int, mean_s: float, seed: int) -> list[float]:
    """Durations that spread as those of training jobs do: most are short, a few long ones hold most of the time."""
    chance = random.Random(seed)
    raw = [min(max(chance.lognormvariate(0.0, 1.0), 0.25), 4.0) for _ in range(count)]
    scale = mean_s * count / sum(raw)
    return [round(value * scale, 1) for value in raw]


def history(jobs: Sequence[Training], part: float = 1 / 3, seed: int = 0) -> list[Observation]:
    """What was seen of these workloads before: a part of the pairs among them, each once, measured within 5 %."""
    chance = random.Random(seed)
    table = read_pairs(jobs[0].pairs, "V100") if jobs[0].pairs is not None else None
    seen = []
    for job in jobs:
        rate_of = rate_function(job.demand, table)
        for other in jobs:
            together = job.demand.mem_mib + other.demand.mem_mib < CARD_MIB
            if other is not job and together and chance.random() < part:
                rate = min(1.0, rate_of([other.demand]) * chance.gauss(1.0, 0.05))
                source = f"activity:{job.number}:{other.number}:0"
                seen.append(Observation(source, "V100", job.token, other.token, max(0.02, rate), 1.0, 0))
    return seen


class Experiment:
    """The jobs, and a testbed to run them on."""

    def __init__(self, testbed: Testbed, jobs: Sequence[Training], tell: Tell) -> None:
        self.testbed = testbed
        self.jobs = tuple(jobs)
        self._tell = tell
        self.slurm = CommandSlurm(partial(runner.run, environ=os.environ | testbed.env))

    def run(self, policy: str) -> Result:
        """All jobs under one policy, from an idle cluster that knows every workload to the last job's end."""
        reset(self.testbed)
        self._know()
        with self._helper(policy):
            begun_s = time.time()
            ids = {self._submit(job, policy): job for job in self.jobs}
            self._wait(policy, ids, begun_s)
        return Result(policy, tuple(self._outcomes(ids, policy)))

    def _know(self) -> None:
        config = load_config(self.testbed.layout.etc / "gpushare.conf")
        with Store.create(config.store_url) as store:
            enter_profiles(
                store,
                [
                    KnownProfile(
                        job.token, os.getuid(), "V100", job.demand.mem_mib, CARD_MIB, job.cluster, job.work_s,
                        {"mgup": job.demand.gpu_util_pct, "mgmap": 100 * job.demand.mem_mib / CARD_MIB,
                         "mgtsamp": job.demand.mem_access_pct},
                    )
                    for job in self.jobs
                ],
            )  # fmt: skip
            store.observations.add(history(self.jobs))
            HookFile(config.hook_file).sync(store, 0)

    @contextmanager
    def _helper(self, policy: str) -> Iterator[None]:
        if policy == EXCLUSIVE:
            yield
            return
        config = load_config(self.testbed.layout.etc / "gpushare.conf")
        log = self.testbed.layout.log / f"backfill-{policy}.log"
        command = [sys.executable, "-m", "slurm_gpushare", "backfill", f"--policy={policy}"]
        with log.open("ab") as file:
            process = subprocess.Popen(command, env=os.environ | self.testbed.env, stdout=file, stderr=file)
        try:
            hook = HookFile(config.hook_file)
            if not wait_until(lambda: bool(hook.heartbeat_s()) or process.poll() is not None, 180) or process.poll():
                raise GpushareError(f"the helper does not start: {last_lines(log)}")
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)

    def _submit(self, job: Training, policy: str) -> int:
        options = ["--gres=gpu:1", "--mem=100", f"--output={self._output(job, policy)}"]
        options += [f"--time={job.limit_min}"]
        if policy != EXCLUSIVE:
            options.append(f"--comment=gpushare:{job.token}")
        return submit(self.testbed, job.script(), *options)

    def _output(self, job: Training, policy: str) -> Path:
        return self.testbed.layout.home / f"{policy}-{job.number}.out"

    def _wait(self, policy: str, ids: dict[int, Training], begun_s: float) -> None:
        limit_s = 60.0 + 3.0 * sum(job.work_s for job in self.jobs)
        while time.time() - begun_s < limit_s:
            queue = [job for job in self.slurm.jobs() if job.raw_id in ids]
            running = [job for job in queue if job.running]
            self._tell(
                Progress(policy, len(ids) - len(queue), len(running), _pairs(running), len(ids), time.time() - begun_s)
            )
            if not queue:
                return
            time.sleep(0.5)
        raise GpushareError(f"{policy}: jobs that do not end: {', '.join(str(job.key) for job in queue)}")

    def _outcomes(self, ids: dict[int, Training], policy: str) -> Iterator[Outcome]:
        ended = {job.raw_id: job for job in self.slurm.jobs([str(job_id) for job_id in ids])}
        first_s = min(job.submit_s for job in ended.values())
        for job_id, training in ids.items():
            job = ended[job_id]
            if job.state != "COMPLETED":
                raise GpushareError(f"job {job_id} ended as {job.state}")
            start_s, end_s = (job.start_s or 0) - first_s, (job.end_s or 0) - first_s
            took_s = self._took_s(training, job, policy)
            yield Outcome(training, job.nodes[0], job.submit_s - first_s, start_s, end_s, took_s)

    def _took_s(self, training: Training, job: Job, policy: str) -> float:
        found = _DONE.search(self._output(training, policy).read_text())
        return float(found["time_s"]) if found else float((job.end_s or 0) - (job.start_s or 0))


def _pairs(running: Sequence[Job]) -> int:
    nodes = [node for job in running for node in job.nodes]
    return len(nodes) - len(set(nodes))
