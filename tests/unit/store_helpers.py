"""Records for the store's tests: one line makes a believable one."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from slurm_gpushare.protocol.record import Closed, Features, Period, Record, RecordKind, Scope, Stat, new_id
from slurm_gpushare.protocol.record_json import encode_record
from slurm_gpushare.protocol.tokens import OwnedToken
from slurm_gpushare.store import Store
from slurm_gpushare.store.credential import CredentialError, Sealed
from slurm_gpushare.store.ingest import Ingest

NOW = 1_800_000_000.0
ALICE, BOB = 1001, 1002


def token(number: int) -> str:
    letters = "abcdefghijklmnopqrstuvwxyz234567"
    digits = []
    for _ in range(20):
        number, rest = divmod(number, 32)
        digits.append(letters[rest])
    return "gs-" + "".join(digits)


def record(
    job_id: int = 1,
    *,
    util: float = 50.0,
    mem_pct: float = 25.0,
    mem_mib: float = 4000.0,
    seconds: float = 600.0,
    shared: bool = False,
    end_s: float = NOW - 60,
    **changes: object,
) -> Record:
    """A node's final record of a job alone on a V100; `changes` are fields of `Record`."""
    alone_s, shared_s = (0.0, seconds) if shared else (seconds, 0.0)
    stat = Stat(n=1200, max=util, mean=util, min=0.0, p95=util, sd=0.5)
    made = Record(
        record_id=new_id(),
        run_id=new_id(),
        seq=9,
        kind=RecordKind.FINAL,
        scope=Scope.JOB,
        job_id=job_id,
        node="gpu0",
        gpu_index=0,
        gpu_model="V100",
        start_s=end_s - seconds,
        end_s=end_s,
        closed=Closed.END,
        features=Features(util, mem_pct, util / 2, util, util / 2, mem_mib, 16384.0),
        profile=Period(alone_s, shared_s, {"gpu_util_pct": stat, "power_w": stat}),
        alone=Period(alone_s, 0.0),
        shared=Period(0.0, shared_s),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def command_record(job_id: int = 1, token: str | None = None, **changes: object) -> Record:
    """What a user's own ``gpushare profile`` writes."""
    return record(job_id, scope=Scope.COMMAND, token=token, **changes)  # type: ignore[arg-type]


def seal(made: Record | str, uid: int = 0) -> bytes:
    """Stands for munge where the test is not about munge: the uid in front of the payload."""
    return f"{uid}:{made if isinstance(made, str) else encode_record(made)}".encode()


def unseal(credential: bytes) -> Sealed:
    uid, colon, payload = credential.partition(b":")
    if not colon or not uid.isdigit():
        raise CredentialError("not a munge credential of this cluster")
    return Sealed(int(uid), payload)


class Tags(dict[int, OwnedToken]):
    """Slurm's answer about jobs, as a test sets it."""

    def __call__(self, job_ids: Collection[int]) -> Mapping[int, OwnedToken]:
        self.asked = sorted(job_ids)
        return {job: self[job] for job in job_ids if job in self}

    asked: list[int] | None = None


class Site:
    """A store, a spool directory and an ingest, as on a controller."""

    def __init__(self, url: str, spool_dir: Path) -> None:
        self.store = Store.create(url)
        self.spool_dir = spool_dir
        self.incoming = spool_dir / "incoming"
        self.incoming.mkdir(parents=True)
        self.tags = Tags()
        self.ingest = Ingest(self.store, spool_dir, unseal, self.tags, gpu_models=["V100"])

    def spool(self, *records: Record | str, uid: int = 0) -> list[Path]:
        paths = []
        for made in records:
            path = self.incoming / f"gpu0-{new_id()}.rec"
            path.write_bytes(seal(made, uid))
            paths.append(path)
        return paths

    def take(self, *records: Record, uid: int = 0) -> dict[str, int]:
        """Spool records, ingest them, and say what became of them."""
        self.spool(*records, uid=uid)
        return {name: count for name, count in self.ingest.run(NOW).counts.items() if count}


def overwrite_table(path: Path, table: str) -> None:
    """Garbage over the pages where a table and its indexes begin: the store opens as usual."""
    with closing(sqlite3.connect(path)) as file:
        pages = file.execute("SELECT rootpage FROM sqlite_master WHERE tbl_name = ?", (table,)).fetchall()
        (size,) = file.execute("PRAGMA page_size").fetchone()
        file.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # what is in the journal would hide it
    with path.open("r+b") as opened:
        for (page,) in pages:
            opened.seek((page - 1) * size)
            opened.write(b"\xa5" * size)
