"""Inside a testbed every command, job and user meets this Slurm, this munge and these GPUs, whatever the release."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from gpushare_lab.experiment.submitting import submit, wait_for
from gpushare_lab.testbed.processes import wait_until
from gpushare_lab.testbed.testbed import Testbed

COUNT_GPUS = "import pynvml; pynvml.nvmlInit(); print(pynvml.nvmlDeviceGetCount())"


def output_of(testbed: Testbed, script: str, *options: str, user: str | None = None) -> list[str]:
    """What a job printed."""
    home = testbed.layout.home / (user or "")
    out = home / "out.txt"
    out.unlink(missing_ok=True)
    job = submit(testbed, script, f"--output={out}", *options, user=user, cwd=home)
    wait_for(testbed, job, ["COMPLETED"])
    return out.read_text().splitlines()


def test_commands_on_the_machines_own_side_reach_the_right_release(testbed: Testbed, tmp_path: Path) -> None:
    inside = testbed.run(["sinfo", "-V"]).stdout
    outside = subprocess.run(["sinfo", "-V"], env=testbed.env, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert inside == outside.stdout == f"{inside.split()[0]} {testbed.release}\n"
    nodes = subprocess.run(
        ["sinfo", "-h", "-N", "-o", "%N"], env=testbed.env, capture_output=True, text=True, check=True
    )
    assert set(nodes.stdout.split()) == {"gpu0", "gpu1"}


def test_a_job_has_our_package_the_emulated_gpus_and_munge(testbed: Testbed) -> None:
    script = f'{sys.executable} -c "{COUNT_GPUS}"\nwhich gpushare >/dev/null && munge -n | unmunge | grep STATUS'
    assert output_of(testbed, script, user="games") == ["2", "STATUS:          Success (0)"]


def test_a_job_that_takes_no_environment_along_has_it_too(testbed: Testbed) -> None:
    # As root: for --export=NONE Slurm logs the user in, and the test users of the machine have no shell.
    said = output_of(testbed, 'echo "$GPUSHARE_CONF"; scontrol ping | grep -c UP', "--export=NONE")
    assert said == [str(testbed.layout.gpushare_conf), "1"]


def test_steps_start_on_every_node(testbed: Testbed) -> None:
    said = output_of(testbed, "srun sh -c 'echo $SLURMD_NODENAME'", "--nodes=2", "--partition=other", user="nobody")
    assert sorted(said) == ["gpu0", "gpu1"]


def test_accounting_keeps_shards_and_comments(testbed: Testbed) -> None:
    job = submit(testbed, "true", "--gres=shard:v100_0:2", "--comment=hello")
    wait_for(testbed, job, ["COMPLETED"])

    def row() -> str:
        return testbed.run(["sacct", "-X", "-n", "-P", "-j", str(job), "-o", "AllocTRES,Comment"]).stdout.strip()

    # slurmctld tells slurmdbd when it has the time: some seconds later on a busy machine.
    assert wait_until(lambda: "gres/shard=2" in row() and row().endswith("|hello"), 60), row()


def test_the_demonstration_shows_who_shares_and_cleans_up(short_tmp: Path, slurm_suite: str | None) -> None:
    directory = short_tmp / "demo"
    suite = [f"--slurm={slurm_suite}"] if slurm_suite else []
    small = ["--policies=exclusive,fcfs", "--jobs=6", "--runs=1", "--gpus=2", "--seconds=4", f"--out={short_tmp}/out"]
    argv = [sys.executable, "-m", "gpushare_lab", "demo", "--dir", str(directory), *small, *suite]
    shown = subprocess.run(argv, capture_output=True, text=True, timeout=500, check=True).stdout
    table = [line.split() for line in shown.splitlines() if line.startswith(("POLICY", "exclusive ", "fcfs "))]
    shared = {row[0]: row[table[0].index("SHARED")] for row in table}
    assert shared["exclusive"] == "0/6"
    assert shared["fcfs"] != "0/6", "with more jobs than GPUs some must have shared"
    assert "fcfs: they shared without asking who suits whom" in shown, "a sentence a row"
    assert "Known beforehand: nothing" in shown
    assert (short_tmp / "out" / "figure.png").stat().st_size > 10_000
    assert "gpushare" in (short_tmp / "out" / "page.html").read_text()
    assert not directory.exists()
