"""The ways in which people ask for GPUs, and what each of them gets from plain Slurm.

Nobody who does not share may notice us: each form must give the same with us as without. The expectations here were
seen on Slurm without us, and `tests/real/test_request_forms.py` sees them again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

REFUSED = "refused"


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
    since: tuple[int, int] = (22, 5)
    """The first release of Slurm that knows it."""
    brief: bool = False
    """Whether it is one of the few that stand for all where time is short."""

    def __str__(self) -> str:
        inside = "" if self.step is None else f" + {f'srun {self.step}'.strip()}"
        return f"{self.command} {self.options}".strip() + inside


def forms(model: str, gpus: int, partition: str, other: str | None, release: tuple[int, int]) -> list[Form]:
    """All forms for nodes of `gpus` (two or more) of `model`; `other` is a second partition of the same nodes."""
    found = [*_jobs(model, gpus), *_steps(model), *_interactive(model), *_partitions(model, partition, other)]
    return [form for form in found if form.since <= release]


def _jobs(model: str, gpus: int) -> Iterator[Form]:
    """What sbatch is asked for."""
    yield Form("sbatch", "--gres=gpu:1", "1", brief=True)
    yield Form("sbatch", "--gres=gpu", "1")
    yield Form("sbatch", f"--gres=gpu:{model}:1", "1", brief=True)
    yield Form("sbatch", f"--gres=gpu:{model}", "1")
    yield Form("sbatch", f"--gres=gpu:{model}:2", "2")
    yield Form("sbatch", "-N1 --gpus=2", "2")
    yield Form("sbatch", "--gpus=1", "1")
    yield Form("sbatch", f"--gpus={model}:1", "1", brief=True)
    yield Form("sbatch", "--gpus-per-node=2", "2")
    yield Form("sbatch", f"--gpus-per-node={model}:1", "1")
    yield Form("sbatch", "--gpus-per-socket=1 --sockets-per-node=1", "1")
    yield Form("sbatch", f"--gpus-per-socket={model}:1 --sockets-per-node=1", "1")
    yield Form("sbatch", f"--gres=gpu:{model}:1 --cpus-per-gpu=2 --mem-per-gpu=100", "1")
    yield Form("sbatch", f"--exclusive --gres=gpu:{model}:1", str(gpus), brief=True)
    yield Form("sbatch", f"--array=0-1 --gres=gpu:{model}:1", "1 1", brief=True)
    yield Form("sbatch", f"--gres=gpu:{model}:1 : --gres=gpu:{model}:1", "1", brief=True)
    yield Form("sbatch", "--gres=gpu:nosuchmodel:1", REFUSED, brief=True)
    yield Form("sbatch", f"--gres=gpu:{model}:999", REFUSED)
    yield Form("sbatch", "", "0")


def _steps(model: str) -> Iterator[Form]:
    """What srun is asked for inside a batch job."""
    for step in ("", "--gres=gpu:1", f"--gres=gpu:{model}:1", f"--gpus={model}:1", "--gpus=1"):
        yield Form("sbatch", f"--gres=gpu:{model}:1", "1, 1", step, brief=step.startswith("--gpus=v"))
    yield Form("sbatch", f"--gpus={model}:1", "1, 1", "", brief=True)
    # 22.05 itself refuses the first of these two, and shows tasks of the second no GPU.
    yield Form("sbatch", "-N1 --gpus=2", "2, 1", f"-n1 --gpus={model}:1", since=(23, 11))
    yield Form("sbatch", f"--gres=gpu:{model}:2", "2, 1", f"--gres=gpu:{model}:1")
    yield Form("sbatch", f"-n1 --gpus-per-task={model}:1", "1, 1", "", brief=True)
    yield Form("sbatch", "-n1 --gpus-per-task=1", "1, 1", "")
    yield Form("sbatch", f"-N1 -n2 --gpus-per-task={model}:1", "2, 1 1", "", since=(23, 11))
    yield Form("sbatch", "-N1 -n2 --gpus-per-task=1", "2, 1 1", "", since=(23, 11))
    yield Form("sbatch", f"-N1 -n2 --tres-per-task=gres/gpu:{model}:1", "2, 1 1", "", since=(23, 11))
    yield Form("sbatch", f"-N1 --ntasks-per-gpu=1 --gpus={model}:2", "2, 1 1", "")
    yield Form("sbatch", f"-N2 --ntasks-per-node=1 --gres=gpu:{model}:1", "1, 1 1", "")
    yield Form("sbatch", f"--gres=gpu:{model}:1", "1, 0", "--gres=none")
    yield Form("sbatch", f"--gres=gpu:{model}:1", f"1, {REFUSED}", f"--gres=gpu:{model}:2")


def _interactive(model: str) -> Iterator[Form]:
    """srun without a job around it, and salloc."""
    alone = ("--gres=gpu:1", f"--gres=gpu:{model}:1", "--gpus=1", f"--gpus={model}:1", f"--gpus-per-node={model}:1",
             "--gpus-per-socket=1 --sockets-per-node=1", f"--gpus-per-socket={model}:1 --sockets-per-node=1",
             "-n1 --gpus-per-task=1", f"-n1 --gpus-per-task={model}:1")  # fmt: skip
    for options in alone:
        yield Form("srun", options, "1", brief=options == f"--gpus={model}:1")
    # 22.05 itself shows such tasks no GPU at all.
    yield Form("srun", f"-N1 -n2 --gpus-per-task={model}:1", "1 1", since=(23, 11), brief=True)
    yield Form("srun", "-N1 -n2 --gpus-per-task=1", "1 1", since=(23, 11))
    yield Form("srun", f"-N2 -n2 --gres=gpu:{model}:2", "2 2")
    yield Form("srun", f"--exclusive --gres=gpu:{model}:1", "1")
    yield Form("srun", f"--gres=gpu:{model}:1 : --gres=gpu:{model}:1", "1 1")
    yield Form("srun", "--gres=gpu:nosuchmodel:1", REFUSED)
    for options in alone:
        yield Form("salloc", options, "1", "")
    yield Form("salloc", f"-N1 -n2 --gpus-per-task={model}:1", "1 1", "", since=(23, 11))
    yield Form("salloc", f"--gres=gpu:{model}:2", "1", f"--gres=gpu:{model}:1", brief=True)
    yield Form("salloc", f"-N1 --gpus={model}:2", "1", f"--gpus={model}:1")
    yield Form("salloc", f"--exclusive --gres=gpu:{model}:1", "1", "")
    yield Form("salloc", f"--gres=gpu:{model}:1 : --gres=gpu:{model}:1", "1 1", "--het-group=0,1")
    yield Form("salloc", "--gres=gpu:nosuchmodel:1", REFUSED, "")


def _partitions(model: str, partition: str, other: str | None) -> Iterator[Form]:
    """Partitions that share their nodes with one that we manage."""
    if other is not None:
        yield Form("sbatch", f"-p {other} --gres=gpu:{model}:1", "1, 1", f"--gpus={model}:1", brief=True)
        yield Form("sbatch", f"-p {partition},{other} --gpus={model}:1", "1", brief=True)
        yield Form("srun", f"-p {other} --gpus={model}:1", "1")


@dataclass(frozen=True, slots=True)
class GpusSeen:
    """What became of a form."""

    form: Form
    outcome: str
    said: str = ""
    """The command's own words where it was refused."""

    @property
    def as_expected(self) -> bool:
        return self.outcome == self.form.expected

    @property
    def was_tried(self) -> bool:
        """False where the cluster had no room within the time that there was."""
        return not self.outcome.startswith("waits")
