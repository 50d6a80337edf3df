"""Record what Slurm's commands print, for the parsers' tests: ``python tests/record_fixtures.py [--slurm SUITE]``.

Brings up a testbed of that release, sets a scene that has one of everything, and writes the raw answers to
tests/fixtures/slurm/<release>/. Run it again when a parser needs another column.
"""

from __future__ import annotations

import argparse
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gpushare_lab.experiment.submitting import submit, wait_for
from gpushare_lab.testbed.daemons import wait_until
from gpushare_lab.testbed.layout import Shape
from gpushare_lab.testbed.testbed import Testbed

from slurm_gpushare.slurm.accounting import AccountingQuery, sacct_arguments
from slurm_gpushare.slurm.nodes import sinfo_arguments
from slurm_gpushare.slurm.queue import COLUMNS, COMMENT_COLUMNS, squeue_arguments, squeue_settings
from slurm_gpushare.slurm.runner import environment, time_format

DELIMITER = "~00000000~"
MARK = "~11111111~"
FIXTURES = Path(__file__).parent / "fixtures" / "slurm"
SLEEP = "sleep 600"
TAG = "GS1:c=2;t=gs-aaaaaaaaaaaaaaaaaaaa;o=gpu:1;g=gpu0:0"
EVIL = f"evil\n99{DELIMITER[:-2]}1~|,x"


def scene(testbed: Testbed) -> None:
    """One of everything. The unmanaged partition, so that the hook leaves the requests as they are."""
    here = ("--partition=other", "--mem=100", "--output=/dev/null")
    done = submit(testbed, "true", *here, "--gres=gpu:1")
    wait_for(testbed, done, ["COMPLETED"])
    running = [
        submit(testbed, SLEEP, *here, "--gres=shard:v100_0:1", "--nodelist=gpu0", f"--comment={EVIL}"),
        submit(testbed, SLEEP, *here, "--gres=shard:v100_0:1", "--nodelist=gpu0", "--time=10"),
        submit(testbed, SLEEP, *here, "--gres=shard:v100_1:2", "--nodelist=gpu0"),
        submit(testbed, SLEEP, *here, "--gres=gpu:1", "--nodelist=gpu1", "--cpus-per-task=3"),
    ]
    wait_for(testbed, running, ["RUNNING"])
    testbed.run(["scontrol", "update", f"JobId={running[0]}", f"AdminComment=site note {TAG}"])
    submit(
        testbed, SLEEP, *here, "--gpus=1", "--constraint=v100&v100", "--begin=now+1hour", "--array=1-3%2", "--time=1-2"
    )
    submit(testbed, SLEEP, *here, "--gres=gpu:2", "--nodelist=gpu0", "--dependency=afterok:" + str(running[1]))
    submit(testbed, SLEEP, *here, "--exclusive", "--nodes=2", "--hold")
    submit(
        testbed, SLEEP, *here, "--gpus-per-task=1", "--ntasks=1", "--exclude=gpu1", "--no-requeue", "--cpus-per-gpu=2"
    )
    testbed.run(["scontrol", "create", "reservation", "ReservationName=maint", "Users=root", "Nodes=gpu1",
                 "StartTime=now+2days", "Duration=60", "Flags=MAINT"])  # fmt: skip
    testbed.run(["scontrol", "update", "NodeName=gpu1", "State=DRAIN", "Reason=fan | broken=1"])
    if not wait_until(lambda: testbed.run(["sacct", "-X", "-n", "-s", "R", "-o", "JobID"]).stdout.count("\n") >= 4, 30):
        raise SystemExit("accounting does not hear of the jobs")


def record(testbed: Testbed, out: Path) -> None:
    """Write every answer; what names this machine is replaced."""
    out.mkdir(parents=True, exist_ok=True)
    questions: dict[str, Sequence[str]] = {
        "squeue": squeue_arguments(),
        "comments": squeue_arguments(),
        "sinfo": sinfo_arguments(DELIMITER),
        "sacct": sacct_arguments(AccountingQuery(start="now-1hour"), DELIMITER),
        "version": ["sinfo", "--version"],
        "config": ["scontrol", "show", "config"],
        "partitions": ["scontrol", "--all", "--oneliner", "show", "partition"],
        "reservations": ["scontrol", "--all", "--oneliner", "show", "reservation"],
    }
    for name, argv in questions.items():
        columns = COMMENT_COLUMNS if name == "comments" else COLUMNS
        env = {**environment(testbed.env), **squeue_settings(columns, DELIMITER)}
        env |= time_format(MARK) if name == "sacct" else {}
        asked = subprocess.run(argv, env=env, capture_output=True, text=True, check=True)
        if asked.stderr.strip():
            print(f"{name}: {asked.stderr.strip()}")  # e.g. a column that this release does not have
        text = asked.stdout.replace(str(testbed.dir), "/testbed").replace(socket.gethostname(), "controller")
        (out / f"{name}.txt").write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slurm", help="bookworm, trixie or forky; default: this machine's")
    suite = parser.parse_args().slurm
    directory = Path(tempfile.mkdtemp(prefix="gs-", dir="/tmp"))
    directory.chmod(0o755)
    testbed = Testbed(directory / "testbed", print).up(Shape(nodes=2, gpus=2, shards=2), suite=suite)
    try:
        scene(testbed)
        record(testbed, FIXTURES / ".".join(testbed.release.split(".")[:2]))
    finally:
        testbed.down(purge=True)
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
