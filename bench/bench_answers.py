"""Empty cards: how soon the helper answers a node while a tick waits for a long queue.

10,000 jobs wait, and Slurm takes five seconds to say so. 200 jobs end one after the other, each on a card of its own;
from the line that EpilogSlurmctld writes to that in the node's answer file, a job is chosen, read again and changed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpushare_lab.known_profiles import KnownProfile, enter_profiles

from bench.large_site import GPUS_PER_NODE, TOKENS, LargeSite, Size, token
from slurm_gpushare.helper.daemon import Daemon
from slurm_gpushare.helper.process import set_up_python
from slurm_gpushare.protocol.settings import parse_config
from slurm_gpushare.slurm.commands import Slurm
from slurm_gpushare.store import Store

SIZE = Size(pending=10_000, gpus=2_500, pairs=0)
SQUEUE_S = 5.0
ENDS = 200
PATIENCE_S = 30.0


class SlowSite(LargeSite):
    """A site whose whole queue takes long to be told; single jobs, which slurmctld finds by their ids, do not."""

    updates = 0

    def run(self, argv: Sequence[str], settings: Mapping[str, str] | None = None) -> str:
        if argv[:2] == ["scontrol", "update"]:
            self.updates += 1
        if argv[:4] == ["scontrol", "show", "config"]:
            return ""
        if argv[0] == "squeue" and not any(word.startswith("--jobs=") for word in argv):
            time.sleep(SQUEUE_S)
        return super().run(argv, settings)


def main(out: Path) -> None:
    with tempfile.TemporaryDirectory() as directory:
        result = _play(Path(directory))
    print(json.dumps(result, indent=1))
    (out / "answers.json").write_text(json.dumps(result, indent=1) + "\n")


def _play(where: Path) -> dict[str, float]:
    (where / "spool").mkdir()
    site, took_s, late_s = SlowSite(SIZE, where), list[float](), list[float]()
    config = parse_config(
        f"Partitions=gpu\nGpusPerNode={GPUS_PER_NODE}\nStoreUrl=sqlite:///{where}/store.sqlite\nEpilogHold=1\n"
        f"HookFile={where}/hook.sqlite\nSpoolDir={where}/spool\nStateDir={where}\nPublicDir={where}/public\n"
    )
    with Store.create(config.store_url) as store:
        known = [KnownProfile(token(n), 1000, "V100", 2000 + n, 16384, n % 3, 600.0 + n) for n in range(TOKENS)]
        enter_profiles(store, known)
        set_up_python()
        daemon = Daemon(config, Slurm(site.run), store)
        ends = threading.Thread(target=_end_jobs, args=(where, took_s), daemon=True)
        ends.start()
        watch_delays(daemon, late_s)
        daemon.run()
    took_s.sort()
    return {
        "pending": SIZE.pending, "squeue_s": SQUEUE_S, "ends": len(took_s), "placed": site.updates,
        "answer_ms_median": round(1000 * statistics.median(took_s)), "answer_ms_p99": round(1000 * took_s[-3]),
        "answer_ms_most": round(1000 * took_s[-1]),
        "between_two_looks_ms_p99": round(1000 * sorted(late_s)[-max(1, len(late_s) // 100)]),
        "between_two_looks_ms_most": round(1000 * max(late_s)),
    }  # fmt: skip


def watch_delays(daemon: Daemon, late_s: list[float]) -> None:
    """How long the loop does not look at events: how late a call every 10 ms comes."""
    opened = daemon._loop.open

    def open_and_watch() -> object:
        aio = opened()

        def look(due_s: float) -> None:
            late_s.append(time.monotonic() - due_s)
            due_s = time.monotonic() + 0.01
            aio.call_at(due_s, look, due_s)

        look(time.monotonic())
        return aio

    daemon._loop.open = open_and_watch  # type: ignore[method-assign,assignment]


def _end_jobs(where: Path, took_s: list[float]) -> None:
    dice, board = random.Random(1), where / "spool" / "hold"
    try:
        while [*_words(board / "helper"), "0", "0"][1] == "0":  # nobody is known to wait yet
            time.sleep(0.1)
        time.sleep(1.0)
        for number in range(1, ENDS + 1):
            gpu = number * 7 % SIZE.gpus
            job, node = gpu + 1, f"n{gpu // GPUS_PER_NODE}"
            begun_s = time.monotonic()
            with (where / "ended").open("w") as pipe:
                pipe.write(f"{job} {node}\n")
            while str(job) not in _words(board / "answers" / node) and time.monotonic() < begun_s + PATIENCE_S:
                time.sleep(0.002)
            took_s.append(time.monotonic() - begun_s)
            time.sleep(dice.uniform(0.05, 0.4))
    finally:
        os.kill(os.getpid(), signal.SIGTERM)


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
