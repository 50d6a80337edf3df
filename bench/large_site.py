"""A large site, played back to the helper: squeue's and sinfo's answers of that size come from real processes.

Rows are those that squeue 24.11 prints for such jobs (tests/fixtures/slurm/24.11), one for each job; the helper starts
a process for each question, reads its output through a pipe and parses it, as it does with the real squeue.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from gpushare_lab.known_profiles import KnownProfile, enter_profiles

from slurm_gpushare.helper.daemon import Daemon
from slurm_gpushare.helper.process import set_up_python
from slurm_gpushare.protocol.settings import Config, parse_config
from slurm_gpushare.slurm import nodes, queue, runner
from slurm_gpushare.slurm.commands import Slurm
from slurm_gpushare.store import Store

LETTERS = "abcdefghijklmnopqrstuvwxyz234567"
GPUS_PER_NODE = 4
TOKENS = 500


def token(number: int) -> str:
    return "gs-" + "".join(LETTERS[(number >> shift) % 32] for shift in range(0, 100, 5))


@dataclass(frozen=True, slots=True)
class Size:
    """How large."""

    pending: int
    gpus: int
    pairs: int


class LargeSite:
    """`pairs` cards with two sharers each, the others with one job that has the card whole, and a long queue."""

    def __init__(self, size: Size, directory: Path) -> None:
        self._size = size
        self._directory = directory
        self._now_s = int(time.time())
        self.questions = 0
        self._squeue = self._table(queue.COLUMNS, self._jobs(), "squeue")
        self._sinfo = self._table(nodes.COLUMNS, self._nodes(), "sinfo")

    def run(self, argv: Sequence[str], settings: Mapping[str, str] | None = None) -> str:
        """What `Slurm` calls instead of Slurm's commands."""
        if argv[:2] == ["sinfo", "--version"]:
            return "slurm 24.11.5"
        if argv[0] not in {"squeue", "sinfo"}:
            return ""
        self.questions += 1
        file = self._squeue if argv[0] == "squeue" else self._sinfo
        # The delimiter is another one for each question; sed's time is the helper's own wait for slurmctld.
        delimiter = "~" + (settings or {}).get("SQUEUE_FORMAT2", argv[-1]).split("~")[1] + "~"
        wanted = [argument.partition("=")[2] for argument in argv if argument.startswith("--jobs=")]
        either = r"\|".join(wanted[0].split(",")) if wanted else ".*"
        rows = [rf"/^\({either}\)@@/!d;"]
        return runner.run(["sed", "".join([*rows, f"s/@@/{delimiter}/g"]), str(file)])

    def _table(self, columns: Sequence[str], rows: Iterator[Mapping[str, str]], name: str) -> Path:
        path = self._directory / name
        with path.open("w") as out:
            for row in rows:
                out.write("".join(f"{row.get(column, '')}@@" for column in columns) + "\n")
        return path

    def _jobs(self) -> Iterator[dict[str, str]]:
        number = 0
        for gpu in range(self._size.gpus):
            for side in range(2 if gpu < self._size.pairs else 1):
                number += 1
                shards = 1 if gpu < self._size.pairs else 2
                yield self._job(number) | {
                    "state": "RUNNING", "reason": "None", "nodelist": f"n{gpu // GPUS_PER_NODE}",
                    "reqnodes": f"n{gpu // GPUS_PER_NODE}", "starttime": str(self._now_s - 600 + 60 * side),
                    "endtime": str(self._now_s + 3000),
                    "tres-per-node": f"gres/shard:v100_{gpu % GPUS_PER_NODE}:{shards}",
                    "admin_comment": f"GS1:c={number % 3};t={token(number % TOKENS)};o=gpu:1;"
                                     f"g=n{gpu // GPUS_PER_NODE}:{gpu % GPUS_PER_NODE}",
                }  # fmt: skip
        for _ in range(self._size.pending):
            number += 1
            yield self._job(number)

    def _job(self, number: int) -> dict[str, str]:
        return {
            "jobid": str(number), "jobarrayid": str(number), "arrayjobid": str(number), "arraytaskid": "N/A",
            "hetjobid": "N/A", "userid": str(1000 + number % 50), "account": f"lab{number % 7}", "partition": "gpu",
            "qos": "normal",
            "reservation": "(null)", "state": "PENDING", "reason": "Priority",
            "prioritylong": str(100_000 - number), "nice": "0", "submittime": str(self._now_s - 3600),
            "eligibletime": str(self._now_s - 3570), "starttime": "N/A", "endtime": "N/A", "timelimit": "1:00:00",
            "numnodes": "1", "feature": "(null)", "excnodes": "", "oversubscribe": "OK", "dependency": "(null)",
            "requeue": "1", "restartcnt": "0", "tres-alloc": "cpu=4,mem=8000M,node=1,billing=4",
            "tres-per-job": "N/A", "tres-per-node": "gres/gpu:1", "tres-per-socket": "N/A", "tres-per-task": "N/A",
            "cpus-per-tres": "N/A", "mem-per-tres": "N/A",
            "admin_comment": f"GS1:c={number % 3};t={token(number % TOKENS)};o=gpu:1",
        }  # fmt: skip

    def _nodes(self) -> Iterator[dict[str, str]]:
        types = [f"v100_{index}" for index in range(GPUS_PER_NODE)]
        for number in range(self._size.gpus // GPUS_PER_NODE):
            yield {
                "nodelist": f"n{number}", "statecomplete": "mixed", "features_act": "v100",
                "partitionname": "gpu", "cpusstate": "32/32/0/64", "allocmem": "64000", "memory": "256000",
                "gres": ",".join([f"gpu:{kind}:1" for kind in types] + [f"shard:{kind}:2" for kind in types]),
                "gresused": ",".join(f"shard:{kind}:2(2/2)" for kind in types),
            }  # fmt: skip


def play(size: Size, ticks: int, policy: str | None = None) -> dict[str, float]:
    """Ticks of the whole helper on such a site: the slowest, the typical one, and how often it asked Slurm."""
    with tempfile.TemporaryDirectory() as directory:
        where = Path(directory)
        (where / "spool" / "incoming").mkdir(parents=True)
        site = LargeSite(size, where)
        config: Config = parse_config(
            f"Partitions=gpu\nGpusPerNode={GPUS_PER_NODE}\nStoreUrl=sqlite:///{where}/store.sqlite\n"
            f"HookFile={where}/hook.sqlite\nSpoolDir={where}/spool\nStateDir={where}\nPublicDir={where}/public\n"
        )
        with Store.create(config.store_url) as store:
            known = [KnownProfile(token(n), 1000, "V100", 2000 + n, 16384, n % 3, 600.0 + n) for n in range(TOKENS)]
            enter_profiles(store, known)
            set_up_python()
            daemon = Daemon(config, Slurm(site.run), store, policy=policy)
            took_s, cpu_s, plan_s, pairs = [], [], [], 0
            for _ in range(ticks):
                begun, cpu_begun = time.perf_counter(), _cpu_s()
                report = daemon.once()
                took_s.append(time.perf_counter() - begun)
                cpu_s.append(_cpu_s() - cpu_begun)
                plan_s.append(report.plan_s)
                pairs = report.pairs
    return {
        "pending": size.pending, "gpus": size.gpus, "pairs": pairs,
        "first_tick_s": round(took_s[0], 2), "first_tick_cpu_s": round(cpu_s[0], 2),
        "tick_s": round(median(took_s[1:]), 2), "tick_s_most": round(max(took_s[1:]), 2),
        "tick_cpu_s": round(median(cpu_s[1:]), 2), "tick_cpu_s_most": round(max(cpu_s[1:]), 2),
        "plan_s": round(median(plan_s[1:]), 2), "questions_a_tick": round(site.questions / ticks, 2),
    }  # fmt: skip


def _cpu_s() -> float:
    """Processor time of this process and of the questions that it has asked: a busy machine does not lengthen it."""
    return sum(os.times()[:4])
