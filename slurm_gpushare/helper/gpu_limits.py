"""Limits of QOS and associations on GPUs, counted as cards that are held. Slurm cannot: to it shards are no GPUs.

A job that shares holds half of a card, one that sits there alone holds all of it. Nobody is placed where that would
pass a limit on ``gres/gpu``, nor where Slurm's own limit on ``gres/shard`` would keep the job waiting.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from slurm_gpushare.helper.occupancy import CardUse, GpuAddress
from slurm_gpushare.helper.snapshot import FOREVER, LimitRoom, Occupant, PendingJob
from slurm_gpushare.protocol.files import uid_of
from slurm_gpushare.slurm.accounting import Limit
from slurm_gpushare.slurm.queue import Job

_OF_A_JOB = frozenset({"MaxTRES", "MaxTRESPerNode"})
_OF_ALL = frozenset({"GrpTRES", "MaxTRESPerUser", "MaxTRESPerAccount"})


class _Scope(NamedTuple):
    """A limit, and the jobs that it counts; fields that are None do not matter."""

    limit: Limit
    qos: str | None
    account: str | None
    uid: int | None

    def counts(self, job: Job) -> bool:
        return (
            self.qos in (None, job.qos)
            and self.account in (None, job.account)
            and self.uid in (None, job.uid)
            and self.limit.owner.get("partition", job.partitions[0]) in job.partitions
        )

    def key(self, job: Job) -> str:
        """The same for jobs that count together."""
        who = {"MaxTRESPerUser": f" {job.uid}", "MaxTRESPerAccount": f" {job.account}"}.get(self.limit.name, "")
        return f"{self.limit}{who}"


@dataclass(frozen=True, slots=True)
class SiteLimits:
    """Limits on GPUs and shards that Slurm enforces. An account's own jobs count, those of accounts below it do not."""

    scopes: tuple[_Scope, ...] = ()

    @classmethod
    def of(cls, config: Mapping[str, str], limits: Iterable[Limit]) -> SiteLimits:
        """None where `AccountingStorageEnforce` has no limits."""
        if not {"limits", "safe"} & set(config.get("AccountingStorageEnforce", "").split(",")):
            return cls()
        ours = [item for item in limits if {"gres/gpu", "gres/shard"} & item.tres.keys()]
        return cls(tuple(_scope(item) for item in ours if item.name in _OF_A_JOB | _OF_ALL))

    def room(
        self, jobs: Iterable[Job], cards: Mapping[GpuAddress, CardUse]
    ) -> tuple[dict[str, tuple[str, ...]], dict[str, LimitRoom]]:
        """The limits of each job, by key; and what is left below each of them."""
        of_job: dict[str, tuple[str, ...]] = {}
        left: dict[str, LimitRoom] = {}
        held, shards = _held(cards) if self.scopes else ({}, {})
        for job in jobs if self.scopes else ():
            mine = [scope for scope in self.scopes if scope.counts(job)]
            of_job[job.key] = tuple(scope.key(job) for scope in mine)
            for scope in mine:
                most = LimitRoom(*(_most(scope.limit, name) for name in ("gres/gpu", "gres/shard")))
                before = left.setdefault(scope.key(job), most)
                if scope.limit.name in _OF_ALL:
                    whole = held.get(job.key, sum(gres.count for gres in job.gres if gres.name == "gpu"))
                    taken = LimitRoom(whole if job.running or job.key in held else 0.0, shards.get(job.key, 0))
                    left[scope.key(job)] = LimitRoom(before.cards - taken.cards, before.shards - taken.shards)
        return of_job, left


def _scope(limit: Limit) -> _Scope:
    owner = limit.owner
    qos = owner["name"] if limit.kind == "qos" else None
    uid = uid_of(owner["user"]) if "user" in owner else None
    return _Scope(limit, qos, owner.get("account"), -1 if "user" in owner and uid is None else uid)


def _most(limit: Limit, name: str) -> float:
    value = limit.tres.get(name, "")
    return float(value) if value.isdecimal() else FOREVER


def _held(cards: Mapping[GpuAddress, CardUse]) -> tuple[dict[str, float], dict[str, int]]:
    """By key, the cards that each job holds, and its shards in Slurm's books."""
    held: dict[str, float] = defaultdict(float)
    shards: dict[str, int] = defaultdict(int)
    for use in cards.values():
        there = [*use.occupants, *use.coming]
        for share in there:
            held[share.job.key] += 1.0 / max(1, len(there))
            if not any(gres.name == "gpu" and gres.count for gres in share.job.gres):
                shards[share.job.key] += share.shards
    return held, shards


class LimitLedger:
    """What is left below the limits while places are handed out."""

    def __init__(self, room: Mapping[str, LimitRoom]) -> None:
        self._left = dict(room)

    def allows(self, job: PendingJob, beside: Occupant | None) -> bool:
        """Whether the job may have a place, first there or beside somebody who has it alone until now."""
        width = job.workload.width
        return all(
            self._left[key].cards >= _more(key, width, beside) and self._left[key].shards >= width
            for key in job.workload.limits
        )

    def take(self, job: PendingJob, beside: Occupant | None) -> None:
        """It has it: the resident's own limits count half of the place less."""
        width = job.workload.width
        for key in job.workload.limits:
            left = self._left[key]
            self._left[key] = LimitRoom(left.cards - _more(key, width, beside), left.shards - width)
        for key in set(beside.workload.limits if beside else ()) - set(job.workload.limits):
            self._left[key] = LimitRoom(self._left[key].cards + width / 2.0, self._left[key].shards)


def _more(key: str, width: int, beside: Occupant | None) -> float:
    """By how many cards the limit's count grows."""
    if beside is None:
        return float(width)
    return 0.0 if key in beside.workload.limits else width / 2.0
