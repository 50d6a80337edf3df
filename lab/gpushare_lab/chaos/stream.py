"""The jobs of a chaos run: several users', of every kind that sharing meets, each leaving marks of its own life."""

from __future__ import annotations

import pwd
import random
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from gpushare_lab.emulator.node import MEM_TOTAL_MIB
from gpushare_lab.experiment.made_up_tokens import made_up_token
from gpushare_lab.job.light_job import build_light_job
from gpushare_lab.known_profiles import KnownProfile
from gpushare_lab.testbed.configuration import TEST_USERS
from gpushare_lab.testbed.testbed import Testbed
from slurm_gpushare.helper.pair_speeds import ACTIVITY
from slurm_gpushare.protocol.errors import GpushareError
from slurm_gpushare.store.sharing import Observation

WORKLOADS = 4
"""Known ones, of each user."""
KINDS = ("shared", "shared", "probe", "shared", "plain", "array", "shared", "shared", "two cards", "fragile")
"""In turn. ``fragile`` shares and may not be requeued; ``probe`` has a token that nobody knows yet; faults may ask for
``long`` too, which shares and outlasts most."""
LONG = 2.5
"""Times as long as others."""
UNTOKENED = ("plain", "two cards")
LIMITS_MIN = (3, 4, 6)
LONG_LIMIT_MIN = 10
"""A guest's limit may not outlast its resident's while others wait for the card: with equal ones few would share."""
MEAN_S = 24.0
BUSY_PCT, LONG_BUSY_PCT = 50, 95
"""How busy jobs keep a card. A loss is only believed of a card that is busy."""
_ORDINARY = tuple(f"p{index}" for index in range(WORKLOADS))
_LONG = "long"
RATES = dict.fromkeys((*_ORDINARY, _LONG), 0.80)
"""How fast anybody runs beside a workload."""
ROUGH = dict.fromkeys(_ORDINARY, 0.30) | {_LONG: 0.70}
"""The same when workloads have begun to slow long ones far more than was ever seen: the helper pauses them."""
KNOWN_RATE = 0.85
"""What the helper is told of every pair: enough to let them share."""
_MARK = re.compile(r"(start|end) (\S+) (\d+) (\d+) ([\d.]+) (\S+) (\S+) (\d+)")


@dataclass(frozen=True, slots=True)
class Submitted:
    """A job, or one task of an array, that sbatch has accepted."""

    raw: str
    """Array tasks as ``12_0``; their SLURM_JOB_ID is known only once they start."""
    kind: str
    token: str | None
    submit_s: float
    fault: str
    """What was broken when it was submitted."""
    own: str
    """What it calls itself: after a crash Slurm may give one id to two jobs."""


@dataclass(frozen=True, slots=True)
class Mark:
    """What a job wrote when it started or ended: it knows what it got better than anybody."""

    what: str
    own: str
    job_id: int
    restart: int
    at_s: float
    node: str
    gpus: tuple[int, ...]
    shards: int


@dataclass
class Stream:
    """Submits jobs and remembers them. The same seed gives the same jobs."""

    testbed: Testbed
    seed: int
    mean_s: float = MEAN_S
    kinds: Sequence[str] = KINDS
    tokens: bool = True
    """False: the same jobs without tokens, for the control run."""
    submitted: list[Submitted] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._marks = self.testbed.layout.home / "marks"
        self._marks.mkdir(exist_ok=True)
        self._marks.chmod(0o1777)
        set_rates(self.testbed, RATES)
        self._binary = build_light_job(self.testbed.layout.lib)
        self._turn = self._tried = 0

    @property
    def profiles(self) -> list[KnownProfile]:
        """What is known at the start."""
        return [
            KnownProfile(_token(user, name), pwd.getpwnam(user).pw_uid, "V100", 2048, MEM_TOTAL_MIB, number % 3,
                         self.mean_s * (LONG if name == _LONG else 1.0),
                         _features(LONG_BUSY_PCT if name == _LONG else BUSY_PCT))
            for user in TEST_USERS for number, name in enumerate((*_ORDINARY, _LONG))
        ]  # fmt: skip

    @property
    def observations(self) -> list[Observation]:
        """What is known of pairs at the start: all get on well."""
        tokens = [_token(user, name) for user in TEST_USERS for name in (*_ORDINARY, _LONG)]
        some = tokens[:2]  # more of them teach nothing new, and take time to learn at every start of the helper
        pairs = {*product(tokens, some), *product(some, tokens)}
        return [
            Observation(f"chaos:{number}", "V100", victim, neighbour, KNOWN_RATE, 16.0, int(time.time()))
            for number, (victim, neighbour) in enumerate(sorted(pairs))
        ]

    def submit(self, fault: str) -> bool:
        """One more job; False if sbatch was refused."""
        kind, user = self.kinds[self._turn % len(self.kinds)], list(TEST_USERS)[self._turn % len(TEST_USERS)]
        profile, work_s = f"p{self._random.randrange(WORKLOADS)}", self._random.uniform(0.7, 1.3) * self.mean_s
        limit_min, token = self._random.choice(LIMITS_MIN), _token(user, profile)
        if kind == _LONG:
            profile, work_s, token, limit_min = _LONG, LONG * self.mean_s, _token(user, _LONG), LONG_LIMIT_MIN
        if kind == "probe":
            token = made_up_token(f"{user} new {self._turn}")
        if kind in UNTOKENED or not self.tokens:
            token = ""
        options = ["--mem=100", "--output=/dev/null", f"--time={limit_min}"]
        options += ["--gres=gpu:2"] if kind == "two cards" else ["--gres=gpu:1"]
        options += ["--array=0-4:2"] if kind == "array" else []
        options += ["--no-requeue"] if kind == "fragile" else ["--requeue"]
        options += [f"--comment=gpushare:{token}"] if token else []
        submit_s, self._tried = time.time(), self._tried + 1
        script = self._script(str(self._tried), kind, profile, work_s)
        try:
            answer = self.testbed.run(["sbatch", "--parsable", *options], user=user, input=script)
        except GpushareError:
            return False
        self._turn += 1
        job = answer.stdout.strip().split(";")[0]
        tasks = ["_0", "_2", "_4"] if kind == "array" else [""]
        self.submitted += [
            Submitted(job + task, kind, token or None, submit_s, fault, f"{self._tried}{task}") for task in tasks
        ]
        return True

    def _script(self, own: str, kind: str, profile: str, work_s: float) -> str:
        busy_pct, rates = LONG_BUSY_PCT if kind == _LONG else BUSY_PCT, _rates_file(self.testbed)
        command = f"{self._binary} {work_s:.2f} 3 {busy_pct} 20 2048 {profile} {rates}"
        if kind == "two cards":
            command = f"sleep {work_s:.2f}"
        return f"""#!/bin/sh
own={own}${{SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}}
mark() {{
  echo "$1 $own $SLURM_JOB_ID ${{SLURM_RESTART_COUNT:-0}} $(date +%s.%N) $SLURMD_NODENAME \\
${{CUDA_VISIBLE_DEVICES:-none}} ${{SLURM_SHARDS_ON_NODE:-0}}" >>{self._marks}/$own
}}
mark start
{command} || exit
mark end
"""

    def marks(self) -> list[Mark]:
        """What all jobs wrote, in order of time."""
        found = []
        for path in self._marks.iterdir():
            for line in _text(path).splitlines():
                if match := _MARK.fullmatch(line):
                    what, own, job, restart, at, node, gpus, shards = match.groups()
                    cards = tuple(int(gpu) for gpu in gpus.split(",") if gpu.isdecimal())
                    found.append(Mark(what, own, int(job), int(restart), float(at), node, cards, int(shards)))
        return sorted(found, key=lambda mark: mark.at_s)


def _features(busy_pct: int) -> dict[str, float]:
    return {"mgup": float(busy_pct), "mgmap": 12.5, "mgtsamp": 20.0, f"{ACTIVITY}_mean": 0.93 * busy_pct}


def set_rates(testbed: Testbed, rates: Mapping[str, float]) -> None:
    """How fast all jobs run beside each other from now on."""
    path = _rates_file(testbed)
    new = path.with_suffix(".new")
    new.write_text("".join(f"{name} {rate}\n" for name, rate in rates.items()))
    new.replace(path)


def _rates_file(testbed: Testbed) -> Path:
    return testbed.layout.home / "rates"


def _token(user: str, profile: str) -> str:
    return made_up_token(f"chaos {user} {profile}")


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
