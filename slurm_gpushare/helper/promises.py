"""How jobs stand with their promises, when the one that came last must stand still for them, and who does now."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from slurm_gpushare.helper import explain, log
from slurm_gpushare.helper.changes import Applied, Change, Outcome, apply
from slurm_gpushare.helper.pairs import Pair
from slurm_gpushare.protocol.errors import GpushareError, SlurmError
from slurm_gpushare.protocol.history import Decision
from slurm_gpushare.protocol.record import Record
from slurm_gpushare.protocol.settings import Config
from slurm_gpushare.protocol.stop_orders import EXPIRY_S, LONGEST_PAUSE_S, StopOrder, order_file, write_order
from slurm_gpushare.protocol.tag import Paused, with_tag
from slurm_gpushare.slurm.commands import Slurm
from slurm_gpushare.slurm.queue import Job
from slurm_gpushare.store import Store

SURE = 1.645
"""Standard deviations: 95 % sure that it is no better than this."""
NEARLY_SURE = 0.75
"""Of a promise that is about to be broken, so much must have been lost for sure before anything is done."""


@dataclass(frozen=True, slots=True)
class PromiseStatus:
    """How a job stands with its promise."""

    promise_pct: float
    run_s: float
    """Alone-time of its whole run if that is short, and at least what it has done."""
    lost_s: float = 0.0
    """To neighbours and to pauses."""
    shared_s: float = 0.0
    """Of its run, the time beside its present neighbour."""
    loss: float = 0.0
    """What each second beside its present neighbour costs it, as measured."""
    error: float = 0.0
    """How far that may be off (one standard deviation)."""
    measured: bool = True
    untold: bool = False
    """Somebody uses its card of whom nobody can say how much: what it loses is not known, so they are kept apart."""

    @property
    def promised_s(self) -> float:
        return self.promise_pct / 100.0 * self.run_s

    @property
    def budget_s(self) -> float:
        """Delay that the promise still leaves."""
        return self.promised_s - self.lost_s

    @property
    def slowed_pct(self) -> float:
        """Of its run."""
        return 100.0 * self.lost_s / self.run_s if self.run_s > 0 else 0.0

    @property
    def _surely_lost_s(self) -> float:
        return self.lost_s - SURE * self.error * self.shared_s

    @property
    def broken(self) -> bool:
        """Whether its promise is broken, beyond reasonable doubt."""
        return self.measured and self._surely_lost_s > self.promised_s

    def breaks_within(self, ahead_s: float) -> bool:
        """Whether its promise is about to be broken if both go on for `ahead_s`."""
        if self.untold:
            return True
        near = self.budget_s <= self.loss * ahead_s and self.loss > SURE * self.error
        return self.measured and near and self._surely_lost_s >= NEARLY_SURE * self.promised_s - self.loss * ahead_s

    def affords(self, ahead_s: float) -> bool:
        """Whether both could go on for `ahead_s` within its promise."""
        return not self.untold and self.budget_s >= self.loss * ahead_s


@dataclass(frozen=True, slots=True)
class PairStatus:
    """A pair and how both stand."""

    pair: Pair
    resident: PromiseStatus
    guest: PromiseStatus
    guest_first: bool
    """The resident is not what its profile says, and the guest is."""

    @property
    def sides(self) -> Iterable[tuple[Job, Job, PromiseStatus]]:
        """Each of the two with its neighbour."""
        return ((*jobs, status) for jobs, status in zip(self.pair.sides, (self.resident, self.guest), strict=True))


# When the one that came last is paused, and when it goes on: a pure decision, for helper and simulator alike.


REST_S = 20.0
"""Between two pauses a job runs for at least so long."""


class PauseStep(StrEnum):
    """What to do about a pair."""

    LEAVE = "leave"
    PAUSE = "pause"
    RESUME = "its neighbour has budget again"
    END = "it was paused long enough"


@dataclass(frozen=True, slots=True)
class PauseHistory:
    """Pause history and limits of the guest."""

    since_s: float | None = None
    """When the present pause began; None: it runs."""
    total_s: float = 0.0
    """Paused in all, the present pause included."""
    ran_s: float = math.inf
    """How long it has run since the last pause."""
    most_s: float = math.inf
    """``PauseMost`` of its run or limit."""
    end_moves_s: float = math.inf
    """How far its end may still move: as far as its limit can be lengthened, or as its run leaves of the limit."""

    @property
    def room_s(self) -> float:
        return min(self.most_s - self.total_s, self.end_moves_s)


def next_step(
    resident: PromiseStatus,
    guest: PromiseStatus,
    pauses: PauseHistory,
    now_s: float,
    ahead_s: float,
    guest_first: bool = False,
) -> PauseStep:
    """Pause the guest while the resident has no budget; `ahead_s` is how long it takes until the next look.

    `guest_first`: the resident is not what its profile says and the guest is, so the guest's promise comes first: it
    is paused only as long as its own budget lasts.
    """
    room_s = min(pauses.room_s, guest.budget_s) if guest_first else pauses.room_s
    if pauses.since_s is None:
        can = pauses.ran_s >= REST_S and room_s > ahead_s
        return PauseStep.PAUSE if can and resident.breaks_within(ahead_s) else PauseStep.LEAVE
    if now_s - pauses.since_s + ahead_s > LONGEST_PAUSE_S or room_s <= ahead_s:
        return PauseStep.END
    return PauseStep.RESUME if resident.affords(REST_S) else PauseStep.LEAVE


# Whom the helper keeps standing still. The node does it, by an order that must be renewed (protocol/stop_orders.py).


HEARD_S = EXPIRY_S
"""A node that has not said so long after the order that the job stands still does not know of orders."""
DEAF_S = 900.0
"""It is not given any for so long."""
RAN_ON = "ran-while-paused"


@dataclass(slots=True)
class Pause:
    """One pause that is under way."""

    job: Job
    since_s: float
    stood_before_s: float
    woken: int
    heard: bool = False
    """Whether its node has said that it stands still."""
    woken_at_s: float | None = None
    """When it was first known that somebody had let it go on; None: nobody has, or it is settled."""
    struck: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """A change of a job's tag that says that it is paused, or no longer; what is noted once Slurm has taken it."""

    job: Job
    change: Change
    event: str
    why: str
    decision: Decision


class Pauses:
    """Who stands still now, and what nodes say of it. A helper that starts lets everybody go on."""

    def __init__(self) -> None:
        self._now: dict[int, Pause] = {}
        self._ended_s: dict[int, float] = {}
        self._why_ended: dict[int, str] = {}
        self._deaf_s: dict[str, float] = {}
        self._records: dict[int, tuple[float, float, int]] = {}
        """Of each job's latest record: its end, how long the job stood still, how often it was woken."""
        self._number = 0
        self._told: set[str] = set()
        self.started = False
        """Whether nodes with jobs that an earlier helper paused have been told that nobody is to stand still."""

    def __contains__(self, raw_id: int) -> bool:
        return raw_id in self._now

    def take(self, records: Iterable[Record], jobs: Mapping[int, Job]) -> None:
        """Take in what nodes say of the jobs that run now."""
        self._records = {job: known for job, known in self._records.items() if job in jobs}
        for record in records:
            if record.job_id in jobs and record.end_s >= self._records.get(record.job_id, (0.0, 0.0, 0))[0]:
                self._records[record.job_id] = record.end_s, record.stopped_s, record.woken
        self._ended_s = {job: at_s for job, at_s in self._ended_s.items() if job in jobs}
        self._why_ended = {job: why for job, why in self._why_ended.items() if job in jobs}
        for raw_id in list(self._now):
            if raw_id not in jobs or jobs[raw_id].state == "COMPLETING":
                del self._now[raw_id]  # it is ending: nobody is stopped then

    def start(self, nodes: Collection[str]) -> None:
        """These nodes are told once that nobody is to stand still."""
        self.started = True
        self._told |= set(nodes)

    def begin(self, job: Job, now_s: float) -> None:
        """From the next order on the job stands still."""
        _, stood_s, woken = self._records.get(job.raw_id, (0.0, 0.0, 0))
        self._now[job.raw_id] = Pause(job, now_s, stood_s, woken)

    def end(self, raw_id: int, why: str, now_s: float) -> None:
        """From the next order on it goes on."""
        if self._now.pop(raw_id, None) is not None:
            self._ended_s[raw_id], self._why_ended[raw_id] = now_s, why

    def can_be_told(self, job: Job, now_s: float) -> bool:
        """Whether the job's node can be given orders."""
        return all(now_s - self._deaf_s.get(node, -math.inf) > DEAF_S for node in job.nodes)

    @property
    def jobs(self) -> frozenset[int]:
        """Who stands still: while there is somebody, orders must be renewed in time."""
        return frozenset(self._now)

    def since_s(self, raw_id: int) -> float | None:
        """When the job's present pause began; None: it has none."""
        return self._now[raw_id].since_s if raw_id in self._now else None

    def ran_s(self, raw_id: int, now_s: float) -> float:
        """How long the job has run since its last pause."""
        return now_s - self._ended_s.get(raw_id, -math.inf)

    def look(self, jobs: Mapping[int, Job], now_s: float) -> list[Job]:
        """Who was at work in its pause, told once a pause; what a node did not hear ends."""
        found = []
        for raw_id, pause in list(self._now.items()):
            job, (end_s, stood_s, woken) = jobs[raw_id], self._records.get(raw_id, (0.0, 0.0, 0))
            pause.heard = pause.heard or stood_s > pause.stood_before_s or woken > pause.woken
            if not pause.heard and min(now_s, end_s) - pause.since_s > HEARD_S:
                self._deaf_s |= dict.fromkeys(job.nodes, now_s)
                log.warning("pause", job=job.key, node=",".join(job.nodes), error="its node takes no orders: promises "
                            "are only watched there")  # fmt: skip
                self.end(raw_id, "its node takes no orders", now_s)
            elif job.state in ("SUSPENDED", "STOPPED"):
                pause.woken, pause.woken_at_s = woken, None  # whoever did that will let it go on
            elif woken > pause.woken and pause.woken_at_s is None:
                pause.woken_at_s = now_s  # Slurm lets a job go on too, that is ending: the next look tells
            elif woken > pause.woken and now_s > (pause.woken_at_s or now_s):
                found += [] if pause.struck else [job]
                pause.woken, pause.woken_at_s, pause.struck = woken, None, True
        return found

    def marks(self, jobs: Iterable[Job], now_s: float) -> list[Mark]:
        """For jobs that are marked as paused and go on."""
        ours = [job for job in jobs if job.paused and job.raw_id not in self._now and job.state != "COMPLETING"]
        return [self.mark_ended(job, self._why_ended.pop(job.raw_id, "nothing keeps it back any more"), now_s)
                for job in ours]  # fmt: skip

    def mark_ended(self, job: Job, why: str, now_s: float) -> Mark:
        """What takes the mark off. The time counts by what its node has said, and is not longer than the pause."""
        tag = job.tag
        assert tag is not None
        assert tag.paused is not None
        lasted_s = max(0.0, min(now_s, self._ended_s.get(job.raw_id, now_s)) - tag.paused.since_s)
        known = self._records.get(job.raw_id)
        if known is not None and known[0] >= tag.paused.since_s + HEARD_S:
            lasted_s = min(lasted_s, max(0.0, known[1] + (now_s - known[0]) - tag.stopped_before_s))
        undone = replace(
            tag, paused=None, paused_before_s=tag.paused_before_s + round(lasted_s),
            stopped_before_s=tag.stopped_before_s + (round(lasted_s) if tag.paused.by_signal else 0),
        )  # fmt: skip
        change = Change(job.key, {"AdminComment": with_tag(job.admin_comment, undone)})
        return Mark(job, change, "resume", why, explain.noted(job, "resumed", now_s, why=why))

    def mark_woken(self, job: Job, why: str, now_s: float) -> Mark:
        """For a pause in which somebody else let the job go on: it begins anew, and earlier time counts as it was."""
        assert job.tag is not None
        stood_s = max(job.tag.stopped_before_s, round(self._records[job.raw_id][1]))
        tag = replace(
            job.tag, paused=Paused(int(now_s), by_signal=True), stopped_before_s=stood_s,
            paused_before_s=job.tag.paused_before_s - job.tag.stopped_before_s + stood_s,
        )  # fmt: skip
        change = Change(job.key, {"AdminComment": with_tag(job.admin_comment, tag)})
        return Mark(job, change, "woken", why, explain.noted(job, RAN_ON, now_s))

    def orders(self, now_s: float, dying: Iterable[Job] = ()) -> dict[str, StopOrder]:
        """What each node with jobs that stand still, or are `dying`, is to be told, and once more after the last."""
        self._number = max(self._number + 1, round(1000 * now_s))
        found = dict.fromkeys(self._told, StopOrder(self._number))
        self._told = set()
        named = [("jobs", pause.job) for pause in self._now.values()] + [("dying", job) for job in dying]
        for name, job in named:
            for node in job.nodes:
                order = found.get(node, StopOrder(self._number))
                found[node] = replace(order, **{name: getattr(order, name) | {job.raw_id}})
                self._told.add(node)
        return found

    def let_all_go(self, now_s: float) -> dict[str, StopOrder]:
        """Orders that keep nobody: for a helper that stops."""
        self._now.clear()
        return self.orders(now_s)


def let_go_in_slurm(slurm: Slurm, jobs: Iterable[Job]) -> None:
    """Let jobs go on that a release before 1.0 paused: it suspended them, or stopped them by a signal of Slurm's."""
    for job in jobs:
        paused = job.tag.paused if job.tag else None
        try:
            if paused is not None and job.state == "STOPPED":
                slurm.signal("CONT", job.key)
            elif paused is not None and job.state == "SUSPENDED" and not paused.by_signal:
                slurm.resume(job.key)
        except SlurmError as error:
            log.warning("resume", job=job.key, message=error.what)


def release_paused(slurm: Slurm, jobs: Iterable[Job], spool_dir: Path | None, dry_run: bool = False) -> list[Applied]:
    """Let every job go on that is marked as paused, whoever asks and without a helper; what became of the marks."""
    marked, now_s = [job for job in jobs if job.tag is not None and job.tag.paused is not None], time.time()
    if dry_run:
        return [Applied(job.key, Outcome.DRY) for job in marked]
    let_go_in_slurm(slurm, marked)
    pauses = Pauses()
    pauses.start({node for job in marked for node in job.nodes})
    if spool_dir is not None:
        write_orders(spool_dir, pauses.orders(now_s))
    return [apply(slurm, pauses.mark_ended(job, "released", now_s).change) for job in marked]


def dying(jobs: Iterable[Job], slurm_conf: Mapping[str, str], lead_s: float, now_s: float) -> list[Job]:
    """Jobs with a token that Slurm is about to kill: so close to KillWait after their end, and still there.

    Until then who was told to end may write a checkpoint. As a client of MPS it must not die with work on the card.
    """
    kill_wait_s = int(slurm_conf.get("KillWait", "30 sec").split()[0])
    ending = (job for job in jobs if job.state == "COMPLETING" and job.tag is not None)
    return [job for job in ending if job.end_s is None or now_s - job.end_s >= kill_wait_s - lead_s]


def tell_nodes(config: Config, store: Store, orders: Mapping[str, StopOrder]) -> None:
    """Write nodes' orders to where they look for them. What cannot be written lapses by itself."""
    if config.records_to == "spool":
        write_orders(config.spool_dir, orders)
    elif orders:
        try:
            store.stop_orders.put({node: str(order) for node, order in orders.items()})
        except GpushareError as why:
            log.warning("pause", error=why.what)


def write_orders(spool_dir: Path, orders: Mapping[str, StopOrder]) -> None:
    """The orders as files of the spool."""
    for node, order in orders.items():
        try:
            write_order(order_file(spool_dir, node), order)
        except OSError as why:
            log.warning("pause", node=node, error=f"{why.filename}: {why.strerror}")


def mark_paused(job: Job, why: str, now_s: float, partner: Job) -> Mark:
    """What says in the job's tag that it is paused."""
    assert job.tag is not None
    tag = replace(job.tag, paused=Paused(int(now_s), by_signal=True))
    change = Change(job.key, {"AdminComment": with_tag(job.admin_comment, tag)})
    return Mark(job, change, "pause", why, explain.noted(job, "paused", now_s, partner, why=why))
