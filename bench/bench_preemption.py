"""How soon a job that may preempt starts where all cards are shared, and where nobody shares; and how much is shared
while such jobs come. Needs root. ``GPUSHARE_SLURM=bookworm|trixie|forky python -m bench preemption``.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections import defaultdict
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from gpushare_lab.experiment.helper_process import HelperProcess
from gpushare_lab.experiment.made_up_tokens import made_up_token
from gpushare_lab.experiment.submitting import submit
from gpushare_lab.known_profiles import KnownProfile, enter_profiles
from gpushare_lab.testbed.layout import Shape
from gpushare_lab.testbed.processes import wait_until
from gpushare_lab.testbed.reset import idle_nodes, reset
from gpushare_lab.testbed.testbed import Testbed

from slurm_gpushare.protocol.settings import load_config
from slurm_gpushare.slurm import runner
from slurm_gpushare.slurm.commands import Slurm
from slurm_gpushare.slurm.queue import Job
from slurm_gpushare.store import Store
from slurm_gpushare.store.hookfile import HookFile

CARDS, TOKENS, WITHIN_S = 4, 12, 90
BY = {"QOS": ("preempt/qos", "--qos=high"), "partition": ("preempt/partition_prio", "--partition=urgent")}
JOBS, EVERY_S, PREEMPTORS = 48, 10, 6
"""The queue of which it is asked how much is shared: so many jobs, and every so many seconds one that preempts."""
JOB_S = [4 + 7 * number % 24 for number in range(TOKENS)]


class Site:
    """A testbed whose QOS `high` and partition `urgent` may preempt."""

    def __init__(self, bed: Testbed) -> None:
        self.bed = bed
        self.slurm = Slurm(partial(runner.run, environ=os.environ | bed.env))
        bed.run(["sacctmgr", "-i", "add", "qos", "high", "preempt=normal", "priority=1000"])
        bed.run(["sacctmgr", "-i", "modify", "user", "root", "set", "qos=normal,high"])

    def configure(self, by: str, mode: str) -> None:
        reset(self.bed)
        conf = self.bed.layout.slurm_conf
        line = next(line for line in conf.read_text().splitlines() if line.startswith("PartitionName=gpu "))
        urgent = line.replace("=gpu ", "=urgent PriorityTier=10 ", 1).replace("Default=YES", "Default=NO")
        conf.write_text(f"{conf.read_text()}{urgent}\n")
        self.bed.configure({"PreemptType": by, "PreemptMode": mode}, {"Partitions": "gpu,urgent", "TickSeconds": "1"})
        idle_nodes(self.bed)
        config = load_config(self.bed.layout.gpushare_conf)
        with Store.create(config.store_url) as store:
            known = [KnownProfile(_token(n), os.getuid(), "V100", 2000, 16384, n % 3, JOB_S[n]) for n in range(TOKENS)]
            enter_profiles(store, known)
            HookFile(config.hook_file).sync(store, 0)

    def submit(self, number: int, seconds: int, shares: bool, *options: str) -> int:
        said = [f"--comment=gpushare:{_token(number % TOKENS)}"] if shares else []
        script = f"exec sleep {seconds}"
        return submit(self.bed, script, "--mem=100", "--time=5", "--output=/dev/null", *said, *options)

    def running(self) -> list[Job]:
        return [job for job in self.slurm.jobs() if job.running]

    def clear(self) -> None:
        self.bed.run(["scancel", "--user=root"])
        wait_until(lambda: not self.slurm.jobs(), 90)

    def seconds_to_start(self, option: str, gpus: int, shares: bool) -> float | None:
        """Of a job that may preempt, on cards that are all taken; None: not in time."""
        for number in range(3 * CARDS):
            self.submit(number, 600, shares, "--gres=gpu:1")
        full = 2 * CARDS if shares else CARDS
        wait_until(lambda: len(self.running()) == full, 90)
        began_s = time.monotonic()
        first = submit(self.bed, "exec sleep 60", "--mem=100", "--output=/dev/null", f"--gres=gpu:{gpus}", option)
        started = wait_until(lambda: any(job.raw_id == first for job in self.running()), WITHIN_S)
        took_s = time.monotonic() - began_s
        self.clear()
        return took_s if started else None

    def shared(self, option: str, preemptors: int) -> tuple[int, float]:
        """How many of a queue's jobs shared a card, and the part of the sharers' card time that two had."""
        for number in range(JOBS):
            self.submit(number, JOB_S[number % TOKENS], True, "--gres=gpu:1")
        began_s, came, with_another, looks = time.monotonic(), 0, set[int](), [0, 0]
        while jobs := self.slurm.jobs():
            if came < preemptors and time.monotonic() - began_s > (came + 1) * EVERY_S:
                came += 1
                submit(self.bed, "exec sleep 5", "--mem=100", "--output=/dev/null", "--gres=gpu:1", option)
            cards = defaultdict[tuple[str, str], list[int]](list)
            for job in jobs:
                if job.state == "RUNNING" and job.shard is not None and job.shard.count == 1:
                    cards[job.nodes[0], job.shard.type].append(job.raw_id)
            looks[0] += len(cards)
            looks[1] += sum(len(there) > 1 for there in cards.values())
            with_another.update(job for there in cards.values() if len(there) > 1 for job in there)
            time.sleep(0.5)
        return len(with_another), looks[1] / max(1, looks[0])


def _token(number: int) -> str:
    return made_up_token(f"preempted {number}")


def main(out: Path) -> None:
    suite = os.environ.get("GPUSHARE_SLURM", "trixie")
    found: dict[str, object] = {}
    with tempfile.TemporaryDirectory(prefix="gs-", dir="/tmp") as top:
        Path(top).chmod(0o755)
        bed = Testbed(Path(top, "bed")).up(Shape(nodes=2, gpus=CARDS // 2, shards=2), suite=suite)
        try:
            site = Site(bed)
            print(f"Slurm {bed.release}: seconds until a job that may preempt starts")
            for by, (kind, option) in BY.items() if "GPUSHARE_ONLY_SHARED" not in os.environ else ():
                for mode in ("REQUEUE", "CANCEL"):
                    for shares in (True, False):
                        site.configure(kind, mode)
                        with HelperProcess(bed, "fcfs") if shares else nullcontext():
                            for gpus in (1, 2):
                                took_s = site.seconds_to_start(option, gpus, shares)
                                what = f"{by}, {mode}, {gpus} GPU, {'all shared' if shares else 'nobody shares'}"
                                found[what] = took_s
                                print(f"  {what}: {'not in time' if took_s is None else f'{took_s:.1f} s'}", flush=True)
            for preemptors in (0, PREEMPTORS):
                site.configure(*BY["QOS"][:1], "REQUEUE")
                with HelperProcess(bed, "fcfs"):
                    jobs, part = site.shared(BY["QOS"][1], preemptors)
                found[f"shared with {preemptors} preemptors"] = (jobs, part)
                print(f"  {preemptors} preemptors: {jobs} of {JOBS} jobs shared, {100 * part:.0f} % of their card time")
        finally:
            bed.down(purge=True)
    (out / f"preemption-{suite}.json").write_text(json.dumps(found, indent=1) + "\n")
