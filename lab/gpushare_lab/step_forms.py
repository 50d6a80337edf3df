"""What a job and its steps get on a whole card and on half of one: exit codes, visible cards, environment.

A job is measured on a whole card and shares in its second run, so that nothing may fail there which worked before, and
no script may read another number. `try_forms` runs real jobs; `differences` compares what they said.
"""

from __future__ import annotations

import pwd
import re
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field

from gpushare_lab.experiment.submitting import show, wait_for
from gpushare_lab.testbed.testbed import Testbed
from slurm_gpushare.protocol.files import resource_dir

TOKEN = "gs-" + "m" * 20

JOBS = (
    "--gpus=1",
    "--gres=gpu:1 -N1 -n2 -c2",
    "--gpus-per-node=1",
    "-n1 --gpus-per-task=1 -c2",
    "--gpus-per-socket=1 --sockets-per-node=1",
    "--gpus=1 --cpus-per-gpu=2 --mem-per-gpu=1000",
    "--gpus=1 -N1 -n1 --ntasks-per-gpu=1",
)
"""Options of sbatch."""
BRIEF_JOBS = (JOBS[0], JOBS[3], JOBS[5])

STEPS = (
    "",
    "--gpus=1",
    "--gres=gpu:1",
    "--gpus-per-node=1",
    "-n1 --gpus-per-task=1",
    "--gpus=1 --gpu-bind=closest",
    "--gpus=0",
    "--gres=none",
    "--gpus=2",
    "-n1 -c1",
    "--mem-per-gpu=100",
    "--gpus=1 --mem-per-gpu=100",
    "-n2 --overcommit",
    "-n2 --gpus-per-task=1 --overcommit",
    "-n1 --cpus-per-gpu=1",
    "-n1 --gpus=1 --cpus-per-gpu=1 --mem-per-gpu=100",
)
"""Options of srun inside."""

_SEEN = re.compile(r"SLURM_\w*(GPU|PER_|TRES|CPUS|TASKS|NPROCS|MEM_)\w*|GPUSHARE_EPOCH_FILE")
# Which card it is says nothing; 22.05 numbers heterogeneous groups where there are none.
_UNLIKE = re.compile(r"SLURM_(JOB|STEP)_GPUS|\w+_PACK_GROUP_0")
_OURS = {"GPUSHARE_EPOCH_FILE"}
"""What a job with a token has more."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a script or of a step."""

    ok: bool
    cards: tuple[int, ...] = ()
    """Cards that each task sees."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Of the first task."""

    def __str__(self) -> str:
        return " ".join(map(str, self.cards)) if self.ok else "refused"


Outcomes = Mapping[tuple[str, str | None], Outcome]
"""By options of sbatch and of srun; None: the script itself."""


def try_forms(bed: Testbed, user: str, jobs: Sequence[str], *, shared: bool = False) -> Outcomes:
    """Every step in every job; `shared`: as jobs of a known workload, each put on a part of a card."""
    bed.run(["true"], user=user)  # makes the home
    home = bed.layout.home / user
    if shared:
        _know_the_token(bed, user)
    ids = {}
    for number, options in enumerate(jobs):
        words = [f"--comment=gpushare:{TOKEN}"] if shared else []
        argv = ["sbatch", "--parsable", "--time=5", f"--output={home}/steps.{number}", *words, *options.split()]
        ids[options] = bed.run(argv, user=user, cwd=home, input=_script(options)).stdout.split(";")[0].strip()
        if shared:
            _place(bed, int(ids[options]))
    wait_for(bed, [int(job) for job in ids.values()], ["COMPLETED", "FAILED"], timeout_s=900)
    found: dict[tuple[str, str | None], Outcome] = {}
    for number, options in enumerate(jobs):
        output = home / f"steps.{number}"
        found |= {(options, step): outcome for step, outcome in _outcomes(options, output.read_text())}
        output.unlink()
    return found


def steps_of(options: str) -> tuple[str, ...]:
    """Those that are tried in a job: the usual ones, and one that repeats the job's own options."""
    own = " ".join(word for word in options.split() if not word.startswith(("--sockets", "--ntasks-per-gpu", "-N")))
    return (*STEPS, *([] if own in STEPS else [own]))


def _script(options: str) -> str:
    lines = ["#!/bin/bash", "echo '@ batch 0'", "env | sed 's/^/0: /'"]
    for number, step in enumerate(steps_of(options)):
        lines += [f"out=$(timeout 30 srun -l {step} env 2>/dev/null)", f'echo "@ {number} $?"', 'echo "$out"']
    return "\n".join([*lines, "exit 0", ""])


def _outcomes(options: str, text: str) -> Iterator[tuple[str | None, Outcome]]:
    for part in text.split("@ ")[1:]:
        head, _, rest = part.partition("\n")
        which, code = head.split()
        tasks: dict[str, dict[str, str]] = {}
        for task, name, value in re.findall(r"(?m)^(\d+): (\w+)=(.*)$", rest):
            tasks.setdefault(task, {})[name] = value
        cards = tuple(len(re.findall(r"\d+", tasks[task].get("CUDA_VISIBLE_DEVICES", ""))) for task in sorted(tasks))
        first = tasks.get("0", {})
        kept = {n: v for n, v in first.items() if _SEEN.fullmatch(n) and not _UNLIKE.fullmatch(n)}
        step = None if which == "batch" else steps_of(options)[int(which)]
        yield step, Outcome(True, cards, kept) if code == "0" else Outcome(False)


def differences(plain: Outcomes, ours: Outcomes, *, shared: bool) -> dict[tuple[str, str | None], str]:
    """What a job or step would notice: the outcome where it is another one, else the variables."""
    found = {}
    for form, before in plain.items():
        after = ours[form]
        if str(after) != str(before):
            found[form] = f"{after} instead of {before}"
            continue
        mine = {"SLURM_SHARDS_ON_NODE", "SLURM_STEP_GRES", *_OURS} if shared else set()
        names = (before.variables.keys() | after.variables.keys()) - mine
        other = sorted(n for n in names if before.variables.get(n) != after.variables.get(n))
        if other:
            found[form] = ", ".join(_change(n, before.variables.get(n), after.variables.get(n)) for n in other)
    return found


def _change(name: str, before: str | None, after: str | None) -> str:
    if after is None:
        return f"{name} unset"
    return f"{name}={after}" + ("" if before is None else f" instead of {before}")


# Job, step and change of what is known to be different, and said in docs/hook.md.
_KNOWN = tuple(
    (re.compile(job), re.compile(step), re.compile(change))
    for job, step, change in (
        (".*", ".*--cpus-per-gpu.*", "refused instead of 1"),
        (".*", ".*--mem-per-gpu.*", "SLURM_MEM_PER_GPU=.*"),
        (".*", ".*--(gpu-bind|gpus-per-task).*", "SLURM_TRES_(BIND|PER_TASK).*"),
        (".*", ".*--gpus=0.*", "SLURM_GPUS=1 instead of 0"),
        (".*--cpus-per-gpu.*", ".*", "SLURM_(CPUS|TRES)_PER_TASK=.*"),
        (".*--gpus-per-task.*", ".*", "SLURM_TRES_PER_TASK=.*"),  # 26.05
        (".*--gpus-per-task.*", ".*--gpus=0.*", "0 instead of 1"),  # 26.05
        (".*--ntasks-per-gpu.*", ".*", "SLURM_(NTASKS_PER_GPU|NTASKS_PER_TRES|TRES_BIND).*"),
        (".*--ntasks-per-gpu.*", ".*--(gres=none|gpus=0).*", "0 instead of 1"),
        # Slurm contradicts itself there on whole cards.
        (".*", ".*", "1( 1)? instead of refused"),
    )
)
# 22.05 and 23.02: what srun does not let go of is mended in another way, and tasks that are bound to GPUs die.
_KNOWN_OLD = tuple(
    (re.compile(job), re.compile(step), re.compile(change))
    for job, step, change in (
        (".*", ".*--cpus-per-gpu.*", "SLURM_CPUS_(PER_TASK|ON_NODE)=.*"),
        (".*-n2.*", ".*--gpu-bind.*", "refused instead of 1 1"),
        (".*", ".*-n2 --gpus-per-task.*", "refused instead of 1 1"),
        (".*", ".*--gpus=0.*", "0 instead of 1"),
        (".*--cpus-per-gpu.*", ".*", "(SLURM_TASKS_PER_NODE=.*|refused instead of 1)"),
    )
)


def unexpected(found: Mapping[tuple[str, str | None], str], *, old: bool) -> dict[tuple[str, str | None], str]:
    """Those of the differences that docs/hook.md does not name; `old`: up to Slurm 23.02."""
    known = _KNOWN + (_KNOWN_OLD if old else ())
    return {
        (job, step): change
        for (job, step), change in found.items()
        if not all(any(_fits(row, job, step, part) for row in known) for part in change.split(", "))
    }


def _fits(row: tuple[re.Pattern[str], ...], job: str, step: str | None, change: str) -> bool:
    return all(pattern.fullmatch(text) for pattern, text in zip(row, (job, step or "", change), strict=True))


def compared(
    beds: tuple[Testbed, Testbed], user: str, jobs: Sequence[str], *, shared: bool
) -> tuple[Outcomes, dict[tuple[str, str | None], str]]:
    """What plain Slurm gives and what is different with us; a form that was different once is tried again."""
    plain, ours = (try_forms(bed, user, jobs, shared=shared and bed is beds[1]) for bed in beds)
    found = differences(plain, ours, shared=shared)
    again = [job for job in jobs if any(job == form[0] for form in found)]
    if again:
        second = differences(
            try_forms(beds[0], user, again), try_forms(beds[1], user, again, shared=shared), shared=shared
        )
        found = {form: change for form, change in found.items() if form in second}
    return plain, found


def table(plain: Outcomes, *columns: tuple[str, Mapping[tuple[str, str | None], str]]) -> str:
    """Markdown: each job and step, what it gets on plain Slurm, and what is different in each column."""
    head = ["job", "step", "plain Slurm", *(name for name, _ in columns)]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for (job, step), outcome in plain.items():
        inside = "the script" if step is None else f"`{f'srun {step}'.strip()}`"
        cells = [unlike.get((job, step), "the same") for _, unlike in columns]
        lines.append("| " + " | ".join([f"`{job}`", inside, str(outcome), *cells]) + " |")
    return "\n".join(lines) + "\n"


def _know_the_token(bed: Testbed, user: str) -> None:
    path = bed.layout.gpushare / "hook.sqlite"
    path.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as file, file:
        file.executescript((resource_dir("sql") / "hook.sql").read_text())
        file.execute("INSERT INTO workload VALUES (?, ?, ?, ?)", (TOKEN, pwd.getpwnam(user).pw_uid, "v100=1/1", None))
        file.execute("UPDATE helper SET heartbeat_s = ?", (int(time.time()),))
    bed.wait_for_hook()


def _place(bed: Testbed, job: int) -> None:
    """On a shard of the first node, as the helper does. Up to 23.02 the card is the one that the hook chose."""
    typed = re.search(r"shard:(v100_\d+):\d+", show(bed, job)["TresPerNode"])
    card = typed.group(1) if typed else f"v100_{job % bed.shape.gpus}"
    bed.run(["scontrol", "update", f"JobId={job}", f"Gres=shard:{card}:1", "ReqNodeList=gpu0", "StartTime=now"])
