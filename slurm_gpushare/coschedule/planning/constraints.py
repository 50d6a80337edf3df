"""Where a job may run at all: partition, features, nodes, reservation, CPUs and memory."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from slurm_gpushare.coschedule.view.snapshot import Gpu, NodeRoom, PendingJob, Snapshot

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Demand = tuple[object, ...]


def admits(node: NodeRoom, job: PendingJob) -> bool:
    """Whether Slurm would let `job` onto `node`, its free CPUs and memory aside."""
    return (
        node.usable
        and (not job.partitions or bool(node.partitions & job.partitions))
        and job.features <= node.features
        and (job.nodes_wanted is None or node.name in job.nodes_wanted)
        and node.name not in job.nodes_excluded
        and (node.reservation == job.reservation if node.reservation or job.reservation else True)
    )


class Sites:
    """The GPUs of a snapshot with their nodes' room, as arrays; `take` books what a placement uses."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.gpus: tuple[Gpu, ...] = snapshot.gpus
        self.nodes = [snapshot.nodes[name] for name in dict.fromkeys(gpu.node for gpu in snapshot.gpus)]
        at = {node.name: i for i, node in enumerate(self.nodes)}
        self.node: Ints = np.array([at[gpu.node] for gpu in self.gpus], np.int64)
        self.index: Ints = np.array([gpu.index for gpu in self.gpus], np.int64)
        self.model = np.array([gpu.model for gpu in self.gpus], object)
        self.usable: Bools = np.array([gpu.usable for gpu in self.gpus], bool)
        self.cpus = np.array([node.cpus_free for node in self.nodes], np.int64)
        self.mem_mib = np.array([node.mem_free_mib for node in self.nodes], np.int64)
        self.reserved_in_s: Floats = np.array([node.reserved_from_s - snapshot.now_s for node in self.nodes], float)
        self._admitting: dict[Demand, Bools] = {}

    def demand(self, job: PendingJob) -> Demand:
        """What decides `admits`: equal for most jobs of a site, so that it is worked out once for all of them."""
        where = (job.partitions, job.features, job.nodes_wanted, job.nodes_excluded, job.reservation)
        return (*where, job.gpu_index, job.gpu_model)

    def allowed(self, job: PendingJob) -> Bools:
        """The GPUs that `job` may have, on nodes that admit it."""
        demand = self.demand(job)
        if demand not in self._admitting:
            admitting = np.array([admits(node, job) for node in self.nodes], bool)
            allowed = self.usable & admitting[self.node]
            if job.gpu_index is not None:
                allowed &= self.index == job.gpu_index
            if job.gpu_model is not None:
                allowed &= self.model == job.gpu_model
            self._admitting[demand] = allowed
        return self._admitting[demand]

    def has_room(self, gpu: int, job: PendingJob) -> bool:
        """Whether the node of `gpu` has CPUs and memory for `job` now, and no reservation during its time limit."""
        node = self.node[gpu]
        room = self.cpus[node] >= job.cpus and self.mem_mib[node] >= job.node_mem_mib
        return bool(room and job.limit_s <= self.reserved_in_s[node])

    def room_for(self, jobs: list[PendingJob], gpus: Ints) -> Bools:
        """`has_room` for jobs (rows) on GPUs (columns), with what `admits` says."""
        node = self.node[gpus]
        cpus, mem_mib, limit_s = (
            np.array(values, float)[:, None]
            for values in zip(*((job.cpus, job.node_mem_mib, job.limit_s) for job in jobs), strict=True)
        )
        room = (self.cpus[node] >= cpus) & (self.mem_mib[node] >= mem_mib) & (limit_s <= self.reserved_in_s[node])
        allowed = np.stack([self.allowed(job)[gpus] for job in jobs])
        both: Bools = room & allowed
        return both

    def take(self, gpu: int, job: PendingJob) -> None:
        """Book CPUs and memory."""
        self.cpus[self.node[gpu]] -= job.cpus
        self.mem_mib[self.node[gpu]] -= job.node_mem_mib


def first_wanting(sites: Sites, pending: Iterable[tuple[int, PendingJob]], *, gangs: bool = False) -> Ints:
    """For each GPU the place in the queue of the first job that could use it, and needs it whole.

    One that shares a single card is content with half of one. A gang is content with half of a node that a gang has
    (`gangs`: this is about such nodes), but needs other cards whole. Both only on GPU models that they know.
    """
    nobody = np.iinfo(np.int64).max
    first: Ints = np.full(len(sites.gpus), nobody, np.int64)
    seen: set[Demand] = set()
    for rank, job in pending:
        shares = job.token is not None and job.max_isd_pct != 0 and (job.gpus == 1 or (gangs and job.gang))
        if shares and job.measured is None:
            continue
        shared_on = tuple(job.measured or ()) if shares else ()
        demand = (*sites.demand(job), shared_on)
        if demand not in seen:
            seen.add(demand)
            whole = sites.allowed(job) & ~np.isin(sites.model, shared_on)
            first = np.where(whole, np.minimum(first, rank), first)
    return first
