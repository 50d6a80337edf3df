"""The ways in which people ask for GPUs, and real, short jobs that say which GPUs they get.

Nobody who does not share may notice us: each form must give the same with us as without. The expectations were seen on
Slurm without us, and `tests/real/test_request_forms.py` sees them again.
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from slurm_gpushare.protocol.errors import BadInput
from slurm_gpushare.protocol.settings import load_config
from slurm_gpushare.site.current_setup import collect, gpu_count
from slurm_gpushare.site.finding import Finding, failed, passed, warned
from slurm_gpushare.site.script_checks import TRIAL_NAME, Run, last_line, run_here, tag_of_a_job
from slurm_gpushare.slurm.commands import connect

_FORMS = """\
sbatch --gres=gpu:1 -> 1 ; brief
sbatch --gres=gpu -> 1
sbatch --gres=gpu:MODEL:1 -> 1 ; brief
sbatch --gres=gpu:MODEL -> 1
sbatch --gres=gpu:MODEL:2 -> 2
sbatch -N1 --gpus=2 -> 2
sbatch --gpus=1 -> 1
sbatch --gpus=MODEL:1 -> 1 ; brief
sbatch --gpus-per-node=2 -> 2
sbatch --gpus-per-node=MODEL:1 -> 1
sbatch --gpus-per-socket=1 --sockets-per-node=1 -> 1
sbatch --gpus-per-socket=MODEL:1 --sockets-per-node=1 -> 1
sbatch --gres=gpu:MODEL:1 --cpus-per-gpu=2 --mem-per-gpu=100 -> 1
sbatch --exclusive --gres=gpu:MODEL:1 -> ALL ; brief
sbatch --array=0-1 --gres=gpu:MODEL:1 -> 1 1 ; brief
sbatch --gres=gpu:MODEL:1 : --gres=gpu:MODEL:1 -> 1 ; brief
sbatch --gres=gpu:nosuchmodel:1 -> refused ; brief
sbatch --gres=gpu:MODEL:999 -> refused
sbatch -> 0
sbatch --gres=gpu:MODEL:1 + srun -> 1, 1
sbatch --gres=gpu:MODEL:1 + srun --gres=gpu:1 -> 1, 1
sbatch --gres=gpu:MODEL:1 + srun --gres=gpu:MODEL:1 -> 1, 1
sbatch --gres=gpu:MODEL:1 + srun --gpus=MODEL:1 -> 1, 1 ; brief
sbatch --gres=gpu:MODEL:1 + srun --gpus=1 -> 1, 1
sbatch --gpus=MODEL:1 + srun -> 1, 1 ; brief
sbatch -N1 --gpus=2 + srun -n1 --gpus=MODEL:1 -> 2, 1 ; 23.11
sbatch --gres=gpu:MODEL:2 + srun --gres=gpu:MODEL:1 -> 2, 1
sbatch -n1 --gpus-per-task=MODEL:1 + srun -> 1, 1 ; brief
sbatch -n1 --gpus-per-task=1 + srun -> 1, 1
sbatch -N1 -n2 --gpus-per-task=MODEL:1 + srun -> 2, 1 1 ; 23.11
sbatch -N1 -n2 --gpus-per-task=1 + srun -> 2, 1 1 ; 23.11
sbatch -N1 -n2 --tres-per-task=gres/gpu:MODEL:1 + srun -> 2, 1 1 ; 23.11
sbatch -N1 --ntasks-per-gpu=1 --gpus=MODEL:2 + srun -> 2, 1 1
sbatch -N2 --ntasks-per-node=1 --gres=gpu:MODEL:1 + srun -> 1, 1 1
sbatch --gres=gpu:MODEL:1 + srun --gres=none -> 1, 0
sbatch --gres=gpu:MODEL:1 + srun --gres=gpu:MODEL:2 -> 1, refused
srun --gres=gpu:1 -> 1
srun --gres=gpu:MODEL:1 -> 1
srun --gpus=1 -> 1
srun --gpus=MODEL:1 -> 1 ; brief
srun --gpus-per-node=MODEL:1 -> 1
srun --gpus-per-socket=1 --sockets-per-node=1 -> 1
srun --gpus-per-socket=MODEL:1 --sockets-per-node=1 -> 1
srun -n1 --gpus-per-task=1 -> 1
srun -n1 --gpus-per-task=MODEL:1 -> 1
srun -N1 -n2 --gpus-per-task=MODEL:1 -> 1 1 ; 23.11 brief
srun -N1 -n2 --gpus-per-task=1 -> 1 1 ; 23.11
srun -N2 -n2 --gres=gpu:MODEL:2 -> 2 2
srun --exclusive --gres=gpu:MODEL:1 -> 1
srun --gres=gpu:MODEL:1 : --gres=gpu:MODEL:1 -> 1 1
srun --gres=gpu:nosuchmodel:1 -> refused
salloc --gres=gpu:1 + srun -> 1
salloc --gres=gpu:MODEL:1 + srun -> 1
salloc --gpus=1 + srun -> 1
salloc --gpus=MODEL:1 + srun -> 1
salloc --gpus-per-node=MODEL:1 + srun -> 1
salloc --gpus-per-socket=1 --sockets-per-node=1 + srun -> 1
salloc --gpus-per-socket=MODEL:1 --sockets-per-node=1 + srun -> 1
salloc -n1 --gpus-per-task=1 + srun -> 1
salloc -n1 --gpus-per-task=MODEL:1 + srun -> 1
salloc -N1 -n2 --gpus-per-task=MODEL:1 + srun -> 1 1 ; 23.11
salloc --gres=gpu:MODEL:2 + srun --gres=gpu:MODEL:1 -> 1 ; brief
salloc -N1 --gpus=MODEL:2 + srun --gpus=MODEL:1 -> 1
salloc --exclusive --gres=gpu:MODEL:1 + srun -> 1
salloc --gres=gpu:MODEL:1 : --gres=gpu:MODEL:1 + srun --het-group=0,1 -> 1 1
salloc --gres=gpu:nosuchmodel:1 + srun -> refused
sbatch -p OTHER --gres=gpu:MODEL:1 + srun --gpus=MODEL:1 -> 1, 1 ; brief
sbatch -p PART,OTHER --gpus=MODEL:1 -> 1 ; brief
srun -p OTHER --gpus=MODEL:1 -> 1
"""
"""A form a line: the command, ``+ srun`` with the options of a step inside, and what its script and tasks see; then the
first release that gives that, and whether it is one of the few that stand for all where time is short. 22.05 itself
refuses ``-n1 --gpus=MODEL:1`` in a job of two GPUs, and shows tasks of the others no GPU."""


@dataclass(frozen=True, slots=True)
class Form:
    """One request: a command with its options, and options of a step inside it, if there is one."""

    command: str  # sbatch, srun, salloc
    options: str
    expected: str
    """GPUs that each script or task sees (``2``; ``2, 1 1`` for a script and its two tasks), or ``refused``.

    The tasks of ``1 1`` see one each of their own; on the same one they would be ``1 1 (same)``.
    """
    step: str | None = None
    """Options of the srun inside; None: there is none."""
    brief: bool = False

    def __str__(self) -> str:
        inside = "" if self.step is None else f" + {f'srun {self.step}'.strip()}"
        return f"{self.command} {self.options}".strip() + inside


def forms(model: str, gpus: int, partition: str, other: str | None, release: tuple[int, int]) -> list[Form]:
    """All forms for nodes of `gpus` (two or more) of `model`; `other` is a second partition of the same nodes."""
    found = []
    for line in _FORMS.splitlines():
        if (release < (23, 11) and "23.11" in line) or (other is None and "OTHER" in line):
            continue
        for word, value in {"MODEL": model, "ALL": str(gpus), "PART": partition, "OTHER": other or ""}.items():
            line = line.replace(word, value)
        request, _, told = line.partition(" -> ")
        words, _, step = request.partition(" + srun")
        command, _, options = words.strip().partition(" ")
        expected, _, flags = told.partition(" ; ")
        inside = step.strip() if " + srun" in request else None
        found.append(Form(command, options, expected, inside, "brief" in flags))
    return found


@dataclass(frozen=True, slots=True)
class GpusSeen:
    """What became of a form."""

    form: Form
    outcome: str
    """What the job's script and tasks saw, ``refused``, or ``waits`` where there was no room within the time."""
    said: str = ""
    """The command's own words where it was refused."""

    @property
    def as_expected(self) -> bool:
        return self.outcome == self.form.expected


# A number for each script or task, whatever the GPUs are called: indices, UUIDs, or Slurm's word for none. Then what
# tells its GPUs from another's: where cgroups hide devices each may be called 0, but only its own can be opened.
_COUNT = 'n=$(echo "$CUDA_VISIBLE_DEVICES" | tr , "\\n" | grep -c "[0-9]")'
_OPEN = 'd=-; for f in /dev/nvidia[0-9]*; do (: <"$f") 2>/dev/null && d="$d${f#/dev/nvidia}-"; done'
_PROBE = f'{_COUNT}; {_OPEN}; echo "@KIND@=$n ${{SLURMD_NODENAME:--}} $d ${{CUDA_VISIBLE_DEVICES:--}}"'
_LINE = re.compile(r"^(script|task)=(\d+) (\S+) (\S+) (\S+)$", re.MULTILINE)
SAME = "(same)"
_AT_ONCE = 4  # of the interactive ones


class TrialJobs:
    """Runs forms: all batch jobs at once, the others a few at a time. Leaves no job and no file behind."""

    def __init__(self, run: Run, directory: Path, *, extra: Sequence[str] = (), timeout_s: float = 300.0) -> None:
        self._run = run
        self._directory = directory  # the jobs write here, so that nodes must see it
        self._common = ["--time=2", f"--job-name={TRIAL_NAME}", *extra]
        self._timeout_s = timeout_s

    def try_forms(self, wanted: Sequence[Form]) -> list[GpusSeen]:
        """What became of each, in their order."""
        end = time.monotonic() + self._timeout_s
        batch = {form: self._submit(form) for form in wanted if form.command == "sbatch"}
        others = [form for form in wanted if form.command != "sbatch"]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            seen = dict(zip(others, pool.map(lambda form: self._interactive(form, end), others), strict=True))
        self._wait([job for job in batch.values() if isinstance(job, str)], end)
        for form, job in batch.items():
            seen[form] = self._finished(form, job) if isinstance(job, str) else job
        return [seen[form] for form in wanted]

    def _submit(self, form: Form) -> str | GpusSeen:
        """The job's id, or how it was refused."""
        script = _PROBE.replace("@KIND@", "script")
        if form.step is not None:
            script += f"; srun {form.step} sh -c {shlex.quote(_PROBE.replace('@KIND@', 'task'))} || echo step-refused"
        output = f"{self._directory}/%A.%a.trial"
        first, *parts = self._parts(form)
        argv = ["sbatch", "--parsable", f"--output={output}", "--error=/dev/null", *first]
        path = self._directory / f"{time.time_ns()}.trial.sh"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        answer = self._run([*argv, *(word for part in parts for word in (":", *part)), str(path)], self._timeout_s)
        path.unlink()
        return (
            GpusSeen(form, "refused", last_line(answer)) if answer.returncode else re.split(r"[;\n]", answer.stdout)[0]
        )

    def _parts(self, form: Form) -> list[list[str]]:
        """The options of each part of a heterogeneous job; of any other the one part."""
        return [[*self._common, *part.split()] for part in form.options.split(" : ")]

    def _wait(self, jobs: Sequence[str], end: float) -> None:
        """Until all are gone from the queue or the time is over; the rest is cancelled."""
        while jobs:
            queue = self._run(["squeue", "-h", "-o", "%F", "--me"], 30)
            if not queue.returncode:  # a question that failed says nothing of the jobs
                jobs = [job for job in jobs if job in queue.stdout.split()]
            if jobs and time.monotonic() > end:
                self._run(["scancel", *jobs], 30)
                return
            if jobs:
                time.sleep(0.3)

    def _finished(self, form: Form, job: str) -> GpusSeen:
        files = sorted(self._directory.glob(f"{job}.*.trial"))
        text = "".join(path.read_text(errors="replace") for path in files)
        for path in files:
            path.unlink()
        return GpusSeen(form, _outcome(text)) if text else GpusSeen(form, "waits", "it did not start in time")

    def _interactive(self, form: Form, end: float) -> GpusSeen:
        task = ["sh", "-c", _PROBE.replace("@KIND@", "task")]
        first, *parts = self._parts(form)
        argv = [form.command, "--quiet", *first]
        for part in parts:
            argv += [":", *part] if form.command == "salloc" else [*task, ":", *part]
        argv += ["srun", *(form.step or "").split(), *task] if form.command == "salloc" else task
        answer = self._run(argv, max(1.0, end - time.monotonic()))
        if answer.returncode == 124:
            return GpusSeen(form, "waits", "it did not start in time")
        return (
            GpusSeen(form, "refused", last_line(answer))
            if answer.returncode
            else GpusSeen(form, _outcome(answer.stdout))
        )


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


def try_all(partition: str | None, account: str | None, wait_s: float, brief: bool) -> Iterator[Finding]:
    """Every form, as the user who asks, in a directory below the current one."""
    facts, config = collect(connect()), load_config()
    partition = partition or next(iter(config.partitions), None)
    if partition is None or facts.partition(partition) is None:
        raise BadInput(f"no partition '{partition or ''}'", "Choose one with -p.")
    # The model with the most nodes: a form that wants two must find them.
    of_model = facts.nodes_by_model((partition,), config.gpu_models)
    model, nodes = max(of_model.items(), key=lambda item: len(item[1]))
    gpus = min((gpu_count(node) for node in nodes), default=0)
    if len(nodes) < 2 or gpus < 2:
        found = f"{partition} has no two nodes of two GPUs"
        yield warned(found, "Some forms cannot work here.", "forms")
    other = next((name for node in nodes for name in node.partitions if name != partition), None)
    release = (facts.release.year, facts.release.month)
    wanted = [form for form in forms(model, gpus, partition, other, release) if form.brief or not brief]
    extra = [f"--partition={partition}", *([f"--account={account}"] if account else [])]
    yield from tag_of_a_job(facts, config, extra)
    with TemporaryDirectory(prefix="gpushare-trial-", dir=".") as directory:
        jobs = TrialJobs(run_here, Path(directory).resolve(), extra=extra, timeout_s=wait_s)
        yield from findings(jobs.try_forms(wanted))


def findings(seen: Sequence[GpusSeen]) -> Iterator[Finding]:
    """One line a form."""
    for one in seen:
        sees = _in_words(one.outcome) + (f" ({one.said})" if one.said and not one.as_expected else "")
        if one.as_expected:
            yield passed(sees, str(one.form))
        elif one.outcome == "waits":
            yield warned(sees, "Try again when GPUs are idle, or with a longer --wait.", str(one.form))
        else:
            fix = "Run 'gpushare doctor': it says what is wrong with the set-up."
            yield failed(f"{sees}; without us: {_in_words(one.form.expected)}", fix, str(one.form))


def _in_words(outcome: str) -> str:
    if outcome.startswith(("waits", "refused")) or not outcome:
        return outcome or "it said nothing"
    return f"sees {outcome} GPU" + ("" if outcome == "1" else "s")
