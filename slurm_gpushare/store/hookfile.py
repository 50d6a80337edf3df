"""``hook.sqlite``: the small file that the submit hook reads inside slurmctld.

It is a copy of what the store knows, kept up to date in place by single transactions: the hook sees the
state before one or after it. Since the store can always write it anew, it is not synced to disk, which keeps
the moment short in which a writer locks readers out; a damaged or missing file is replaced by rename.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, text

from slurm_gpushare.protocol.errors import GpushareError
from slurm_gpushare.protocol.files import hand_over, replacing, resource_dir
from slurm_gpushare.protocol.settings import DEFAULTS
from slurm_gpushare.store import statements
from slurm_gpushare.store.refine import gpus_in
from slurm_gpushare.store.store import Store
from slurm_gpushare.store.workloads import own_names, reported_models, to_measure

_BUSY_S = 5.0
PART_OF_HEADROOM = 0.5
"""What each of two jobs on a card may take of the memory that is left free beside their peaks."""
_Row = tuple[str, int, str, int | None]
_REMOVE = "DELETE FROM workload WHERE token = ?"
_PUT = "INSERT OR REPLACE INTO workload (token, uid, clusters, cpus) VALUES (?, ?, ?, ?)"


class HookFileError(GpushareError):
    """The hook's file cannot be written."""


class HookFile:
    """The hook's file at `path`. One process maintains it: the helper, as SlurmUser.

    It says on which of the site's shared GPU models a workload was measured, by the site's names of them.
    """

    def __init__(self, path: Path, site_models: Sequence[str] = ("v100",), *, gangs: bool = False) -> None:
        """`gangs`: whether jobs may share whole nodes, which the hook cannot ask Slurm."""
        self.path = path
        self.gangs = gangs
        self.stale = False
        """Whether configure knew another Slurm than the one that runs: the hook converts nothing then."""
        self._site_models = site_models
        self._names: dict[str, str] | None = None
        """The site's name by the cards' own, as the file has it."""

    def sync(self, store: Store, now_s: float | None = None, *, anew: bool = False) -> int:
        """Bring the file up to date with the store and beat the heart; returns how many workloads changed.

        Costs as much as there are changes since the last call, not as there are workloads; all of them if `anew`.
        """
        with self._errors():
            try:
                return self._rebuild(store, now_s) if anew else self._follow(store, now_s)
            except (sqlite3.DatabaseError, FileNotFoundError) as why:
                if isinstance(why, sqlite3.OperationalError) and "locked" in str(why):
                    raise
                return self._rebuild(store, now_s)

    def beat(self, now_s: float | None = None) -> None:
        """Say that the helper is alive."""
        with self._errors(), closing(self._connect()) as file, file:
            file.execute("UPDATE helper SET heartbeat_s = ?", (_seconds(now_s),))

    def heartbeat_s(self) -> int | None:
        """When the helper was last alive; None if the file is not there or cannot be read."""
        try:
            with closing(self._connect(mode="ro")) as file:
                row = file.execute("SELECT heartbeat_s FROM helper").fetchone()
        except (sqlite3.Error, FileNotFoundError):
            return None
        return int(row[0]) if row and row[0] else None

    def _sign(self, file: sqlite3.Connection, now_s: float | None, seq: int, epoch: int) -> None:
        """Say which state of the store this is, and that the helper is alive."""
        gangs = -1 if self.stale else int(self.gangs)
        told = (_seconds(now_s), seq, epoch, gangs)
        file.execute("UPDATE helper SET heartbeat_s = ?, change_seq = ?, epoch = ?, gangs = ?", told)

    def _follow(self, store: Store, now_s: float | None) -> int:
        with closing(self._connect()) as file:
            seq, epoch = file.execute("SELECT change_seq, epoch FROM helper").fetchone()
            with store.database.read() as connection:
                latest, store_epoch = _position(connection)
                names = self._site_names(connection)
                if epoch != store_epoch or seq > latest or names != self._names:
                    return self._rebuild(store, now_s)  # workloads were removed, or it is another store's file
                rows = list(_rows(connection, names, after=seq)) if latest > seq else []
                unmeasured = [(token,) for token in to_measure(connection)] if latest > seq else []
            with file:
                file.execute("BEGIN IMMEDIATE")
                file.executemany(_PUT, rows)
                file.executemany(_REMOVE, unmeasured)
                self._sign(file, now_s, latest, epoch)
            return len(rows)

    def _rebuild(self, store: Store, now_s: float | None) -> int:
        with replacing(self.path, 0o600, sync=True) as draft:
            with closing(sqlite3.connect(draft, isolation_level=None)) as file, store.database.read() as connection:
                file.execute("PRAGMA synchronous=OFF")
                file.executescript((resource_dir("sql") / "hook.sql").read_text())
                latest, epoch = _position(connection)
                file.execute("BEGIN")
                self._names = self._site_names(connection)
                count = file.executemany(_PUT, _rows(connection, self._names, after=0)).rowcount
                self._sign(file, now_s, latest, epoch)
                file.execute("COMMIT")
            hand_over(draft)
            # A journal left by a writer that died belongs to the old file and would spoil the new one.
            self.path.with_name(self.path.name + "-journal").unlink(missing_ok=True)
        return max(count, 0)

    def _site_names(self, connection: Connection) -> dict[str, str]:
        names = own_names(self._site_models, reported_models(connection))
        return {own: site for site, own in names.items()}

    def _connect(self, mode: str = "rw") -> sqlite3.Connection:
        if not self.path.exists():
            raise FileNotFoundError(self.path)
        file = sqlite3.connect(
            f"{self.path.absolute().as_uri()}?mode={mode}", uri=True, timeout=_BUSY_S, isolation_level=None
        )
        file.execute("PRAGMA synchronous=OFF")
        file.execute("PRAGMA cache_spill=OFF")  # no reader is locked out before the commit
        return file

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as why:
            reason = why.strerror if isinstance(why, OSError) and why.strerror else str(why)
            raise HookFileError(
                f"{self.path}: cannot be written: {reason}", "HookFile's directory must belong to SlurmUser."
            ) from why


def _position(connection: Connection) -> tuple[int, int]:
    return statements.get(connection, statements.CHANGE), statements.get(connection, statements.HOOK_EPOCH)


# CROSS JOIN keeps SQLite from starting with the profiles: it would walk through all of them for one change.
_CHANGED = text(
    """SELECT w.token, w.owner_uid, w.cpus, w.mem_floor_mib, p.gpu_model, p.cluster, p.features, p.mem_used_mib,
    p.mem_total_mib
    FROM workload w CROSS JOIN profile p ON p.token = w.token
    WHERE w.change_seq > :after AND p.cluster IS NOT NULL AND w.measure_since_s IS NULL"""
)


def _rows(connection: Connection, names: Mapping[str, str], after: int) -> Iterable[_Row]:
    """Workloads that changed after a position and have a cluster on one of these models."""
    if after:
        changed = connection.execute(_CHANGED, {"after": after})
        found: Iterable[Any] = sorted(changed, key=lambda row: row.token)
    else:
        found = connection.execute(text(f"{_CHANGED.text} ORDER BY w.token"), {"after": 0})
    shared = (row for row in found if row.gpu_model in names)
    for token, rows in groupby(shared, key=lambda row: row.token):
        measured = list(rows)
        here = (f"{names[it.gpu_model]}={it.cluster}/{gpus_in(it.features)}/{_most_mib(it)}" for it in measured)
        yield token, measured[0].owner_uid, ",".join(sorted(here)), measured[0].cpus


def _most_mib(row: Any) -> int:
    """What a job may take of a card's memory: its peak and its part of the headroom."""
    peak_mib = max(int(row.mem_used_mib), row.mem_floor_mib or 0)
    return peak_mib + round(float(row.mem_total_mib) * PART_OF_HEADROOM * DEFAULTS.memory_headroom_pct / 100)


def _seconds(now_s: float | None) -> int:
    return int(time.time() if now_s is None else now_s)
