"""One measurement: the cards of a job, its processes and its host, read step by step into records."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

from slurm_gpushare.node.host import JobCounters, NodeCounters
from slurm_gpushare.node.nvml import Bounded, CardSample, NvmlCard, NvmlError, Stuck, open_cards
from slurm_gpushare.node.processes import Members
from slurm_gpushare.node.run import Identity, RunSoFar
from slurm_gpushare.protocol.record import Closed, Record, RecordKind

# Host counters, power and clocks change slowly and cost the most to read.
SLOW_EVERY = 4
# Once the profile is closed only the activity is of interest, and less of it.
AFTER_PROFILE = 5

_NVML_LIMIT_S = 2.0  # a driver that is only slow (no persistence mode) answers later, and is then used
_NVML_RETRY_S = 30.0


class Cards:
    """The job's cards behind NVML, whatever state NVML is in."""

    def __init__(self, indices: Sequence[int], log: Callable[[str], None]) -> None:
        self._indices = indices
        self._log = log
        self._bounded = Bounded()
        self._open: dict[int, NvmlCard] = {}
        self._trouble = ""
        self._retry_at = 0.0

    def read(self, *, everything: bool) -> dict[int, tuple[NvmlCard, CardSample]]:
        """A reading of each card; empty, and said once in the log, while NVML fails or hangs."""
        if time.monotonic() < self._retry_at:
            return {}
        try:
            samples = self._bounded.call(lambda: self._read(everything), _NVML_LIMIT_S)
        except Stuck:
            self._fail(f"NVML has not answered for {_NVML_LIMIT_S:g} s", retry_s=0.0)
            return {}
        except NvmlError as error:
            self._open = {}
            self._fail(f"NVML: {error}", retry_s=_NVML_RETRY_S)
            return {}
        if self._trouble:
            self._log("NVML answers again")
            self._trouble = ""
        return samples

    def _read(self, everything: bool) -> dict[int, tuple[NvmlCard, CardSample]]:
        if not self._open:
            self._open = open_cards(self._indices)
        return {index: (card, card.read(everything=everything)) for index, card in self._open.items()}

    def _fail(self, trouble: str, retry_s: float) -> None:
        if trouble != self._trouble:
            self._log(f"{trouble}: going on without GPU numbers")
        self._trouble = trouble
        self._retry_at = time.monotonic() + retry_s


class Measurement:
    """Samples taken by `step` until the caller has enough; one record for each card, or for all cards of a gang."""

    def __init__(
        self,
        identities: Sequence[Identity],
        members: Members,
        *,
        limit_s: float,
        neighbours: Callable[[int], Collection[int]],
        log: Callable[[str], None],
        start_s: float | None = None,
    ) -> None:
        start_s = time.time() if start_s is None else start_s
        self.runs = {identity.gpu_index: RunSoFar(identity, start_s) for identity in identities}
        self.members = members
        self._limit_s = limit_s
        self._neighbours = neighbours
        self._cards = Cards(tuple(gpu for identity in identities for gpu in identity.gpus), log)
        self._node = NodeCounters()
        self._job = JobCounters()
        self._steps = 0
        self._last = time.monotonic()

    @property
    def profiling(self) -> bool:
        return any(run.closed is Closed.OPEN for run in self.runs.values())

    def step(self) -> None:
        """Read everything that is due now."""
        slow = self._steps % SLOW_EVERY == 0
        self._steps += 1
        if slow or not self.profiling:
            self.members.refresh()
        samples = self._cards.read(everything=slow and self.profiling)
        now = time.monotonic()
        elapsed, self._last = now - self._last, now
        for run in self.runs.values():
            gpus = run.identity.gpus
            if any(gpu not in samples for gpu in gpus):
                continue
            cards, readings = zip(*(samples[gpu] for gpu in gpus), strict=True)
            run.gpu_model, run.one_process = cards[0].model, any(card.one_process for card in cards)
            neighbours = {job for gpu in gpus for job in self._neighbours(gpu)}
            run.add_cards(readings, self.members.owns, neighbours, elapsed)
            if run.profile_s >= self._limit_s:
                run.close_profile(Closed.LIMIT)
        if slow and self.profiling and self.members.processes:
            values = self._node.read() | self._job.read(self.members.processes)
            for run in self.runs.values():
                run.add_host(values)

    def memory_grew(self) -> bool:
        """Whether a job's memory has passed what its last record says, by more than an allocator's rounding."""
        return any(run.memory_grew for run in self.runs.values())

    def close_profile(self, why: Closed) -> None:
        for run in self.runs.values():
            run.close_profile(why)

    def records(self, kind: RecordKind, end_s: float | None = None) -> list[Record]:
        """A record for each card; a final one may be written well after the job's end, `end_s`."""
        end_s = time.time() if end_s is None else end_s
        return [run.record(kind, end_s) for run in self.runs.values()]
