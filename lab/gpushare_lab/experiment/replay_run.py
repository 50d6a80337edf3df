"""A replay on a testbed: one policy's jobs, each submitted at its time, from an idle cluster to the last job's end."""

from __future__ import annotations

import heapq
import os
import re
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from gpushare_lab.emulator.card import EmulatedCard
from gpushare_lab.emulator.node import MEM_TOTAL_MIB, card_path
from gpushare_lab.experiment.helper_process import HelperProcess
from gpushare_lab.experiment.replay_jobs import ReplayJobs, rate_files, seat_name
from gpushare_lab.experiment.replay_outcome import JobStay, PolicyRun
from gpushare_lab.experiment.submitting import submit
from gpushare_lab.job.light_job import build_light_job
from gpushare_lab.known_profiles import KnownProfile, enter_profiles
from gpushare_lab.testbed.reset import idle_nodes, reset
from gpushare_lab.testbed.testbed import Testbed
from slurm_gpushare.protocol.errors import GpushareError
from slurm_gpushare.protocol.settings import load_config
from slurm_gpushare.slurm import runner
from slurm_gpushare.slurm.commands import Slurm
from slurm_gpushare.slurm.nodes import GANGS_NEED
from slurm_gpushare.store import Store
from slurm_gpushare.store.hookfile import HookFile
from slurm_gpushare.store.refine import GPUS
from slurm_gpushare.store.sharing import Observation

POLICIES = ("exclusive", "packed", "fcfs", "random", "paper", "gpushare")
KNOWLEDGE = ("cold", "telemetry", "learned", "oracle")
MEASURED = ("learned", "oracle")
"""Kinds of knowledge with samplers beside the jobs: without them neither rates nor durations are learned."""
POLL_S = 1.0
EPOCHS = 4
SURE = 400.0
"""The weight of an observation that is as good as the truth: what `--knowledge oracle` enters."""
FIRST = -100_000
"""Far before any other job, and behind what the helper has sent to a card."""
MOST_ATTEMPTS = 30
LONGEST_PAUSE_S = 30.0
SETTINGS = {"SampleSeconds": "0.5", "InterimSeconds": "5", "ExtendTimeLimit": "yes", "RawShards": "allow"}
"""In gpushare.conf: what dozens of samplers on one machine can do, and raw shards for the policy that uses them."""
HELPER_COUNTERS = ("cards_won", "cards_lost", "holds", "hold_ms", "ticks", "tick_ms")
_DONE = re.compile(
    r"^done node=(?P<node>\S+) gpu=(?P<gpus>[\d,]+) joined_s=(?P<joined>[\d.]+) ended_s=(?P<ended>[\d.]+)", re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class ReplayProgress:
    """How far a run is."""

    policy: str
    submitted: int
    done: int
    total: int
    cards: str
    """How many jobs each card has, a digit a card, nodes separated by a blank."""
    elapsed_s: float


Tell = Callable[[ReplayProgress], None]


@dataclass(slots=True)
class _Attempt:
    """A job that Slurm has, or will get again."""

    job: int
    first_submit_s: float
    number: int = 1


@dataclass
class Replay:
    """The jobs, and a testbed to run them on, one policy after the other."""

    testbed: Testbed
    jobs: ReplayJobs
    knowledge: str
    tell: Tell
    measured: list[PolicyRun] = field(default_factory=list)
    """What was run so far; the last one may have been interrupted."""
    alone: frozenset[int] = frozenset()
    """Jobs that share with nobody, and rank before all others."""

    def run(self, policy: str) -> PolicyRun:
        """All jobs under one policy. Whatever ends it early, what was measured until then is kept."""
        run = _PolicyReplay(self.testbed, self.jobs, policy, self.knowledge, self.tell, self.alone)
        try:
            with run.prepared():
                run.until_all_ended()
        finally:
            self.measured.append(run.result())
        return self.measured[-1]


class _PolicyReplay:
    """One policy's run while it goes on."""

    def __init__(
        self, testbed: Testbed, jobs: ReplayJobs, policy: str, knowledge: str, tell: Tell, alone: frozenset[int]
    ) -> None:
        self._alone = alone
        self._testbed, self._jobs, self._policy, self._knowledge, self._tell = testbed, jobs, policy, knowledge, tell
        self._slurm = Slurm(partial(runner.run, environ=os.environ | testbed.env))
        self._helped = policy not in ("exclusive", "packed")
        self._begun_s = time.time()
        self._active: dict[int, _Attempt] = {}  # by Slurm's job id
        self._stays: list[JobStay] = []
        self._submitted = 0
        self._counters: dict[str, int] = {}
        submit_s = jobs.work.submit_s.tolist()
        self._due = [(submit_s[job], job, _Attempt(job, submit_s[job])) for job in range(jobs.work.jobs)]
        heapq.heapify(self._due)

    # -- before ---------------------------------------------------------------------------------
    @contextmanager
    def prepared(self) -> Iterator[None]:
        """A testbed as new that knows the profiles, and the helper if the policy has one."""
        reset(self._testbed)
        slurm = {"OverTimeLimit": "UNLIMITED"}  # limits inform the plan; no policy loses a job to them
        if self._knowledge not in MEASURED:
            slurm["Prolog"] = ""
        settings = SETTINGS
        if self._jobs.gangs.any():
            slurm["SelectTypeParameters"] = f"CR_CPU_Memory,{','.join(GANGS_NEED)}"
            settings = SETTINGS | {"ShareGangs": "yes"}
        self._testbed.configure(slurm, settings)
        idle_nodes(self._testbed)  # before that 22.05 refuses requests for typed shards
        self._job_binary = build_light_job(self._testbed.layout.lib)
        self._rates = rate_files(self._jobs, self._testbed.layout.home / "rates")
        if not self._helped:
            yield
            return
        self._know()
        try:
            with HelperProcess(self._testbed, self._policy):
                yield
        finally:
            self._counters = self._helper_counters()

    def _know(self) -> None:
        config = load_config(self._testbed.layout.gpushare_conf)
        with Store.create(config.store_url) as store:
            for gpus, tokens in self._jobs.tokens_by_width.items():
                enter_profiles(store, [self._known(index, token, gpus) for index, token in enumerate(tokens)])
                for a, b in self._jobs.contradictions():
                    store.sharing.ban(tokens[a], tokens[b])
                if self._knowledge == "oracle":
                    store.observations.add(list(self._truth(tokens)))
            HookFile(config.hook_file, gangs=config.share_gangs).sync(store, 0)

    def _helper_counters(self) -> dict[str, int]:
        """What the helper itself counted, which it writes down when it stops."""
        config = load_config(self._testbed.layout.gpushare_conf)
        with Store(config.store_url) as store:
            counted = store.counters.all()
        return {name: counted.get(name, 0) for name in HELPER_COUNTERS}

    def _known(self, index: int, token: str, gpus: int) -> KnownProfile:
        demand = self._jobs.demands[index]
        features = {
            "mgup": demand.gpu_util_pct,
            "mgmap": 100 * demand.mem_mib / MEM_TOTAL_MIB,
            "mgtsamp": demand.mem_access_pct,
        }
        if self._knowledge == "cold":
            features = {}
        if gpus > 1:
            features[GPUS] = gpus
        return KnownProfile(
            token, os.getuid(), "V100", demand.mem_mib, MEM_TOTAL_MIB, self._jobs.clusters[index],
            None, features,
        )  # fmt: skip

    def _truth(self, tokens: Sequence[str]) -> Iterator[Observation]:
        rate = self._jobs.work.pairs.rate
        for a, b in zip(*np.nonzero(np.isfinite(rate)), strict=True):
            yield Observation(
                f"measured:{tokens[a]}:{tokens[b]}", "V100", tokens[a], tokens[b], float(rate[a, b]), SURE, 0
            )

    # -- the run --------------------------------------------------------------------------------
    def until_all_ended(self) -> None:
        """Submit what is due, look what has ended, and tell."""
        self._begun_s = time.time() + POLL_S
        next_look_s = 0.0
        while self._due or self._active:
            while self._due and self._due[0][0] <= self._now_s():
                self._submit(heapq.heappop(self._due)[2])
            if self._now_s() >= next_look_s:
                next_look_s = self._now_s() + POLL_S
                self._collect()
                self._tell_progress()
            until_s = min(next_look_s, self._due[0][0] if self._due else next_look_s)
            time.sleep(max(0.01, until_s - self._now_s()))
        self._tell_progress()

    def _now_s(self) -> float:
        return time.time() - self._begun_s

    def _submit(self, attempt: _Attempt) -> None:
        index = int(self._jobs.work.profile[attempt.job])
        options = ["--mem=100", f"--time={self._jobs.limit_min[attempt.job]}", f"--output={self._output(attempt)}"]
        gpus = int(self._jobs.work.num_gpus[attempt.job])
        options += ["-N1", "--gres=shard:1" if self._policy == "packed" and gpus == 1 else f"--gres=gpu:{gpus}"]
        if attempt.job in self._alone:
            options.append(f"--nice={FIRST}")
        elif self._helped:
            options.append(f"--comment=gpushare:{self._jobs.token(attempt.job)}")
        if attempt.number == 1:
            attempt.first_submit_s = self._now_s()
            self._submitted += 1
        self._active[submit(self._testbed, self._script(attempt.job, index), *options)] = attempt

    def _script(self, job: int, index: int) -> str:
        demand = self._jobs.demands[index]
        words = [
            str(self._job_binary), f"{self._jobs.work.duration_s[job]:.3f}", str(EPOCHS), f"{demand.gpu_util_pct:.2f}",
            f"{demand.mem_access_pct:.2f}", str(demand.mem_mib), seat_name(index),
            str(self._rates[self._jobs.work.pairs.profiles[index]]),
        ]  # fmt: skip
        return f"exec {shlex.join(words)}\n"

    def _output(self, attempt: _Attempt) -> Path:
        return self._testbed.layout.home / f"{attempt.job}.{attempt.number}.out"

    def _collect(self) -> None:
        """Take the outcome of every job that left the queue; who died is submitted again, as its owner would."""
        queue = {job.raw_id for job in self._slurm.jobs()}
        gone = [job_id for job_id in self._active if job_id not in queue]
        if not gone:
            return
        ended = {job.raw_id: job for job in self._slurm.jobs([str(job_id) for job_id in gone])}
        for job_id in gone:
            attempt, job = self._active.pop(job_id), ended.get(job_id)
            found = _DONE.search(_text(self._output(attempt)))
            if found:
                placed = bool(job and job.tag and job.tag.placed)
                self._stays.append(self._stay(attempt, found, placed))
            else:
                self._again(attempt, job.state if job else "gone")

    def _stay(self, attempt: _Attempt, found: re.Match[str], placed: bool) -> JobStay:
        joined_s, ended_s = float(found["joined"]) - self._begun_s, float(found["ended"]) - self._begun_s
        return JobStay(
            attempt.job, found["node"], tuple(int(gpu) for gpu in found["gpus"].split(",")), attempt.first_submit_s,
            joined_s, ended_s, placed, attempt.number,
        )  # fmt: skip

    def _again(self, attempt: _Attempt, state: str) -> None:
        if attempt.number >= MOST_ATTEMPTS:
            said = _text(self._output(attempt)).strip()[-200:]
            raise GpushareError(f"{self._policy}: job {attempt.job} ended {attempt.number} times, as {state}: {said}")
        pause_s = min(LONGEST_PAUSE_S, 2.0 ** (attempt.number - 1))
        again = _Attempt(attempt.job, attempt.first_submit_s, attempt.number + 1)
        heapq.heappush(self._due, (self._now_s() + pause_s, again.job, again))

    # -- what is seen of it ---------------------------------------------------------------------
    def _tell_progress(self) -> None:
        total, cards = self._jobs.work.jobs, self._cards()
        self._tell(
            ReplayProgress(self._policy, self._submitted, len(self._stays), total, cards, max(0.0, self._now_s()))
        )

    def _cards(self) -> str:
        shape, now_us = self._testbed.shape, time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        nodes = []
        for node in shape.node_names:
            digits = ""
            for gpu in range(shape.gpus):
                with EmulatedCard(card_path(self._testbed.layout.emu, node, gpu)) as card:
                    count = len(card.occupants(now_us))
                digits += str(count) if count else "."
            nodes.append(digits)
        return " ".join(nodes)

    def result(self) -> PolicyRun:
        stays = tuple(sorted(self._stays, key=lambda stay: stay.job))
        complete = len(stays) == self._jobs.work.jobs
        return PolicyRun(self._policy, stays, complete, max(0.0, self._now_s()), self._counters)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
