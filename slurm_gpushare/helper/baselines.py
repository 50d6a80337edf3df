"""The policies without promises: in queue order, a job joins whom it may.

`fcfs` takes the first card with room, `random` any, `paper` the first whose resident's cluster complements its own.
They keep to what is hard (memory, constraints, time limits, consent), and to nothing else.
"""

from __future__ import annotations

import numpy as np

from slurm_gpushare.helper.guests import Candidates, Compatible, Floats, Join, Residents, Terms
from slurm_gpushare.protocol.policy import PolicySettings


def complementary(cluster: int | None, other: int | None, partners: tuple[int, ...]) -> bool:
    """The paper's rule: each cluster beside the one with which PS and ISD balance best."""
    known = cluster is not None and other is not None and 0 <= cluster < len(partners)
    return known and partners[cluster or 0] == other


def join_without_promises(
    waiting: Candidates,
    waits_s: Floats,
    clusters: list[int | None],
    lanes: Residents,
    lane_clusters: list[int | None],
    terms: Terms,
    settings: PolicySettings,
    compatible: Compatible,
) -> list[Join]:
    """Who joins whom under the policy named in `settings`."""
    random = np.random.default_rng(settings.seed)
    free = np.ones(len(lanes.kind), bool)
    joins: list[Join] = []
    for i in range(len(waiting.kind)):
        columns = np.flatnonzero(free)
        if len(columns) == 0:
            break
        ok = compatible(np.array([i]), columns)[0]
        if settings.policy == "paper":
            ok &= np.array(
                [complementary(clusters[i], lane_clusters[j], settings.partners) for j in columns.tolist()], bool
            )
        allowed = columns[ok]
        if len(allowed) == 0:
            continue
        lane = int(random.choice(allowed) if settings.policy == "random" else allowed[0])
        free[lane] = False
        d, cell = float(waiting.expected_s[i]), (waiting.kind[i], lanes.kind[lane])
        stay, delay = d * float(terms.stay[cell]), d * float(terms.delay[cell])
        joins.append(Join(i, lane, stay, delay, float(waits_s[i]) + d - stay - delay, False))
    return joins
