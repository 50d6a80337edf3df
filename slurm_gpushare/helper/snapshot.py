"""What the plan reads (`Snapshot`) and what it gives (`Plan`), as frozen dataclasses.

Times are unix seconds, durations seconds. A *sharer* is a job with a token that holds part of its place;
everything else on a card holds it whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

from slurm_gpushare.protocol.record import UNDER_MPS, Mps

FOREVER = float("inf")


LEAST_CAP_PCT = 5
"""An owner's cap below this is met by 0.6 % of 656 measured pairings (V100), and by less than two readings of one job
differ: such a job would hold a card nearly always alone, at half of its price. It gets the card whole."""


@dataclass(frozen=True, slots=True, order=True)
class GpuPlace:
    """A place: a node and some of its cards. A job for one card has one of them, a gang all that its node has."""

    node: str
    cards: tuple[int, ...]

    @property
    def first(self) -> int:
        """The card by which the place is known in tags and records."""
        return self.cards[0]

    def __str__(self) -> str:
        """``n7:2``, of several cards ``n7:0-3``."""
        return f"{self.node}:{self.first}" + (f"-{self.cards[-1]}" if len(self.cards) > 1 else "")


@dataclass(frozen=True, slots=True)
class Workload:
    """What is known of a job whether it waits or runs, on one GPU model."""

    token: str | None = None  # None: did not opt in; nobody may join it
    cluster: int | None = None
    user: str = ""
    account: str = ""
    mem_used_mib: int | None = None  # peak GPU memory of its profile; None: unknown
    limit_s: float = FOREVER  # time limit, counted from the start
    may_grow_s: float = FOREVER  # how much longer its partition lets that limit become
    expected_s: float = FOREVER  # expected run time alone, from start to end: the middle
    expected_spread: float = 0.0  # standard deviation of its logarithm; 0: known exactly
    max_isd_pct: float | None = None  # the owner's own cap (gpushare:TOKEN,max=10)
    width: int = 1  # cards of one node that make up its place
    limits: tuple[str, ...] = ()  # of QOS and associations, those that it counts for


class LimitRoom(NamedTuple):
    """What is left below a limit: cards as they are held, and shards in Slurm's books."""

    cards: float
    shards: float


@dataclass(frozen=True, slots=True)
class Occupant:
    """A job on a GPU: running, or placed there by us and not yet started (`start_s` is None)."""

    key: str
    workload: Workload
    whole: bool = False  # holds all of the card
    start_s: float | None = None
    given_s: float = 0.0  # part of its limit which we added, for time lost
    lost_s: float = 0.0  # time that neighbours have cost it so far
    paused_s: float = 0.0  # time that it was suspended; it has neither run nor lost anything in it
    joined: bool = False  # started on an occupied card: a guest, under the guest's promise
    judged: bool = False  # its nodes have told how fast it and its present neighbour run


@dataclass(frozen=True, slots=True)
class Gpu:
    """One card. `occupants` is in order of arrival: the first is the resident."""

    node: str
    index: int
    model: str  # as the cards call themselves
    mem_total_mib: int
    usable: bool = True  # shared partition, node up, not drained, card healthy
    exclusive_process: bool = False  # compute mode that admits one process only
    vacating: bool = False  # a job that may preempt those on it waits for it
    occupants: tuple[Occupant, ...] = ()
    mps: Mps | None = None  # under an MPS server
    blind: bool = False  # which hides what single jobs do: nothing is measured of pairs

    @property
    def rates_of(self) -> str:
        """Under which name rates on this card are known."""
        return self.model + (UNDER_MPS if self.mps else "")

    @property
    def has_room(self) -> bool:
        """Whether a sharer is alone here and leaves room for another."""
        open_ = self.usable and not self.exclusive_process and len(self.occupants) == 1
        return open_ and self.occupants[0].workload.token is not None and not self.occupants[0].whole


@dataclass(frozen=True, slots=True)
class NodeRoom:
    """A node's room and what a job's constraints are checked against."""

    name: str
    cpus_free: int
    mem_free_mib: int
    partitions: frozenset[str] = frozenset()
    features: frozenset[str] = frozenset()
    usable: bool = True
    reservation: str | None = None  # active one; only its own jobs may be placed
    reserved_from_s: float = FOREVER  # start of the next one: jobs that could overlap it stay away


@dataclass(frozen=True, slots=True)
class PendingJob:
    """A job in the queue. Without a token it is not ours: it only takes part through its priority."""

    key: str
    workload: Workload
    gpus: int = 1  # all of a node's, for each node that it wants entirely (--exclusive)
    cpus: int = 1
    node_mem_mib: int = 0
    partitions: frozenset[str] = frozenset()
    features: frozenset[str] = frozenset()  # all of them are wanted
    nodes_wanted: frozenset[str] | None = None  # None: any node
    gpu_index: int | None = None  # the only GPU index it may have; None: any
    gpu_model: str | None = None  # the only GPU model it may have; None: any
    nodes_excluded: frozenset[str] = frozenset()
    reservation: str | None = None
    eligible_s: float = 0.0  # since when it waits
    measured: Mapping[str, Workload] | None = None  # by GPU model; None: `workload` holds on every model

    def on(self, model: str) -> PendingJob | None:
        """The job as it is on a GPU model; None if it was not measured there: on such a card it runs alone."""
        if self.measured is None:
            return self
        found = self.measured.get(model)
        return None if found is None else replace(self, workload=found, measured=None)

    @property
    def shares(self) -> bool:
        """Whether it has opted in, its owner's own cap lets somebody join it, and it wants one place."""
        own = self.workload
        joined = own.max_isd_pct is None or own.max_isd_pct >= LEAST_CAP_PCT
        return own.token is not None and joined and own.width == self.gpus


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The cluster at `now_s`. `pending` is in Slurm's priority order, highest first."""

    now_s: float
    gpus: tuple[Gpu, ...]
    nodes: Mapping[str, NodeRoom]
    pending: tuple[PendingJob, ...]
    never_together: frozenset[tuple[str, str]] = field(default_factory=frozenset)
    """Sorted pairs of tokens that broke their promise beside each other."""
    limits: Mapping[str, LimitRoom] = field(default_factory=dict)
    """What is left below each limit."""
    mean_duration_s: Mapping[int, float] = field(default_factory=dict)
    """By width, of the jobs submitted lately, long and short; else as in this snapshot, where the long ones are too
    many."""


class How(StrEnum):
    """The kinds of placement."""

    ALONE = "alone"  # first on an empty card, part of it: a guest may join
    BESIDE = "beside"  # joins a running sharer
    TOGETHER = "together"  # joins a job that this same plan places
    SUCCEEDS = "succeeds"  # joins a sharer that ends soon, and has the card after it
    UNSHARED = "unshared"  # an empty card, all of it


@dataclass(frozen=True, slots=True)
class Reasons:
    """Why a job was placed so; None where a number does not apply."""

    wait_s: float | None = None  # expected wait for a whole GPU instead
    guest_isd_pct: float | None = None  # what sharing is predicted to cost the placed job
    resident_isd_pct: float | None = None  # and the resident, over its whole run, past guests included
    resident_budget_pct: float | None = None
    shared_s: float | None = None  # expected time beside each other
    gain_s: float | None = None  # completion time saved, all jobs together
    explored: bool = False  # admitted on the exploration rule: rates too uncertain to promise otherwise


@dataclass(frozen=True, slots=True)
class Placement:
    """`key` goes to `place`; `partner_key` is the job that has it already."""

    key: str
    place: GpuPlace
    how: How
    partner_key: str | None = None
    reasons: Reasons = Reasons()


@dataclass(frozen=True, slots=True)
class LeftToSlurm:
    """A job with a token that gets no place now: it waits with its original request."""

    key: str
    wait_s: float | None = None
    """Expected wait for a whole GPU."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do at this instant; nothing in it has happened yet."""

    placements: tuple[Placement, ...] = ()
    left: tuple[LeftToSlurm, ...] = ()
