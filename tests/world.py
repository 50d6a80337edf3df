"""The world that unit tests live in: jobs and nodes, a Slurm that answers, cards to plan with, a store with records.

Only what a test is about needs to be said; everything else is an ordinary case.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from slurm_gpushare.helper.changes import Change
from slurm_gpushare.helper.placements import as_changed
from slurm_gpushare.helper.plan import plan
from slurm_gpushare.helper.snapshot import Gpu, How, NodeRoom, Occupant, PendingJob, Placement, Plan, Snapshot, Workload
from slurm_gpushare.knowledge.rates import RateTable
from slurm_gpushare.protocol.policy import PolicySettings
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
from slurm_gpushare.protocol.release import Release
from slurm_gpushare.protocol.tag import parse_tag
from slurm_gpushare.protocol.tokens import OwnedToken
from slurm_gpushare.slurm.accounting import AccountedJob, AccountingQuery
from slurm_gpushare.slurm.commands import Slurm
from slurm_gpushare.slurm.nodes import Node
from slurm_gpushare.slurm.queue import Job
from slurm_gpushare.slurm.runner import JobMovedOn
from slurm_gpushare.slurm.values import parse_gres, parse_used
from slurm_gpushare.store import Store
from slurm_gpushare.store.credential import CredentialError, Sealed
from slurm_gpushare.store.ingest import Ingest

# Slurm: jobs, nodes, and who answers for them.

OLD, NEW = Release(22, 5, 8), Release(24, 11, 5)
NOW = 1_800_000_000
TOKEN_A, TOKEN_B, TOKEN_C = ("gs-" + letter * 20 for letter in "abc")


def job(key: str = "1", **changes: Any) -> Job:
    """A pending job of user 1000 that asks for one GPU; `tag=` writes the AdminComment."""
    raw = key.split("_")[0]
    values: dict[str, Any] = {
        "key": key, "raw_id": int(raw), "array_id": int(raw) if "_" in key else None,
        "task_id": int(key.split("_")[1]) if "_" in key else None, "het": False, "uid": 1000, "account": "science",
        "qos": "normal", "partitions": ("gpu",), "reservation": "", "state": "PENDING", "reason": "Priority",
        "priority": 100,
        "nice": 0, "submit_s": NOW - 100, "eligible_s": NOW - 100, "start_s": None, "end_s": None, "limit_s": 3600,
        "num_nodes": 1, "nodes": (), "wanted_nodes": "", "excluded_nodes": (), "features": "", "exclusive": False,
        "dependency": "", "requeue": True, "restarts": 0, "cpus": 4, "mem_mib": 1000, "per_job": "",
        "per_node": "gres/gpu:1", "per_socket": "", "per_task": "", "per_gpu_extras": False,
        "admin_comment": "",
    }  # fmt: skip
    values |= changes
    values["admin_comment"] = values.pop("tag", None) or values["admin_comment"]
    assert values.keys() <= {field.name for field in fields(Job)}
    return Job(**values, tag=parse_tag(values["admin_comment"]))


def running(key: str, node: str, per_node: str, **changes: Any) -> Job:
    """The same job, running on `node`."""
    values = {"state": "RUNNING", "reason": "", "nodes": (node,), "per_node": per_node, "start_s": NOW - 60} | changes
    return job(key, **values)


def node(name: str = "n0", used: str = "", release: Release = NEW, **changes: Any) -> Node:
    """A healthy node with two GPUs of two shards each."""
    values: dict[str, Any] = {
        "name": name, "states": frozenset({"mixed"}), "responding": True,
        "gres": parse_gres("gpu:v100_0:1,gpu:v100_1:1,shard:v100_0:2,shard:v100_1:2"),
        "usage": parse_used(used, exact=release.can("counts_shards_per_gpu")), "features": ("v100",), "cpus": 64,
        "cpus_alloc": 0, "mem_mib": 64000, "mem_alloc_mib": 0, "partitions": ("gpu",),
    }  # fmt: skip
    return Node(**values | changes)


class FakeSlurm(Slurm):
    """A Slurm in memory, which takes every change and notes it in `written`.

    A job in `started` was started by Slurm behind our back. `on_look` is called with its number before each look at
    the queue, `on_change` with what is done to which job before it is done: both may raise as Slurm's commands do.
    """

    release = NEW

    def __init__(
        self,
        jobs: Iterable[Job] = (),
        nodes: Iterable[Node] = (),
        *,
        on_look: Callable[[int], None] = lambda number: None,
        comment: str | None = f"gpushare:{TOKEN_A}",
    ) -> None:
        super().__init__()
        self.all_nodes = {item.name: item for item in nodes}
        self.started: dict[str, Job] = {}
        self.written: list[tuple[str, str]] = []
        self.limits: dict[str, int] = {}
        """Time limits that were written, in minutes."""
        self.on_look = on_look
        self.on_change: Callable[[str, str], None] = lambda what, key: None
        self.comment = comment
        """What the owner of every job wrote; None: nothing is known of it."""
        self.looks = 0
        self.queue: dict[str, Job] = {}
        self.now_has(jobs)

    def ping(self) -> str:
        return "Slurmctld(primary) at ctl1 is UP\n"

    def now_has(self, jobs: Iterable[Job]) -> None:
        """All other jobs are gone."""
        self.queue = {item.key: item for item in jobs}

    def jobs(self, only: Iterable[str] = ()) -> list[Job]:
        self.looks += 1
        self.on_look(self.looks)
        now, wanted = self.queue | self.started, set(only)
        return [item for key, item in now.items() if not wanted or key in wanted]

    def comments(self, only: Iterable[str] = ()) -> dict[str, str]:
        return {} if self.comment is None else dict.fromkeys(self.queue, self.comment)

    def batch_jobs(self, only: Iterable[str]) -> frozenset[str]:
        return frozenset(only)

    def nodes(self, only: Iterable[str] = ()) -> list[Node]:
        wanted = set(only)
        return [item for name, item in self.all_nodes.items() if not wanted or name in wanted]

    def config(self) -> dict[str, str]:
        return {}

    def accounting(self, query: AccountingQuery) -> list[AccountedJob]:
        return []

    def partitions(self) -> list[Any]:
        return []

    def reservations(self) -> list[Any]:
        return []

    def update_job(self, key: str, changes: Mapping[str, str]) -> None:
        self._note("update", key)
        if "TimeLimit" in changes:
            self.limits[key] = int(changes["TimeLimit"])
        if key in self.queue:
            self.queue[key] = as_changed(self.queue[key], Change(key, changes))

    def resume(self, key: str) -> None:
        self._note("resume", key)

    def signal(self, name: str, *keys: str) -> None:
        for key in keys:
            self._note("signal", key)

    def requeue(self, *keys: str) -> None:
        for key in keys:
            self._note("requeue", key)

    def cancel(self, *keys: str) -> None:
        for key in keys:
            self._note("cancel", key)

    def _note(self, what: str, key: str) -> None:
        self.on_change(what, key)
        if key in self.started:
            raise JobMovedOn("scontrol: Job is no longer pending execution")
        self.written.append((what, key))


# The plan: cards, who runs on them and who waits.

SETTINGS = PolicySettings()


class Flat:
    """Every rate is the same; `low` is the pessimistic end."""

    def __init__(self, mean: float = 0.8, low: float | None = None) -> None:
        self.mean, self.low = mean, mean if low is None else low

    def rates(self, victims: Sequence[str], neighbours: Sequence[str]) -> RateTable:
        shape = (len(victims), len(neighbours))
        return RateTable(np.full(shape, self.mean), np.full(shape, self.low))

    def observe(self, victim: str, neighbour: str, rate: float, weight: float = 1.0) -> None:
        raise AssertionError("the plan never learns")


def occupant(key: str = "r", **changes: Any) -> Occupant:
    """A resident of 10 000 s that has run for 1000."""
    usual = Workload("gs-r", 2, user="ann", account="physics", mem_used_mib=8000, limit_s=30_000, expected_s=10_000)
    return changed(Occupant(key, usual, start_s=NOW - 1000), **changes)


def pending(key: str = "p", **changes: Any) -> PendingJob:
    """A short job that fits everywhere."""
    usual = Workload("gs-p", 0, user="bob", account="biology", mem_used_mib=4000, limit_s=600, expected_s=300)
    return changed(PendingJob(key, usual, cpus=4, node_mem_mib=1000, eligible_s=NOW - 60), **changes)


WORKLOAD = {item.name for item in fields(Workload)}
AnyJob = TypeVar("AnyJob", Occupant, PendingJob)


def changed(job: AnyJob, **changes: Any) -> AnyJob:
    """The same with other values, of the job or of its workload."""
    own = {name: changes.pop(name) for name in WORKLOAD & changes.keys()}
    return replace(job, workload=replace(job.workload, **own), **changes)


def card(*occupants: Occupant, node: str = "n1", index: int = 0, **changes: Any) -> Gpu:
    return replace(Gpu(node, index, "v100", 16_000, occupants=tuple(occupants)), **changes)


def decide(
    gpus: Sequence[Gpu],
    jobs: Sequence[PendingJob],
    nodes: Sequence[NodeRoom] = (NodeRoom("n1", 32, 100_000),),
    knowledge: Flat | None = None,
    settings: PolicySettings = SETTINGS,
    **changes: Any,
) -> Plan:
    room = {node.name: node for node in nodes}
    snapshot = Snapshot(NOW, tuple(gpus), room, tuple(jobs), mean_duration_s={1: 2000.0, 2: 2000.0})
    return plan(replace(snapshot, **changes), knowledge or Flat(), settings)


def places(got: Plan) -> dict[str, tuple[str, int, How]]:
    return {p.key: (p.place.node, p.place.first, p.how) for p in got.placements}


def only(got: Plan) -> Placement:
    assert len(got.placements) == 1, got
    return got.placements[0]


BESIDE_RESIDENT = {"p": ("n1", 0, How.BESIDE)}
NOWHERE: dict[str, tuple[str, int, How]] = {}


# The store: records, and the controller that takes them in.

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
