"""How one reading of a card divides: ours, our neighbours', those of no job, and what cannot be told."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from slurm_gpushare.node.nvml import CardSample, ProcessLoad
from slurm_gpushare.node.processes import is_outsider, stands_still

Neighbours = Mapping[int, int | None]
"""The other jobs on a card, with their owners' uids; None where that is not known, and nobody is told apart."""
LEAST_OUTSIDE_PCT = 2.0
"""What processes of no job use below this changes nothing."""


class Share:
    """The parts of one reading."""

    def __init__(self, sample: CardSample, owns: Callable[[int], bool | None], neighbours: Neighbours | None) -> None:
        processes = sample.processes
        self.undecided = False
        self.outside_pct = 0.0
        """What processes of no job used: who it was that lost it to them is told by nobody's fault."""
        self.untold = False
        """Whether there are some, and the card does not say what they used."""
        self.unseen_pct: float | None = None
        """How much busier the card was than all processes on it; None where the card does not say."""
        self.own: dict[int, ProcessLoad] = {}
        self.others: dict[int, ProcessLoad] = {}
        """Our neighbours' processes, as far as is known."""
        if processes is None:  # the card does not say who is on it: go by who was given it
            self.present, self.shared = True, bool(neighbours)
            return
        verdicts = {pid: owns(pid) for pid in processes}
        self.own = {pid: processes[pid] for pid, ours in verdicts.items() if ours}
        self.present = bool(self.own)
        outside = {pid for pid, ours in verdicts.items() if ours is False and is_outsider(pid, neighbours)}
        self.others = {pid: load for pid, load in processes.items() if pid not in outside and pid not in self.own}
        self.shared = any(verdicts[pid] is False for pid in self.others)
        self.undecided = not self.shared and None in verdicts.values()
        used = [processes[pid].sm_pct for pid in outside]
        self.untold = None in used
        used_pct = sum(part or 0.0 for part in used)
        self.outside_pct = used_pct if used_pct >= LEAST_OUTSIDE_PCT else 0.0
        known_pct = _total([load.sm_pct for load in processes.values()])
        if known_pct is not None and sample.util_pct is not None:
            self.unseen_pct = sample.util_pct - known_pct

    @property
    def own_mem_mib(self) -> float | None:
        return _total([load.mem_mib for load in self.own.values()])


def activity(sample: CardSample, share: Share, *, settled: bool) -> dict[str, float]:
    """The activity attributes of one reading; what is not known is left out.

    What processes of no job used counts as ours: so what we lost to them is nobody's, and what remains is judged.
    """
    alone = settled and not share.shared
    total = sample.mem_total_mib
    own_sm = _total([load.sm_pct for load in share.own.values()])
    own_sm = None if own_sm is None else own_sm + share.outside_pct
    own_access = _total([load.mem_access_pct for load in share.own.values()])
    own_mem = share.own_mem_mib
    if own_mem is None and alone:
        own_mem = sample.mem_used_mib  # some drivers do not give memory by process
    values = {
        "gpu_util_pct": sample.util_pct if alone else own_sm,
        "mem_access_pct": sample.mem_access_pct if alone else own_access,
        "gpu_mem_mib": own_mem,
        "gpu_mem_pct": 100 * own_mem / total if own_mem is not None and total else None,
        "proc_sm_pct": own_sm,
        "proc_mem_access_pct": own_access,
        "card_util_pct": sample.util_pct,
        "card_mem_access_pct": sample.mem_access_pct,
        "card_mem_pct": 100 * sample.mem_used_mib / total if sample.mem_used_mib is not None and total else None,
    }
    return {name: value for name, value in values.items() if value is not None}


def is_at_rest(shares: Sequence[Share]) -> bool:
    """Whether we or our neighbours neither run nor have run since the last look.

    A job that stands still when it is looked at, which anybody can arrange, counts with what it used in between.
    """
    sides = ([item for it in shares for item in it.own.items()], [item for it in shares for item in it.others.items()])
    return any(side and all(not load.sm_pct and stands_still(pid) for pid, load in side) for side in sides)


_HIGHEST = frozenset({"gpu_mem_mib", "gpu_mem_pct", "card_mem_pct"})
"""Of a gang the fullest card counts: a neighbour must fit on each of them. Of all else the mean."""


def joined(readings: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Readings of a gang's cards at one instant as one; what a card does not tell is left out."""
    if len(readings) == 1:
        return dict(readings[0])
    names = [name for name in readings[0] if all(name in reading for reading in readings)]
    values = {name: [reading[name] for reading in readings] for name in names}
    return {name: max(some) if name in _HIGHEST else sum(some) / len(some) for name, some in values.items()}


def _total(parts: list[float | None]) -> float | None:
    known = [part for part in parts if part is not None]
    return sum(known) if parts and len(known) == len(parts) else None
