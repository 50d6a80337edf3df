"""How long a testbed takes to start, reset and stop, on each release whose root file system is there."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

from gpushare_lab.experiment.submitting import submit, wait_for
from gpushare_lab.testbed.layout import Shape
from gpushare_lab.testbed.reset import reset
from gpushare_lab.testbed.rootfs import SUITES, cache_dir, host_suite, is_complete
from gpushare_lab.testbed.testbed import Testbed

RESETS = 3


def main(out: Path) -> None:
    rows = [measure(name) for name in SUITES if name == host_suite() or is_complete(cache_dir() / name)]
    print(f"{'release':<10} {'up_s':>6} {'reset_idle_s':>13} {'reset_jobs_s':>13} {'command_ms':>11} {'down_s':>7}")
    for row in rows:
        print("{release:<10} {up_s:>6.1f} {reset_idle_s:>13.2f} {reset_jobs_s:>13.2f} "
              "{command_ms:>11.1f} {down_s:>7.1f}".format(**row))  # fmt: skip
    (out / "testbed.json").write_text(json.dumps(rows, indent=1) + "\n")


def measure(suite: str) -> dict[str, float | str]:
    """Times of the default shape: 4 nodes x 4 GPUs x 2 shards, with accounting."""
    with tempfile.TemporaryDirectory(prefix="gs-", dir="/tmp") as directory:
        Path(directory).chmod(0o755)
        testbed = Testbed(Path(directory) / "t")
        begin = time.monotonic()
        testbed.up(Shape(), suite=suite)
        up_s = time.monotonic() - begin
        try:
            idle_s, jobs_s = [], []
            for _ in range(RESETS):
                jobs = [submit(testbed, "sleep 600", "--gres=shard:v100_0:1") for _ in range(4)]
                wait_for(testbed, jobs, ["RUNNING"])
                jobs_s.append(_reset_s(testbed))
                idle_s.append(_reset_s(testbed))
            begin = time.monotonic()
            for _ in range(20):
                testbed.run(["sinfo", "-h"])
            command_ms = (time.monotonic() - begin) / 20 * 1000
            release = testbed.release
        finally:
            begin = time.monotonic()
            testbed.down(purge=True)
            down_s = time.monotonic() - begin
    return {
        "release": release,
        "up_s": up_s,
        "reset_idle_s": sorted(idle_s)[RESETS // 2],
        "reset_jobs_s": sorted(jobs_s)[RESETS // 2],
        "command_ms": command_ms,
        "down_s": down_s,
    }


def _reset_s(testbed: Testbed) -> float:
    begin = time.monotonic()
    reset(testbed)
    return time.monotonic() - begin
