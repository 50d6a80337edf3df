"""The helper: how long a tick of a large site takes; requests a tick, and memory after a day of ticks.

Slurm is played back (`large_site`, and here a queue that moves: a real one would take a day), everything else is the
real helper: parsers, snapshot, plan, changes, store.
"""

from __future__ import annotations

import json
import resource
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpushare_lab.known_profiles import KnownProfile, enter_profiles

from bench.large_site import Size, play, token
from slurm_gpushare.helper.learner import Learner
from slurm_gpushare.helper.tick import Helper
from slurm_gpushare.protocol.settings import parse_config
from slurm_gpushare.slurm import nodes, queue
from slurm_gpushare.slurm.commands import Slurm
from slurm_gpushare.store import Store

TICK_S = 5.0
DAY_S = 86_400.0
NODES, GPUS, JOBS = 8, 4, 200
LARGE = (Size(pending=10_000, gpus=2_500, pairs=2_000), Size(pending=50_000, gpus=2_500, pairs=2_000))
TICKS_OF_LARGE = 7


class PlayedSlurm:
    """A queue in which jobs come, start where they are sent, and end; answers as squeue and sinfo print them."""

    def __init__(self, length: int = JOBS) -> None:
        self.length = length
        self.now_s = 1_800_000_000.0
        self.next_id = 1
        self.jobs: dict[int, dict[str, str]] = {}
        self.requests = 0

    def run(self, argv: Sequence[str], settings: Mapping[str, str] | None = None) -> str:
        if argv[:2] == ["sinfo", "--version"]:
            return "slurm 24.11.5"
        self.requests += 1
        if argv[0] == "squeue":
            wanted = {key for item in argv if item.startswith("--jobs=") for key in item.partition("=")[2].split(",")}
            rows = [job for job in self.jobs.values() if not wanted or job["jobarrayid"] in wanted]
            return self._table((settings or {})["SQUEUE_FORMAT2"], queue.COLUMNS, rows)
        if argv[0] == "sinfo":
            return self._table(argv[-1], nodes.COLUMNS, [self._node(number) for number in range(NODES)])
        if argv[:2] == ["scontrol", "update"]:
            self._update(dict(item.split("=", 1) for item in argv[2:]))
        return ""

    def _table(self, form: str, columns: Sequence[str], rows: object) -> str:
        delimiter = "~" + form.split("~")[1] + "~"
        return "".join("".join(f"{row.get(column, '')}{delimiter}" for column in columns) + "\n" for row in rows)  # type: ignore[attr-defined]

    def _node(self, number: int) -> dict[str, str]:
        here = [job for job in self.jobs.values() if job["nodelist"] == f"n{number}"]
        used = dict.fromkeys(range(GPUS), 0)
        for job in here:
            kind, shards = job["tres-per-node"].rsplit(":", 2)[1:]
            used[int(kind.removeprefix("v100_"))] += int(shards)
        types = [f"v100_{index}" for index in range(GPUS)]
        return {
            "nodelist": f"n{number}", "statecomplete": "mixed", "features_act": "v100", "partitionname": "gpu",
            "gres": ",".join([f"gpu:{kind}:1" for kind in types] + [f"shard:{kind}:2" for kind in types]),
            "gresused": ",".join(f"shard:v100_{index}:{count}({count}/2)" for index, count in used.items()),
            "cpusstate": f"{len(here)}/{64 - len(here)}/0/64", "allocmem": "0", "memory": "256000",
        }  # fmt: skip

    def _update(self, change: dict[str, str]) -> None:
        job = self.jobs[int(change["JobId"])]
        job["admin_comment"] = change.get("AdminComment", job["admin_comment"])
        if "ReqNodeList" in change:
            job["reqnodes"] = change["ReqNodeList"]
        if "Gres" in change:
            job["tres-per-node"] = "gres/" + change["Gres"].split(",")[-1]
        if "StartTime" in change:
            job["eligibletime"] = str(int(self.now_s))

    def step(self, seconds: float) -> None:
        """Placed jobs start, jobs whose time is over end, new ones come."""
        self.now_s += seconds
        for number in list(self.jobs):
            job = self.jobs[number]
            if job["state"] == "RUNNING" and int(job["endtime"]) <= self.now_s:
                del self.jobs[number]
            elif job["state"] == "PENDING" and ":v100_" in job["tres-per-node"]:
                length = 60 + 37 * number % 1800
                job |= {"state": "RUNNING", "nodelist": job["reqnodes"], "reason": "None",
                        "starttime": str(int(self.now_s)), "endtime": str(int(self.now_s) + length)}  # fmt: skip
        while len(self.jobs) < self.length:
            self._submit()

    def _submit(self) -> None:
        number, now = self.next_id, str(int(self.now_s))
        self.next_id += 1
        self.jobs[number] = {
            "jobid": str(number), "jobarrayid": str(number), "arraytaskid": "N/A", "hetjobid": "N/A", "userid": "1000",
            "account": "science", "partition": "gpu", "state": "PENDING", "reason": "Priority", "prioritylong": "100",
            "nice": "0", "submittime": now, "eligibletime": str(int(self.now_s) + 30), "starttime": "N/A",
            "endtime": "N/A", "timelimit": "1:00:00", "numnodes": "1", "nodelist": "", "reqnodes": "",
            "oversubscribe": "OK", "requeue": "1", "restartcnt": "0", "tres-alloc": "cpu=1,mem=100M,node=1",
            "tres-per-node": "gres/gpu:1",
            "admin_comment": f"GS1:c={number % 3};t={token(number % 500)};o=gpu:1;l=1",
        }  # fmt: skip


def main(out: Path) -> None:
    result, large = _day(), []
    for size in LARGE:
        large.append(play(size, TICKS_OF_LARGE))
        print(json.dumps(large[-1]), flush=True)
    print(json.dumps(result, indent=1))
    (out / "helper.json").write_text(json.dumps(result | {"large": large}, indent=1) + "\n")


def _day() -> dict[str, object]:
    """A day of ticks."""
    played = PlayedSlurm()
    with tempfile.TemporaryDirectory() as directory:
        config = parse_config(f"Partitions=gpu\nGpusPerNode={GPUS}\nStoreUrl=sqlite:///{directory}/store.sqlite\n")
        with Store.create(config.store_url) as store:
            known = [
                KnownProfile(token(n), 1000, "V100", 2000 + n, 16384, n % 3, 60 + 37 * n % 1800) for n in range(500)
            ]
            enter_profiles(store, known)
            learner = Learner(store)
            # The policy that shares most, so that pairs come and go all day.
            slurm, clock = Slurm(played.run), lambda: played.now_s
            helper = Helper(config, slurm, store, learner.knowledge, policy="fcfs", clock=clock)
            played.step(0.0)
            reads, pairs, begun = [], 0, time.perf_counter()
            ticks = int(DAY_S / TICK_S)
            for number in range(ticks):
                before = played.requests
                report = helper.tick()
                changes = sum(report.outcomes.values())
                reads.append(played.requests - before - changes)
                pairs = max(pairs, report.pairs)
                played.step(TICK_S)
                if number % (ticks // 24) == 0:
                    print(f"hour {number * 24 // ticks:2}: {_rss_mib():.0f} MiB, {report.pairs} pairs", flush=True)
            took_s = time.perf_counter() - begun
    return {
        "ticks": ticks, "jobs_in_queue": JOBS, "jobs_seen": played.next_id, "most_pairs": pairs,
        "questions_a_tick_most": max(reads), "questions_a_tick_mean": round(sum(reads) / len(reads), 2),
        "ms_a_tick": round(1000 * took_s / ticks, 1), "memory_mib": round(_rss_mib()),
    }  # fmt: skip


def _rss_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
