"""The paper's experiment on a testbed: 24 jobs that nobody knows, then the same ones under one policy after another."""

from __future__ import annotations

import math
import os
import random
import re
import shlex
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from gpushare_lab.emulator.card import Demand
from gpushare_lab.experiment.helper_process import HelperProcess
from gpushare_lab.experiment.made_up_tokens import made_up_token
from gpushare_lab.experiment.submitting import submit
from gpushare_lab.testbed.processes import wait_until
from gpushare_lab.testbed.reset import reset
from gpushare_lab.testbed.testbed import Testbed
from slurm_gpushare.protocol.errors import GpushareError
from slurm_gpushare.protocol.settings import load_config
from slurm_gpushare.slurm import runner
from slurm_gpushare.slurm.commands import Slurm
from slurm_gpushare.slurm.queue import Job
from slurm_gpushare.store import Store

EXCLUSIVE = "exclusive"
OURS = "gpushare"
AGAIN = "gpushare-again"
"""Our policy once more, with what the round before has taught."""
POLICIES = (EXCLUSIVE, "fcfs", "random", "paper", OURS, AGAIN)
SHORT = (EXCLUSIVE, "fcfs", OURS)
CARD_MIB = 16384
_WORKLOAD = f"exec {shlex.quote(sys.executable)} -m gpushare_lab.job.workload"
_DONE = re.compile(r"^done .*?\btime_s=(?P<time_s>[\d.]+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Training:
    """One job of the experiment."""

    number: int
    workload: int
    """Which it is a run of: its token's number."""
    cluster: int
    demand: Demand
    work_s: float
    pairs: Path | None

    @property
    def limit_min(self) -> int:
        """Time limit: four times what it takes, in Slurm's whole minutes."""
        return math.ceil(4.0 * self.work_s / 60.0)

    @property
    def token(self) -> str:
        return made_up_token(f"paper {self.workload}")

    def script(self) -> str:
        demand = self.demand
        options = [f"--work-s {self.work_s:g}", "--epochs 1", f"--seed {self.number}"]
        options += [f"--gpu-util {demand.gpu_util_pct:.1f}", f"--mem-access {demand.mem_access_pct:.1f}"]
        options += [f"--mem-mib {demand.mem_mib}"]
        if self.pairs is not None:
            options += [f"--profile {shlex.quote(demand.profile)}", f"--pairs {shlex.quote(str(self.pairs))}"]
        return f"{_WORKLOAD} {' '.join(options)}\n"


@dataclass(frozen=True, slots=True)
class PolicyOutcome:
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
class Taught:
    """What the store knows at the end of a run."""

    clusters: tuple[tuple[int, int], ...] = ()
    """How many workloads each cluster has."""
    rates: int = 0
    """Rates of one job beside another that were seen in the run."""


@dataclass(frozen=True, slots=True)
class PaperResult:
    """A policy's run."""

    policy: str
    jobs: tuple[PolicyOutcome, ...]
    taught: Taught = Taught()

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
        """GPU time saved against running each job alone: nothing where no two had a card together."""
        if not self.shared:
            return 0.0
        alone_s = sum(job.training.work_s for job in self.jobs)
        return 100.0 * (1.0 - self.busy_s / alone_s)

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


def work_seconds(count: int, mean_s: float, seed: int, spread: float = 1.0) -> list[float]:
    """Durations that spread as those of training jobs do: most are short, a few long ones hold most of the time."""
    chance = random.Random(seed)
    raw = [min(max(chance.lognormvariate(0.0, spread), 0.5**spread), 4.0**spread) for _ in range(count)]
    scale = mean_s * count / sum(raw)
    return [round(value * scale, 1) for value in raw]


class TestbedRun:
    """The jobs, and a testbed to run them on."""

    def __init__(self, testbed: Testbed, jobs: Sequence[Training], tell: Tell) -> None:
        self.testbed = testbed
        self.jobs = tuple(jobs)
        self._tell = tell
        self.slurm = Slurm(partial(runner.run, environ=os.environ | testbed.env))

    def rounds(self, policies: Sequence[str]) -> Iterator[PaperResult]:
        """The jobs as nobody knows them, then the same queue under each of `policies`, which all start from that.

        `AGAIN` starts from what the round under `OURS` has taught.
        """
        with TemporaryDirectory(prefix="gpushare-known-") as directory:
            met, taught = Path(directory) / "met", Path(directory) / "taught"
            yield self._run(EXCLUSIVE, OURS, None, met)
            for policy in policies:
                if policy == AGAIN:
                    yield self._run(policy, OURS, taught, None)
                elif policy != EXCLUSIVE:
                    yield self._run(policy, policy, met, taught if policy == OURS else None)

    def _run(self, name: str, policy: str, knows: Path | None, keep: Path | None) -> PaperResult:
        """All jobs under the helper's `policy`, starting from the store kept in `knows`; `keep` it afterwards."""
        reset(self.testbed)
        store = self._store_file()
        if knows is not None:
            _copy(knows, store)
        with HelperProcess(self.testbed, policy):
            begun_s = time.time()
            ids = {self._submit(job, name): job for job in self.jobs}
            self._wait(name, ids, begun_s)
            self._wait_for_records(ids)
        if keep is not None:
            _copy(store, keep)
        return PaperResult(name, tuple(self._outcomes(ids, name)), self._taught(begun_s))

    def _store_file(self) -> Path:
        return Path(load_config(self.testbed.layout.gpushare_conf).store_url.removeprefix("sqlite:///"))

    def _wait_for_records(self, ids: Collection[int]) -> None:
        """Until the final record of every job is in the store, and a look of the helper later."""
        with Store(f"sqlite:///{self._store_file()}", read_only=True) as store:
            wait_until(lambda: all(store.runs.of_job(job_id) for job_id in ids), 60)
        time.sleep(2.0)

    def _taught(self, begun_s: float) -> Taught:
        with Store(f"sqlite:///{self._store_file()}", read_only=True) as store:
            clusters = Counter(profile.cluster for profile in store.profiles.all() if profile.cluster is not None)
            seen = [item for item in store.observations.after(0) if item.at_s >= int(begun_s)]
        return Taught(tuple(sorted(clusters.items())), len({(item.victim, item.neighbour) for item in seen}))

    def _submit(self, job: Training, policy: str) -> int:
        options = ["--gres=gpu:1", "--mem=100", f"--output={self._output(job, policy)}"]
        options += [f"--time={job.limit_min}"]
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

    def _outcomes(self, ids: dict[int, Training], policy: str) -> Iterator[PolicyOutcome]:
        ended = {job.raw_id: job for job in self.slurm.jobs([str(job_id) for job_id in ids])}
        first_s = min(job.submit_s for job in ended.values())
        for job_id, training in ids.items():
            job = ended[job_id]
            if job.state != "COMPLETED":
                raise GpushareError(f"job {job_id} ended as {job.state}")
            start_s, end_s = (job.start_s or 0) - first_s, (job.end_s or 0) - first_s
            took_s = self._took_s(training, job, policy)
            yield PolicyOutcome(training, job.nodes[0], job.submit_s - first_s, start_s, end_s, took_s)

    def _took_s(self, training: Training, job: Job, policy: str) -> float:
        found = _DONE.search(self._output(training, policy).read_text())
        return float(found["time_s"]) if found else float((job.end_s or 0) - (job.start_s or 0))


def _copy(source: Path, target: Path) -> None:
    """Copy a store as it is, what is still in its journal included, for whom the directory belongs to."""
    with closing(sqlite3.connect(source)) as old, closing(sqlite3.connect(target)) as new:
        old.backup(new)
    owner = target.parent.stat()
    for path in target.parent.glob(f"{target.name}*"):
        os.chown(path, owner.st_uid, owner.st_gid)


def _pairs(running: Sequence[Job]) -> int:
    nodes = [node for job in running for node in job.nodes]
    return len(nodes) - len(set(nodes))
