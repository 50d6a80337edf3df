"""Every way to ask for GPUs on a plain testbed and on one with us, whole and broken, for docs/request-forms.md.

``request_matrix.py [SUITE] [OUT]`` prints it and writes OUT; exit code 3 where somebody would notice us.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from subprocess import CompletedProcess

from gpushare_lab import step_forms
from gpushare_lab.forms import GpusSeen, TrialJobs, forms
from gpushare_lab.testbed.configuration import PARTITION, UNMANAGED_PARTITION, version
from gpushare_lab.testbed.layout import GPU_MODEL, Shape
from gpushare_lab.testbed.reset import idle_nodes, reset
from gpushare_lab.testbed.testbed import Testbed

from slurm_gpushare.protocol.errors import Exit, GpushareError

USER = "games"
Break = Callable[[Testbed], None]


def nothing(_: Testbed) -> None: ...


def without_conf(bed: Testbed) -> None:
    bed.layout.gpushare_conf.unlink()
    bed.wait_for_hook()


def without_submit(bed: Testbed) -> None:
    """Taken from under a slurmctld that runs; it goes on with the script that it has."""
    (bed.layout.etc / "job_submit.lua").unlink()


def without_package(bed: Testbed) -> None:
    """The scripts that configure writes find nothing to run."""
    for name in ("prolog.sh", "epilog.sh", "task_prolog.sh"):
        (bed.layout.etc / name).write_text("#!/bin/sh\n/nowhere/gpushare\nexit 0\n")


def without_filter(bed: Testbed) -> None:
    bed.configure(slurm={"CliFilterPlugins": ""})
    idle_nodes(bed)  # a slurmctld that has just started does not know the nodes' GPUs yet


WIRED: tuple[tuple[str, Break], ...] = (
    ("with us", nothing),
    ("without gpushare.conf", without_conf),
    ("without job_submit.lua", without_submit),
    ("without our package", without_package),
    ("no client filter", without_filter),
)


@contextmanager
def running(directory: Path, suite: str | None, *, plain: bool) -> Iterator[Testbed]:
    bed = Testbed(directory).up(Shape(nodes=2, gpus=2), accounting=False, suite=suite, plain=plain)
    try:
        yield bed
    finally:
        bed.down(purge=True)


def try_on(bed: Testbed) -> list[GpusSeen]:
    def run(argv: Sequence[str], timeout_s: float) -> CompletedProcess[str]:
        try:
            return bed.run(list(argv), user=USER, check=False, timeout_s=timeout_s)
        except GpushareError:
            return CompletedProcess(argv, 124, "", "")

    bed.run(["true"], user=USER)  # makes the home
    wanted = forms(GPU_MODEL, bed.shape.gpus, PARTITION, UNMANAGED_PARTITION, version(bed.release))
    return TrialJobs(run, bed.layout.home / USER).try_forms(wanted)


def table(columns: Sequence[tuple[str, Sequence[GpusSeen]]]) -> str:
    """Markdown: a row for each form, a column for each way in which the cluster was set up."""
    head = ["request", *(name for name, _ in columns)]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    by_form = [{str(seen.form): seen.outcome for seen in column} for _, column in columns]
    for seen in columns[0][1]:
        name = str(seen.form)
        lines.append(f"| `{name}` | " + " | ".join(found.get(name, "---") for found in by_form) + " |")
    return "\n".join(lines) + "\n"


def main(suite: str | None, out: Path | None) -> int:
    columns: list[tuple[str, list[GpusSeen]]] = []
    with tempfile.TemporaryDirectory(prefix="gs-", dir="/tmp") as top:
        Path(top).chmod(0o755)
        with (
            running(Path(top, "plain"), suite, plain=True) as plain,
            running(Path(top, "wired"), suite, plain=False) as wired,
        ):
            release, old = plain.release, version(plain.release) < (23, 11)
            whole = step_forms.compared((plain, wired), USER, step_forms.JOBS, shared=False)
            shared = step_forms.compared((plain, wired), USER, step_forms.JOBS, shared=True)
            columns.append(("plain Slurm", try_on(plain)))
            for name, break_it in WIRED:
                reset(wired)
                break_it(wired)
                columns.append((name, try_on(wired)))
    steps = step_forms.table(shared[0], ("with us, no token", whole[1]), ("with us, sharing", shared[1]))
    text = (
        f"Slurm {release}: GPUs that the script sees, then its tasks.\n\n{table(columns)}\n"
        f"GPUs that each task of a step sees, and what else is different.\n\n{steps}"
    )
    print(text)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text)
    odd = {**step_forms.unexpected(shared[1], old=old), **({} if old else whole[1])}
    for form, change in odd.items():
        print(f"{form}: {change}", file=sys.stderr)
    noticed = len(odd)
    for name, column in columns:
        for seen in column:
            if not seen.as_expected:
                noticed += name != WIRED[-1][0]
                print(
                    f"{name}: {seen.form}: {seen.outcome} instead of {seen.form.expected} {seen.said}", file=sys.stderr
                )
    return Exit.PROBLEMS if noticed else Exit.OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else None, Path(sys.argv[2]) if len(sys.argv) > 2 else None))
