"""The store: ingest of 10,000 sealed records, looking for damage, and look-ups by token in 1 k and 1 M workloads."""

from __future__ import annotations

import json
import os
import secrets
import sqlite3
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

from slurm_gpushare.protocol.attributes import ACTIVITY, ATTRIBUTES
from slurm_gpushare.protocol.record import (
    Closed,
    Features,
    Period,
    Record,
    RecordKind,
    Scope,
    Stat,
    encode_record,
    new_id,
)
from slurm_gpushare.protocol.tokens import OwnedToken, new_token
from slurm_gpushare.store import Store
from slurm_gpushare.store.credential import opener
from slurm_gpushare.store.database import Database
from slurm_gpushare.store.hookfile import HookFile
from slurm_gpushare.store.ingest import Ingest
from slurm_gpushare.store.maintenance import damage
from slurm_gpushare.store.workloads import Assignment

RECORDS, TOKENS, TIMES_OVER = 10_000, 3_000, 20
SMALL, LARGE = 1_000, 1_000_000
LEAST_PER_S, MOST_GROWTH = 2_000, 1.3


def main(out: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="gs-bench-") as name:
        os.chmod(name, 0o755)
        figures = {
            "ingest": _ingest(Path(name)), "damage": _damage(Path(name)), "look_up": _look_up(Path(name))
        }  # fmt: skip
    (out / "store.json").write_text(json.dumps(figures, indent=2) + "\n")


# --- ingest ---------------------------------------------------------------------------------------------------


def full_record(job_id: int) -> Record:
    """A record as large as real ones: every attribute is measured, and what is counted is whole."""
    stat = Stat(n=7200, max=61.25, mean=48.0625, min=1.5, p95=60.125, sd=7.5)
    count = Stat(n=7200, max=8, mean=8.0, min=8, p95=8, sd=0.0)
    stats = dict.fromkeys(ATTRIBUTES, stat) | dict.fromkeys(("cores", "job_processes", "job_threads"), count)
    activity = {attribute.name: stat for attribute in ACTIVITY}
    end_s = time.time() - 60
    return Record(
        record_id=new_id(), run_id=new_id(), seq=120, kind=RecordKind.FINAL, scope=Scope.JOB, job_id=job_id,
        node="gpu0",
        gpu_index=job_id % 4, gpu_model="V100", start_s=end_s - 3600, end_s=end_s, closed=Closed.LIMIT,
        features=Features(61.25, 30.0, 40.0, 48.0, 20.0, 4900.0, 16384.0),
        profile=Period(3600.0, 0.0, stats), alone=Period(3600.0, 0.0, activity),
        shared=Period(0.0, 0.0),
    )  # fmt: skip


@contextmanager
def _munged(folder: Path) -> Iterator[Path]:
    key, socket = folder / "munge.key", folder / "munge.sock"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
    argv = ["munged", "--foreground", "--force", f"--socket={socket}", *files]
    with subprocess.Popen(argv, stderr=subprocess.DEVNULL) as process:
        try:
            while not socket.exists() and process.poll() is None:
                time.sleep(0.02)
            yield socket
        finally:
            process.terminate()


def _ingest(folder: Path) -> dict[str, float]:
    incoming = folder / "spool" / "incoming"
    incoming.mkdir(parents=True)
    tokens = [new_token() for _ in range(TOKENS)]
    with _munged(folder) as socket, Store.create(f"sqlite:///{folder}/ingest.sqlite") as store:
        template = encode_record(full_record(1))

        def seal(job_id: int) -> None:
            made = json.loads(template) | {"job_id": job_id, "run_id": new_id(), "record_id": new_id()}
            command = ["munge", f"--socket={socket}"]
            line = json.dumps(made, separators=(",", ":")).encode()
            sealed = subprocess.run(command, input=line, capture_output=True, check=True).stdout
            (incoming / f"gpu0-{job_id}-f.rec").write_bytes(sealed)

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(seal, range(RECORDS)))
        ingest = Ingest(
            store,
            folder / "spool",
            opener(socket),
            lambda jobs: {j: OwnedToken(tokens[j % TOKENS], 1000) for j in jobs},
        )
        began, cpu_began = time.perf_counter(), time.process_time()
        counts = ingest.run_all().counts
        elapsed_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
    assert counts["counted"] == RECORDS, counts
    rate = RECORDS / elapsed_s
    print(f"ingest: {RECORDS} sealed records of {TOKENS} tokens, {len(template)} bytes each")
    print(f"        {elapsed_s:.2f} s, of which this process computes {cpu_s:.2f} s")
    print(f"        {rate:.0f} a second (at least {LEAST_PER_S} wanted: {'yes' if rate >= LEAST_PER_S else 'NO'})")
    return {"records": RECORDS, "bytes": len(template), "elapsed_s": elapsed_s, "cpu_s": cpu_s, "per_s": rate}


# --- looking for damage ---------------------------------------------------------------------------------------


def _damage(folder: Path) -> dict[str, float]:
    """The ingested records twenty times over, as if half a year had passed."""
    path = folder / "ingest.sqlite"
    with closing(sqlite3.connect(path)) as file, file:
        file.execute("PRAGMA synchronous=OFF")
        for copy in range(1, TIMES_OVER):
            shift = {"shift": copy * 2 * RECORDS}
            file.execute(
                f"INSERT INTO run_detail SELECT id + :shift, features, body FROM run_detail WHERE id <= {RECORDS}",
                shift,
            )
    figures = {"mib": path.stat().st_size / 2**20}
    with closing(Database(f"sqlite:///{path}", must_exist=True)) as database:
        for memory in ("cold", "warm"):
            if memory == "cold":
                _forget_pages(path)
            began, cpu_began = time.perf_counter(), time.process_time()
            assert not damage(database)
            figures |= {f"{memory}_s": time.perf_counter() - began, f"{memory}_cpu_s": time.process_time() - cpu_began}
            print(f"looking for damage in {figures['mib']:.0f} MiB, {memory}: {figures[f'{memory}_s']:.2f} s,"
                  f" {figures[f'{memory}_cpu_s']:.2f} s of it CPU")  # fmt: skip
    return figures


def _forget_pages(path: Path) -> None:
    """Let the kernel drop the file from memory."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


# --- look-up --------------------------------------------------------------------------------------------------


def _fill(url: str, count: int) -> list[str]:
    """A store with `count` profiled workloads; written past the store's interface, which takes runs only."""
    Store.create(url).close()
    tokens = sorted({new_token() for _ in range(count)})
    features = json.dumps(dict.fromkeys(("mgup", "mgmap", "mgtsamp", "gpu_util_mean_pct", "power_w_mean"), 12.5))
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as file, file:
        file.execute("PRAGMA synchronous=OFF")
        file.executemany(
            "INSERT INTO workload VALUES (?, 1000, 1, 0, 1, NULL, NULL, NULL)", ((token,) for token in tokens)
        )
        file.executemany(
            "INSERT INTO profile VALUES (?, 'V100', 1, 3, 4000, 16384, 600, ?, '{}', 1, 0, 1)",
            ((token, features) for token in tokens),
        )
        file.execute("INSERT INTO counter VALUES ('change_seq', 1)")
    return tokens


def _interleaved(actions: Sequence[Callable[[], object]], rounds: int = 400, burst: int = 10) -> list[float]:
    """Microseconds of each action in the best tenth of the rounds, taken in turn: other load on the machine meets
    all alike, and the rounds that it left alone count."""
    times: list[list[float]] = [[] for _ in actions]
    for _ in range(rounds):
        for kept, action in zip(times, actions, strict=True):
            began = time.perf_counter()
            for _ in range(burst):
                action()
            kept.append((time.perf_counter() - began) / burst * 1e6)
    return [statistics.quantiles(kept, n=10)[0] for kept in times]


def _look_up(folder: Path) -> dict[str, float]:
    stores, hooks, tokens = [], [], []
    for count in (SMALL, LARGE):
        url = f"sqlite:///{folder}/look{count}.sqlite"
        tokens.append(_fill(url, count))
        stores.append(Store(url))
        hook = HookFile(folder / f"hook{count}.sqlite")
        began = time.perf_counter()
        hook.sync(stores[-1])
        print(f"hook.sqlite of {count} workloads: written in {time.perf_counter() - began:.2f} s")
        hooks.append(hook)
    choose = secrets.SystemRandom().choice
    small, large = _interleaved([lambda i=i: stores[i].profiles.get(choose(tokens[i])) for i in (0, 1)])
    print(f"look-up by token: {small:.0f} us of {SMALL}, {large:.0f} us of {LARGE} workloads: {large / small:.2f} x "
          f"(at most {MOST_GROWTH} x wanted: {'yes' if large / small <= MOST_GROWTH else 'NO'})")  # fmt: skip
    syncs = _interleaved([lambda i=i: _one_change(stores[i], hooks[i], choose(tokens[i])) for i in (0, 1)], 20, 1)
    print(f"hook.sqlite after one change: {syncs[0] / 1000:.1f} ms of {SMALL}, {syncs[1] / 1000:.1f} ms of {LARGE}")
    return {
        "small_us": small,
        "large_us": large,
        "growth": large / small,
        "sync_small_us": syncs[0],
        "sync_large_us": syncs[1],
    }


def _one_change(store: Store, hook: HookFile, token: str) -> None:
    store.profiles.assign([Assignment(token, "V100", 2)])
    hook.sync(store)
