"""What the telemetry tests have in common: jobs of known demand, and the records that come of them."""

from __future__ import annotations

import json
import pwd
import re
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from gpushare_lab.experiment.submitting import submit
from gpushare_lab.testbed.configuration import with_keys
from gpushare_lab.testbed.testbed import Testbed

from slurm_gpushare.protocol.record import Record, RecordKind, parse_record

CLOSE = 3.0  # points
SHARD = "--gres=shard:v100_{gpu}:1"
WAIT_TO_BE_MEASURED = "until [ -e go.$SLURM_JOB_ID ]; do sleep 0.05; done"
"""How a script begins that `begin_when_measured` lets go on: samplers, being nice, start late on a busy machine."""


def until(condition: Callable[[], object], timeout_s: float = 120.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


def workload(util: float = 50, access: float = 20, mem_mib: int = 2048, work_s: float = 5, epochs: int = 1) -> str:
    return (
        f"python -m gpushare_lab.job.workload --gpu-util {util} --mem-access {access} --mem-mib {mem_mib} "
        f"--work-s {work_s} --epochs {epochs}"
    )


def endless(util: float, access: float, mem_mib: int) -> str:
    """A workload to be cancelled: many short epochs, none of which ends its profile."""
    return f"unset GPUSHARE_EPOCH_FILE; {workload(util, access, mem_mib, work_s=600, epochs=200)}"


def start(
    testbed: Testbed,
    script: str,
    *options: str,
    gpu: int = 0,
    node: str = "gpu0",
    user: str = "games",
    env: Mapping[str, str] | None = None,
) -> int:
    common = (SHARD.format(gpu=gpu), f"--nodelist={node}", "--output=%j.out")
    return submit(testbed, script, *common, *options, user=user, env=env, cwd=testbed.layout.home / user)


def start_measured(
    testbed: Testbed, script: str, *options: str, gpu: int = 0, node: str = "gpu0", user: str = "games"
) -> int:
    """A job whose script begins once its sampler has seen it."""
    job = start(testbed, f"{WAIT_TO_BE_MEASURED}; {script}", *options, gpu=gpu, node=node, user=user)
    begin_when_measured(testbed, job, user)
    return job


def begin_when_measured(testbed: Testbed, job: int, user: str = "games") -> None:
    """Let a job that waits in its user's home begin, once its sampler has seen it."""
    until(
        lambda: any(record.job_id == job and record.profile.stats for _, record in spooled(testbed, RecordKind.INTERIM))
    )
    (testbed.layout.home / user / f"go.{job}").touch()


def output(testbed: Testbed, job: int, user: str = "games") -> str:
    return (testbed.layout.home / user / f"{job}.out").read_text()


def open_credential(testbed: Testbed, path: Path) -> tuple[int, Record] | None:
    """Whose record it is, and the record; None if the file has just been replaced."""
    done = testbed.run(["unmunge", f"--input={path}"], check=False)
    header, _, payload = done.stdout.partition("\n\n")
    found = re.search(r"^UID:.*\((\d+)\)", header, re.MULTILINE)
    return (int(found.group(1)), parse_record(payload)) if found else None


def spooled_files(testbed: Testbed, kind: RecordKind) -> list[Path]:
    """Records that wait, wherever nodes and users leave them."""
    suffix = "f" if kind is RecordKind.FINAL else "i"
    return list((testbed.layout.gpushare / "spool").glob(f"[in]*/*-{suffix}.rec"))


def spooled(testbed: Testbed, kind: RecordKind) -> list[tuple[int, Record]]:
    return [found for path in spooled_files(testbed, kind) if (found := open_credential(testbed, path))]


def final_records(testbed: Testbed, count: int = 1, timeout_s: float = 120.0) -> dict[int, Record]:
    """Final records by job, once there are `count`."""
    until(lambda: len(spooled_files(testbed, RecordKind.FINAL)) >= count, timeout_s)
    return {record.job_id: record for _, record in spooled(testbed, RecordKind.FINAL)}


def node_dir(testbed: Testbed, node: str = "gpu0") -> Path:
    return testbed.layout.gpushare / "state" / "nodes" / node


def log(testbed: Testbed, node: str = "gpu0") -> str:
    path = node_dir(testbed, node) / "sampler.log"
    return path.read_text() if path.exists() else ""


def hook_script(
    testbed: Testbed, name: str, job: int, gpus: str = "0", **changes: str
) -> subprocess.CompletedProcess[str]:
    """Run the node's prolog or epilog by hand, as slurmd would."""
    env = {
        "SLURM_JOB_ID": str(job), "SLURMD_NODENAME": "gpu0", "SLURM_JOB_GPUS": gpus, "SLURM_JOB_PARTITION": "gpu",
        "SLURM_JOB_UID": str(pwd.getpwnam("games").pw_uid),
    }  # fmt: skip
    script = testbed.layout.etc / f"{name}.sh"
    return subprocess.run([script], env={**env, **changes}, capture_output=True, text=True, timeout=60, check=False)


def assert_features(record: Record, mgup: float, mgmap: float, mgtsamp: float) -> None:
    assert record.features.mgup == pytest.approx(mgup, abs=CLOSE)
    assert record.features.mgmap == pytest.approx(mgmap, abs=CLOSE)
    assert record.features.mgtsamp == pytest.approx(mgtsamp, abs=CLOSE)


def ingest(testbed: Testbed) -> dict[str, Any]:
    counts: dict[str, Any] = json.loads(testbed.run(["gpushare", "ingest", "--json"]).stdout)
    return counts


def ingest_until(testbed: Testbed, name: str) -> dict[str, Any]:
    """Run ingest until one of its counts is not 0: the job may still be running, or slurmdbd lag behind."""
    counts: dict[str, Any] = {}

    def counted() -> bool:
        counts.update(ingest(testbed))
        return bool(counts[name])

    until(counted)
    return counts


def configure(testbed: Testbed, **changes: str) -> None:
    """Set keys of gpushare.conf, which prologs and samplers read anew for each job."""
    path = testbed.layout.gpushare_conf
    path.write_text(with_keys(path.read_text(), changes))


def samplers(testbed: Testbed) -> list[int]:
    """Live samplers of this testbed, by what the prologs wrote; a file that is being written is empty for a moment."""
    words = [read_or_empty(path).split() for path in node_dir(testbed).parent.glob("*/jobs/*")]
    return [int(pid) for pid, *_ in filter(None, words) if Path(f"/proc/{pid}").exists()]


def read_or_empty(path: Path) -> str:
    """A file's text; nothing if it has been removed since it was listed."""
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""
