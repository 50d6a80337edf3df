"""The helper over four weeks of ticks, of which it keeps one: do memory, files, threads, store and log level off?

Slurm and the clock are played (`bench_helper`), the daemon is the real one: it forgets old data by itself, once a day.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest.mock import patch

from gpushare_lab.known_profiles import KnownProfile, enter_profiles

from bench.bench_helper import DAY_S, GPUS, PlayedSlurm
from bench.large_site import token
from slurm_gpushare.helper.daemon import Daemon
from slurm_gpushare.helper.process import set_up_python
from slurm_gpushare.helper.tick import Helper
from slurm_gpushare.protocol.settings import Config, load_config
from slurm_gpushare.slurm.commands import Slurm
from slurm_gpushare.store import Store

DAYS = 28
TICK_S, JOBS = 480.0, 60
"""Five thousand ticks in all and a short queue, so that it takes minutes; jobs last up to half an hour."""
LEVEL = 1.10
"""The last week's most may be so many times that of the week before."""


@dataclass(frozen=True, slots=True)
class Day:
    """What the helper holds at a day's end."""

    day: int
    memory_mib: float
    files: int
    threads: int
    store_mib: float
    log_kib: float
    """Written on this day."""


def main(out: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        days, ticks, took_s = _play(Path(name))
    grew = {key: _grew(days, key) for key in ("memory_mib", "files", "threads", "store_mib", "log_kib")}
    result = {
        "days": DAYS, "ticks": ticks, "seconds": round(took_s), "keep_days": 7,
        "level": all(factor <= LEVEL for factor in grew.values()), "last_week_over_the_one_before": grew,
        "by_day": [asdict(day) for day in days],
    }  # fmt: skip
    (out / "weeks.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key != "by_day"}, indent=1))


def _grew(days: list[Day], key: str) -> float:
    """The most of the last week over the most of the week before."""
    last, before = (max(getattr(day, key) for day in week) for week in (days[-7:], days[-14:-7]))
    return round(float(last / before), 3)


def _config(directory: Path) -> Config:
    places = {"StoreUrl": f"sqlite:///{directory}/store.sqlite", "HookFile": f"{directory}/hook.sqlite",
              "SpoolDir": f"{directory}/spool", "StateDir": f"{directory}/state", "PublicDir": f"{directory}/public",
              "Partitions": "gpu", "GpusPerNode": str(GPUS), "KeepDays": "7", "EpilogHold": "0"}  # fmt: skip
    path = directory / "gpushare.conf"
    path.write_text("".join(f"{key}={value}\n" for key, value in places.items()))
    return load_config(path)


def _play(directory: Path) -> tuple[list[Day], int, float]:
    """Every day's end, the number of ticks, and how long it took."""
    log = directory / "log"
    logging.basicConfig(filename=log, level=logging.INFO, force=True)
    set_up_python()
    played, config, begun = PlayedSlurm(JOBS), _config(directory), time.perf_counter()
    days: list[Day] = []
    ticks, logged = 0, 0
    with _clock(lambda: played.now_s), Store.create(config.store_url) as store:
        known = ((n, token(n)) for n in range(500))
        enter_profiles(
            store, [KnownProfile(name, 1000, "V100", 2000 + n, 16384, n % 3, 60 + 37 * n % 1800) for n, name in known]
        )
        # The policy that shares most, so that pairs come and go all the time.
        daemon = Daemon(config, Slurm(played.run), store, policy="fcfs")
        played.step(0.0)
        for day in range(1, DAYS + 1):
            for _ in range(int(DAY_S / TICK_S)):
                daemon.once()
                played.step(TICK_S)
                ticks += 1
            size = log.stat().st_size
            days.append(_at_the_end_of(day, directory, size - logged))
            logged = size
            print(" ".join(f"{key}={value}" for key, value in asdict(days[-1]).items()), flush=True)
    return days, ticks, time.perf_counter() - begun


@contextmanager
def _clock(now_s: Callable[[], float]) -> Iterator[None]:
    """All that asks for the time is told `now_s`; the helper has its clock from a default value."""
    with patch("time.time", now_s), patch.dict(Helper.__init__.__kwdefaults__, {"clock": now_s}):
        yield


def _at_the_end_of(day: int, directory: Path, logged: int) -> Day:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    store = sum(path.stat().st_size for path in directory.glob("store.sqlite*"))
    return Day(
        day,
        round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1),
        len(os.listdir("/proc/self/fd")),
        threading.active_count(),
        round(store / 2**20, 2),
        round(logged / 1024, 1),
    )
