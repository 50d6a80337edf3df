"""Policies by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from gpushare_lab.peers import preemptive, sharing
from slurm_gpushare.protocol.errors import BadInput
from slurm_gpushare.whatif import simulate
from slurm_gpushare.whatif.our_policy import Gpushare, Options, oracle
from slurm_gpushare.whatif.simulate import Policy
from slurm_gpushare.whatif.traces import MeasuredPairs, SimulatedJobs

PEERS: dict[str, Callable[[SimulatedJobs, int], Policy]] = {
    "fifo": simulate.Fifo,
    "sjf": preemptive.Sjf,
    "srpt": preemptive.Srpt,
    "tiresias": preemptive.Tiresias,
    "fcfs-share": sharing.FcfsShare,
    "packed-share": sharing.PackedShare,
    "random-share": sharing.RandomShare,
    "paper": sharing.Paper,
    "sjf-ffs": sharing.SjfFfs,
    "sjf-bsbf": sharing.SjfBsbf,
    "gavel-packing": sharing.GavelPacking,
    "lucid": sharing.Lucid,
    "lucid-tertile": sharing.LucidTertile,
    "gandiva": sharing.Gandiva,
}
OURS: dict[str, Callable[[SimulatedJobs, int, Options], Policy]] = {"oracle": oracle, "gpushare": Gpushare}
NAMES = (*PEERS, *OURS)
EXCLUSIVE = ("fifo", "sjf", "srpt", "tiresias")
PREEMPTIVE = ("srpt", "tiresias", "gandiva")

_CAPPED = re.compile(r"(?P<name>.+)-cap(?P<pct>\d+(\.\d+)?)$")


def parse_policies(text: str) -> list[str]:
    """The names in a comma list; ``all`` is every policy, ``NAME-capNN`` one of the sharing ones with a cap."""
    names: list[str] = []
    for item in (part.strip() for part in text.split(",")):
        for name in NAMES if item == "all" else (item,):
            base, cap = split_cap(name)
            if base not in NAMES:
                raise BadInput(f"--policy: no policy '{item}'", f"There are: {', '.join(NAMES)}, all.")
            if cap is not None and base in EXCLUSIVE:
                raise BadInput(f"--policy: {item}: {base} does not share, so there is nothing to cap")
            if name not in names:
                names.append(name)
    return names


def split_cap(name: str) -> tuple[str, float | None]:
    """``fcfs-share-cap25`` -> ("fcfs-share", 25.0)."""
    match = _CAPPED.fullmatch(name)
    return (match["name"], float(match["pct"])) if match else (name, None)


def capped(pairs: MeasuredPairs, isd_pct: float) -> MeasuredPairs:
    """The same without the pairs that slow either job by more than `isd_pct`."""
    floor = 1.0 / (1.0 + isd_pct / 100.0)
    with np.errstate(invalid="ignore"):
        keep = pairs.rate >= floor
    return MeasuredPairs(pairs.profiles, np.where(keep & keep.T, pairs.rate, np.nan))


def make_policy(name: str, work: SimulatedJobs, options: Options) -> tuple[Policy, SimulatedJobs]:
    """The policy, and the workload as it may see it: a cap takes pairs away."""
    base, cap = split_cap(name)
    if cap is not None:
        work = replace(work, pairs=capped(work.pairs, cap))
    if base in OURS:
        return OURS[base](work, work.seed, options), work
    return PEERS[base](work, work.seed), work
