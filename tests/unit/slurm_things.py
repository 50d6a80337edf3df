"""Jobs and nodes for tests: only what a test is about needs to be said."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

from slurm_gpushare.protocol.release import Release
from slurm_gpushare.protocol.tag import parse_tag
from slurm_gpushare.slurm.commands import CommandSlurm
from slurm_gpushare.slurm.gres import parse_gres, parse_used
from slurm_gpushare.slurm.nodes import Node
from slurm_gpushare.slurm.queue import Job

OLD, NEW = Release(22, 5, 8), Release(24, 11, 5)
NOW = 1_800_000_000
TOKEN_A, TOKEN_B, TOKEN_C = ("gs-" + letter * 20 for letter in "abc")


def job(key: str = "1", **changes: Any) -> Job:
    """A pending job of user 1000 that asks for one GPU; `tag=` writes the AdminComment."""
    raw = key.split("_")[0]
    values: dict[str, Any] = {
        "key": key, "raw_id": int(raw), "array_id": int(raw) if "_" in key else None,
        "task_id": int(key.split("_")[1]) if "_" in key else None, "het": False, "uid": 1000, "account": "science",
        "partitions": ("gpu",), "reservation": "", "state": "PENDING", "reason": "Priority", "priority": 100,
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
        "usage": parse_used(used, exact=release.counts_shards_per_gpu), "features": ("v100",), "cpus": 64,
        "cpus_alloc": 0, "mem_mib": 64000, "mem_alloc_mib": 0, "partitions": ("gpu",),
    }  # fmt: skip
    return Node(**values | changes)


class WatchedSlurm(CommandSlurm):
    """A queue in memory that notes every attempt to change something."""

    def __init__(self, jobs: Sequence[Job], nodes: Sequence[Node]) -> None:
        super().__init__(lambda argv: "slurm 24.11.5")
        self.queue, self.all_nodes = list(jobs), list(nodes)
        self.written: list[tuple[str, str]] = []
        self.limits: dict[str, int] = {}
        """Time limits that were written, in minutes."""

    def jobs(self, only: Iterable[str] = ()) -> list[Job]:
        wanted = set(only)
        return [item for item in self.queue if not wanted or item.key in wanted]

    def comments(self, only: Iterable[str] = ()) -> dict[str, str]:
        return {item.key: f"gpushare:{TOKEN_A}" for item in self.queue}

    def batch_jobs(self, only: Iterable[str]) -> frozenset[str]:
        return frozenset(only)

    def nodes(self, only: Iterable[str] = ()) -> list[Node]:
        return self.all_nodes

    def partitions(self) -> list[Any]:
        return []

    def reservations(self) -> list[Any]:
        return []

    def update_job(self, key: str, changes: Any) -> None:
        self.written.append(("update", key))
        if "TimeLimit" in changes:
            self.limits[key] = int(changes["TimeLimit"])

    def suspend(self, key: str) -> None:
        self.written.append(("suspend", key))

    def resume(self, key: str) -> None:
        self.written.append(("resume", key))

    def signal(self, key: str, name: str) -> None:
        self.written.append(("signal", key))

    def requeue(self, key: str) -> None:
        self.written.append(("requeue", key))
