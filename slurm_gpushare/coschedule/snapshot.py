"""What the plan sees: GPUs, nodes and the queue at one instant, as frozen dataclasses.

Times are unix seconds, durations seconds. A *sharer* is a job with a token that holds part of a card;
everything else on a card holds it whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class DurationSource(StrEnum):
    """Where a job's expected duration comes from, best first."""

    HISTORY = "history"  # earlier runs of the same token
    LIMIT = "limit"  # the user's time limit
    KNOWN = "known"  # simulations only


@dataclass(frozen=True, slots=True)
class Occupant:
    """A job on a GPU: running, or placed there by us and not yet started (`start_s` is None)."""

    job_id: str
    token: str | None  # None: did not opt in; nobody may join it
    cluster: int | None = None
    user: str = ""
    account: str = ""
    whole: bool = False  # holds all of the card
    mem_used_mib: int | None = None  # peak GPU memory of its profile; None: unknown
    start_s: float | None = None
    limit_s: float = float("inf")  # time limit, counted from the start
    expected_s: float = float("inf")  # expected run time alone, from start to end
    expected_source: DurationSource = DurationSource.LIMIT
    lost_s: float = 0.0  # time that neighbours have cost it so far
    joined: bool = False  # started on an occupied card: a guest, under the guest's promise
    max_isd_pct: float | None = None  # the owner's own cap (gpushare:TOKEN,max=10)


@dataclass(frozen=True, slots=True)
class Gpu:
    """One card. `occupants` is in order of arrival: the first is the resident."""

    node: str
    index: int
    model: str
    mem_total_mib: int
    usable: bool = True  # shared partition, node up, not drained, card healthy
    exclusive_process: bool = False  # compute mode that admits one process only
    occupants: tuple[Occupant, ...] = ()


@dataclass(frozen=True, slots=True)
class Node:
    """A node's room and what a job's constraints are checked against."""

    name: str
    cpus_free: int
    mem_free_mib: int
    partitions: frozenset[str] = frozenset()
    features: frozenset[str] = frozenset()
    usable: bool = True
    reservation: str | None = None  # active one; only its own jobs may be placed
    reserved_from_s: float = float("inf")  # start of the next one: jobs that could overlap it stay away


@dataclass(frozen=True, slots=True)
class PendingJob:
    """A job in the queue. Without a token it is not ours: it only takes part through its priority."""

    job_id: str
    token: str | None
    cluster: int | None = None
    user: str = ""
    account: str = ""
    gpus: int = 1
    whole_nodes: int = 0  # nodes that it wants entirely (--exclusive, or all GPUs of a node)
    mem_used_mib: int | None = None
    cpus: int = 1
    node_mem_mib: int = 0
    partitions: frozenset[str] = frozenset()
    features: frozenset[str] = frozenset()  # all of them are wanted
    nodes_wanted: frozenset[str] | None = None  # None: any node
    gpu_index: int | None = None  # the only GPU index it may have; None: any
    nodes_excluded: frozenset[str] = frozenset()
    reservation: str | None = None
    limit_s: float = float("inf")
    expected_s: float = float("inf")
    expected_source: DurationSource = DurationSource.LIMIT
    eligible_s: float = 0.0  # since when it waits
    max_isd_pct: float | None = None
    eligible: bool = True  # False: held, dependent or begins later; takes no part but is kept for reference


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The cluster at `now_s`. `pending` is in Slurm's priority order, highest first."""

    now_s: float
    gpus: tuple[Gpu, ...]
    nodes: Mapping[str, Node]
    pending: tuple[PendingJob, ...]
    never_together: frozenset[tuple[str, str]] = field(default_factory=frozenset)
    """Sorted pairs of tokens that broke their promise beside each other."""
    mean_duration_s: float | None = None
    """Of the jobs submitted lately, long and short; None: as in this snapshot, where the long ones are too many."""


class How(StrEnum):
    """The kinds of placement."""

    ALONE = "alone"  # first on an empty card, part of it: a complement may join
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
    """`job_id` goes to GPU `index` of `node`."""

    job_id: str
    node: str
    index: int
    how: How
    partner_job_id: str | None = None
    reasons: Reasons = Reasons()


@dataclass(frozen=True, slots=True)
class LeftToSlurm:
    """A job with a token that gets no place now: it waits with its original request."""

    job_id: str
    why: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do at this instant; nothing in it has happened yet."""

    placements: tuple[Placement, ...] = ()
    left: tuple[LeftToSlurm, ...] = ()
