"""What the hook costs slurmctld: mean time of one submission, from sdiag, beside no plugin and an empty script.

Beside it the same for hostile jobs, whose constraint is 120 kB of parentheses. Then 2,000 submissions from 8 clients at
once: none may be lost.
"""

from __future__ import annotations

import json
import os
import pwd
import re
import sqlite3
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

from gpushare_lab.testbed.configuration import with_keys
from gpushare_lab.testbed.layout import Shape
from gpushare_lab.testbed.testbed import Testbed

from slurm_gpushare.protocol.files import resource_dir

USER = "games"
TOKEN = "gs-" + "k" * 20
SUBMISSIONS = 2_000
BLOCK = 100
ROUNDS = 4
CLIENTS = 8
VARIANTS = {"empty script": 0, "hook, 1 k workloads": 1_000, "hook, 1 M workloads": 1_000_000}
LIMIT_MS = 0.3
EMPTY_SCRIPT = "".join(f"function slurm_job_{name}() return slurm.SUCCESS end\n" for name in ("submit", "modify"))
# One client: a shell that submits held jobs one after the other. Held, so that the scheduler does not disturb.
LOOP = """
i=0
while [ $i -lt {count} ]; do
  sbatch -Q -H -o /dev/null --comment=gpushare:{token} --gpus=1 job.sh 2>/dev/null || exit 1
  i=$((i+1))
done
"""

# A constraint of 120 kB, which Slurm refuses, but only after the hook.
HOSTILE_LOOP = """
nasty=$(head -c 120000 /dev/zero | tr '\\0' '(')
i=0
while [ $i -lt {count} ]; do
  sbatch -Q -H -o /dev/null --comment=gpushare:{token} --gres=gpu:v100:1 -C "$nasty" job.sh 2>/dev/null
  i=$((i+1))
done
"""
HOSTILE_BLOCK = 20


def main(out: Path) -> None:
    with fresh(plugin=False) as testbed:
        no_plugin_ms = sum(submit_ms(testbed, BLOCK) for _ in range(SUBMISSIONS // BLOCK)) / (SUBMISSIONS // BLOCK)
    print(f"{'no plugin':22} {no_plugin_ms:7.3f} ms a submission, mean of {SUBMISSIONS}", flush=True)
    means_ms = {"no plugin": no_plugin_ms, **scripts_ms()}
    for name in VARIANTS:
        print(f"{name:22} {means_ms[name]:7.3f} ms a submission, mean of {SUBMISSIONS}", flush=True)
    added_ms = means_ms["hook, 1 k workloads"] - means_ms["empty script"]
    growth = means_ms["hook, 1 M workloads"] / means_ms["hook, 1 k workloads"]
    print(f"the hook adds {added_ms:.3f} ms to the empty script (limit {LIMIT_MS}); 1 M / 1 k workloads: {growth:.2f}")
    with fresh() as testbed:
        hostile_ms = hostile(testbed)
    for name, ms in hostile_ms.items():
        print(f"{name + ', hostile':22} {ms:7.3f} ms a submission, mean of {HOSTILE_BLOCK * ROUNDS}", flush=True)
    with fresh() as testbed:
        lost, wall_s, tagged = concurrent(testbed)
    print(f"{SUBMISSIONS} submissions from {CLIENTS} clients at once: {lost} lost, {tagged} tagged, {wall_s:.0f} s")
    result = {"mean_ms": means_ms, "hostile_ms": hostile_ms, "added_ms": added_ms, "growth": growth}
    result |= {"lost": lost, "tagged": tagged, "wall_s": wall_s, "load_average": os.getloadavg()[1]}
    (out / "hook.json").write_text(json.dumps(result, indent=2) + "\n")


def scripts_ms() -> dict[str, float]:
    """Means of the three scripts, measured in turns of a block each: what else the machine does hits them alike.

    Several controllers, one after the other, since before each call of a Lua script slurmctld makes a table of all jobs
    that it knows, which soon costs more than any script.
    """
    blocks: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for _ in range(ROUNDS):
        with fresh() as testbed:
            hook = (testbed.layout.etc / "job_submit.lua").read_text()
            for _ in range(SUBMISSIONS // BLOCK // ROUNDS):
                for name, workloads in VARIANTS.items():
                    switch(testbed, hook if workloads else EMPTY_SCRIPT, workloads or 1_000)
                    blocks[name].append(submit_ms(testbed, BLOCK))
    return {name: sum(times) / len(times) for name, times in blocks.items()}


def hostile(testbed: Testbed) -> dict[str, float]:
    """Means of hostile submissions, in turns: what slurmctld itself takes for them, and what the hook adds."""
    hook = (testbed.layout.etc / "job_submit.lua").read_text()
    blocks: dict[str, list[float]] = {"empty script": [], "hook": []}
    for _ in range(ROUNDS):
        for name, script in (("empty script", EMPTY_SCRIPT), ("hook", hook)):
            switch(testbed, script, 1_000)
            blocks[name].append(submit_ms(testbed, HOSTILE_BLOCK, HOSTILE_LOOP))
    return {name: sum(times) / len(times) for name, times in blocks.items()}


def switch(testbed: Testbed, script: str, workloads: int) -> None:
    """Another script and another hook file in a running slurmctld."""
    (testbed.layout.etc / "job_submit.lua").write_text(script)
    conf = testbed.layout.gpushare_conf
    conf.write_text(with_keys(conf.read_text(), {"HookFile": str(hook_file(testbed, workloads))}))
    time.sleep(1.1)  # both are noticed by the second of their time
    submit_many(testbed, 3)


def hook_file(testbed: Testbed, workloads: int) -> Path:
    return testbed.layout.gpushare / f"hook.{workloads}.sqlite"


@contextmanager
def fresh(plugin: bool = True) -> Iterator[Testbed]:
    """A new Slurm without jobs, with the hook or without any submit plugin; in memory.

    On disk the files that slurmctld makes for each job cost it more than any script, and that varies threefold with
    what was deleted there lately.
    """
    with tempfile.TemporaryDirectory(prefix="gs-", dir="/dev/shm") as scratch:
        Path(scratch).chmod(0o755)
        testbed = Testbed(Path(scratch) / "testbed").up(Shape(nodes=2, gpus=2, shards=2), accounting=False)
        try:
            for workloads in (1_000, 1_000_000) if plugin else ():
                write_hook_file(hook_file(testbed, workloads), workloads)
            conf = testbed.layout.slurm_conf
            keys = {"JobSubmitPlugins": "lua" if plugin else "", "CliFilterPlugins": ""}
            conf.write_text(with_keys(conf.read_text(), keys))
            ours = testbed.layout.gpushare_conf
            keys = {"HeartbeatSeconds": "3600", "HookFile": str(hook_file(testbed, 1_000))}
            ours.write_text(with_keys(ours.read_text(), keys))
            testbed.run(["sh", "-c", "printf '#!/bin/sh\\ntrue\\n' > ~/job.sh"], user=USER)
            testbed.restart("slurmctld")
            run_first(testbed.running()["slurmctld"])
            submit_many(testbed, 3)
            yield testbed
        finally:
            testbed.down(purge=True)


def run_first(pid: int | None) -> None:
    """slurmctld before all other processes: the time that it takes is wanted, not the time that it waits for a core."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setscheduler(int(thread.name), os.SCHED_RR, os.sched_param(1))  # later threads inherit it


def write_hook_file(path: Path, workloads: int) -> None:
    path.unlink(missing_ok=True)
    letters = str.maketrans("0189", "abcd")
    with closing(sqlite3.connect(path)) as file, file:
        file.executescript("PRAGMA synchronous=OFF; BEGIN;" + (resource_dir("sql") / "hook.sql").read_text())
        file.execute("INSERT INTO workload VALUES (?, ?, 'v100=2/1', NULL)", (TOKEN, pwd.getpwnam(USER).pw_uid))
        rows = ((f"gs-{index:020d}".translate(letters), 1) for index in range(workloads))
        file.executemany("INSERT OR IGNORE INTO workload VALUES (?, ?, 'v100=1/1', NULL)", rows)
        file.execute("UPDATE helper SET heartbeat_s = ?", (int(time.time()),))


def submit_many(testbed: Testbed, count: int, loop: str = LOOP) -> None:
    loop = loop.format(count=count, token=TOKEN)
    testbed.run(["sh", "-c", loop], user=USER, cwd=testbed.layout.home / USER, timeout_s=900)


def submit_ms(testbed: Testbed, count: int, loop: str = LOOP) -> float:
    """Mean time of a submission, from slurmctld's own statistics, so that clients and network are left out."""
    testbed.run(["sdiag", "--reset"])
    submit_many(testbed, count, loop)
    text = testbed.run(["sdiag"]).stdout
    found = re.search(r"REQUEST_SUBMIT_BATCH_JOB\s*\(\s*\d+\)\s*count:(\d+)\s*ave_time:\d+\s*total_time:(\d+)", text)
    if found is None or int(found[1]) != count:
        sys.exit(f"bench: error: sdiag does not count the submissions:\n{text}")
    return int(found[2]) / count / 1000


def concurrent(testbed: Testbed) -> tuple[int, float, int]:
    """Jobs lost, wall time, jobs with a tag."""
    start = time.monotonic()
    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(lambda _: submit_many(testbed, SUBMISSIONS // CLIENTS), range(CLIENTS)))
    wall_s = time.monotonic() - start
    jobs = testbed.run(["scontrol", "show", "job", "-o"], timeout_s=120).stdout
    warm = 3
    return SUBMISSIONS - jobs.count("JobState=PENDING") + warm, wall_s, jobs.count("AdminComment=GS1:c=2") - warm
