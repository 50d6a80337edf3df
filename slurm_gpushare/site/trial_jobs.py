"""Short, real jobs that say which GPUs they see: one for each way of asking for them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from slurm_gpushare.protocol.errors import BadInput
from slurm_gpushare.protocol.settings import load_config
from slurm_gpushare.site.current_setup import collect, gpu_count
from slurm_gpushare.site.finding import Finding, failed, passed, warned
from slurm_gpushare.site.request_forms import Form, GpusSeen, forms
from slurm_gpushare.slurm.interface import connect

NAME = "gpushare-trial"
# A number for each script or task, whatever the GPUs are called: indices, UUIDs, or Slurm's word for none. Then what
# tells its GPUs from another's: where cgroups hide devices each may be called 0, but only its own can be opened.
_COUNT = 'n=$(echo "$CUDA_VISIBLE_DEVICES" | tr , "\\n" | grep -c "[0-9]")'
_OPEN = 'd=-; for f in /dev/nvidia[0-9]*; do (: <"$f") 2>/dev/null && d="$d${f#/dev/nvidia}-"; done'
_PROBE = f'{_COUNT}; {_OPEN}; echo "@KIND@=$n ${{SLURMD_NODENAME:--}} $d ${{CUDA_VISIBLE_DEVICES:--}}"'
_LINE = re.compile(r"^(script|task)=(\d+) (\S+) (\S+) (\S+)$", re.MULTILINE)
SAME = "(same)"
_AROUND = ("SLURM_", "SBATCH_", "SALLOC_", "SRUN_")
_AT_ONCE = 4  # of the interactive ones


@dataclass(frozen=True, slots=True)
class Answer:
    """A command's exit code and words."""

    code: int
    out: str
    err: str


Run = Callable[[Sequence[str], float], Answer]
"""Runs a command as some user, within a time in seconds; code 124 where that was too short."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A request to try."""

    command: str
    options: str
    step: str | None


@dataclass(frozen=True, slots=True)
class TrialResult:
    """What the job's script and tasks saw (``2, 1 1``), ``refused``, or ``waits``; and the command's words.

    ``1 1 (same)``: tasks that see one GPU each, and it is the same one.
    """

    outcome: str
    said: str = ""


def run_here(argv: Sequence[str], timeout_s: float) -> Answer:
    """As the user who runs us, without what an outer job has set."""
    env = {name: value for name, value in os.environ.items() if name == "SLURM_CONF" or not name.startswith(_AROUND)}
    try:
        done = subprocess.run(
            list(argv),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=env,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Answer(124, "", "")
    except OSError as why:
        return Answer(127, "", f"{argv[0]}: {why.strerror}")
    return Answer(done.returncode, done.stdout, done.stderr)


class TrialJobs:
    """Runs trials: all batch jobs at once, the others a few at a time. Leaves no job and no file behind."""

    def __init__(self, run: Run, directory: Path, *, extra: Sequence[str] = (), timeout_s: float = 300.0) -> None:
        self._run = run
        self._directory = directory  # the jobs write here, so that nodes must see it
        self._common = ["--time=2", f"--job-name={NAME}", *extra]
        self._timeout_s = timeout_s

    def outcomes(self, trials: Sequence[Trial]) -> list[TrialResult]:
        """What became of each trial, in their order."""
        end = time.monotonic() + self._timeout_s
        batch = {index: self._submit(trial) for index, trial in enumerate(trials) if trial.command == "sbatch"}
        others = [index for index, trial in enumerate(trials) if trial.command != "sbatch"]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            seen = dict(zip(others, pool.map(lambda i: self._interactive(trials[i], end), others), strict=True))
        jobs = {index: job for index, job in batch.items() if isinstance(job, str)}
        self._wait(list(jobs.values()), end)
        for index, job in batch.items():
            seen[index] = self._finished(job) if isinstance(job, str) else job
        return [seen[index] for index in range(len(trials))]

    def _submit(self, trial: Trial) -> str | TrialResult:
        script = _PROBE.replace("@KIND@", "script")
        if trial.step is not None:
            script += f"; srun {trial.step} sh -c {shlex.quote(_PROBE.replace('@KIND@', 'task'))} || echo step-refused"
        output = f"{self._directory}/%A.%a.trial"
        first, *parts = [part.split() for part in trial.options.split(" : ")]
        argv = ["sbatch", "--parsable", f"--output={output}", "--error=/dev/null", *self._common, *first]
        for part in parts:
            argv += [":", *self._common, *part]
        path = self._directory / f"{time.time_ns()}.trial.sh"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        answer = self._run([*argv, str(path)], self._timeout_s)
        path.unlink()
        if answer.code:
            return TrialResult("refused", _last_line(answer.err))
        return re.split(r"[;\n]", answer.out)[0]

    def _wait(self, jobs: Sequence[str], end: float) -> None:
        """Until all are gone from the queue or the time is over; the rest is cancelled."""
        while jobs:
            queue = self._run(["squeue", "-h", "-o", "%F", "--me"], 30)
            if not queue.code:  # a question that failed says nothing of the jobs
                jobs = [job for job in jobs if job in queue.out.split()]
            if jobs and time.monotonic() > end:
                self._run(["scancel", *jobs], 30)
                return
            if jobs:
                time.sleep(0.3)

    def _finished(self, job: str) -> TrialResult:
        files = sorted(self._directory.glob(f"{job}.*.trial"))
        text = "".join(path.read_text(errors="replace") for path in files)
        for path in files:
            path.unlink()
        return TrialResult(_outcome(text)) if text else TrialResult("waits", "it did not start in time")

    def _interactive(self, trial: Trial, end: float) -> TrialResult:
        task = ["sh", "-c", _PROBE.replace("@KIND@", "task")]
        parts = [part.split() for part in trial.options.split(" : ")]
        if trial.command == "salloc":
            argv = ["salloc", "--quiet", *self._common, *parts[0]]
            for part in parts[1:]:
                argv += [":", *self._common, *part]
            argv += ["srun", *(trial.step or "").split(), *task]
        else:
            argv = ["srun", "--quiet", *self._common, *parts[0]]
            for part in parts[1:]:
                argv += [*task, ":", *part]
            argv += task
        answer = self._run(argv, max(1.0, end - time.monotonic()))
        if answer.code == 124:
            return TrialResult("waits", "it did not start in time")
        return TrialResult("refused", _last_line(answer.err)) if answer.code else TrialResult(_outcome(answer.out))


def _outcome(text: str) -> str:
    """``2, 1 1``: what the scripts saw, then what the tasks saw."""
    seen: Mapping[str, list[str]] = {"script": [], "task": []}
    taken: set[tuple[str, str, str]] = set()
    same = False
    for kind, count, node, opened, names in _LINE.findall(text):
        seen[kind].append(count)
        # Scripts may be tasks of an array, which may come one after the other; a step's tasks run beside each other.
        own = {(node, opened, name) for name in names.split(",") if kind == "task" and re.search("[0-9]", name)}
        same |= bool(own & taken)
        taken |= own
    parts = [" ".join(sorted(counts)) for counts in seen.values() if counts]
    if same:
        parts[-1] += f" {SAME}"
    if "step-refused" in text:
        parts.append("refused")
    return ", ".join(parts)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


# ``doctor --end-to-end``: real, short jobs in every form, and what a user would see of each.


def try_all(partition: str | None, account: str | None, wait_s: float, brief: bool) -> Iterator[Finding]:
    """Every form on this cluster, as the user who asks, in a directory below the current one."""
    facts, config = collect(connect()), load_config()
    partition = partition or next(iter(config.partitions), None)
    if partition is None or facts.partition(partition) is None:
        raise BadInput(f"no partition '{partition or ''}'", "Choose one with -p.")
    # The model with the most nodes: a form that wants two must find them.
    of_model = {
        model: facts.nodes_of_model((partition,), model, only=len(config.gpu_models) == 1)
        for model in config.gpu_models
    }
    model, nodes = max(of_model.items(), key=lambda item: len(item[1]))
    gpus = min((gpu_count(node) for node in nodes), default=0)
    if len(nodes) < 2 or gpus < 2:
        yield warned("end-to-end", f"{partition} has no two nodes of two GPUs", "Some forms cannot work here.")
    other = next((name for node in nodes for name in node.partitions if name != partition), None)
    release = (facts.release.year, facts.release.month)
    wanted = [form for form in forms(model, gpus, partition, other, release) if form.brief or not brief]
    extra = [f"--partition={partition}", *([f"--account={account}"] if account else [])]
    with TemporaryDirectory(prefix="gpushare-trial-", dir=".") as directory:
        jobs = TrialJobs(run_here, Path(directory).resolve(), extra=extra, timeout_s=wait_s)
        yield from findings(try_forms(wanted, jobs))


def try_forms(wanted: Sequence[Form], jobs: TrialJobs) -> list[GpusSeen]:
    """Submit them all."""
    results = jobs.outcomes([Trial(form.command, form.options, form.step) for form in wanted])
    return [GpusSeen(form, result.outcome, result.said) for form, result in zip(wanted, results, strict=True)]


def findings(seen: Sequence[GpusSeen]) -> Iterator[Finding]:
    """One line a form."""
    for one in seen:
        sees = _in_words(one.outcome) + (f" ({one.said})" if one.said and not one.as_expected else "")
        if not one.was_tried:
            yield warned(str(one.form), sees, "Try again when GPUs are idle, or with a longer --wait.")
        elif one.as_expected:
            yield passed(str(one.form), sees)
        else:
            yield failed(
                str(one.form),
                f"{sees}; without us: {_in_words(one.form.expected)}",
                "Run 'gpushare doctor' without --end-to-end: it says what is wrong with the set-up.",
            )


def _in_words(outcome: str) -> str:
    if outcome.startswith(("waits", "refused")) or not outcome:
        return outcome or "it said nothing"
    return f"sees {outcome} GPU" + ("" if outcome == "1" else "s")
