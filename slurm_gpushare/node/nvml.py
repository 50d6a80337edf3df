"""One card, read through NVML: what it does as a whole and who is on it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, TypeVar

import pynvml

from slurm_gpushare.node.mps import mps_server_uid
from slurm_gpushare.node.processes import Members
from slurm_gpushare.protocol.record import Mps, gpu_model

_MIB = 1024 * 1024
_SILENCE_S = 2.0  # the driver's own sample period is at most 1 s


class NvmlError(Exception):
    """NVML, or this card, cannot be used."""


@dataclass(frozen=True, slots=True)
class ProcessLoad:
    """What one process did on the card since the last reading."""

    mem_mib: float | None
    sm_pct: float | None = None
    mem_access_pct: float | None = None


@dataclass(frozen=True, slots=True)
class CardSample:
    """One reading. A field is None, or absent, where the card does not report it."""

    util_pct: float | None
    mem_access_pct: float | None
    mem_used_mib: float | None
    mem_total_mib: float | None
    other: Mapping[str, float]
    """Power, temperature, clocks and PCIe traffic, by attribute name."""
    processes: Mapping[int, ProcessLoad] | None
    """By process id; None if the card does not say who is on it."""


def _ask(function: Callable[..., Any], *arguments: Any) -> Any:
    """The answer, or None where this card or driver has none."""
    try:
        return function(*arguments)
    except pynvml.NVMLError as error:
        # A card that fell off the bus stays gone: everything else may be one counter that is not there.
        if error.value in (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_UNINITIALIZED):
            raise NvmlError(str(error)) from error
        return None


XIDS_OF_PROGRAMS = frozenset({8, 13, 31, 32, 43, 45, 68, 69})
"""Xid errors that a job's own program can cause, after which the card is as good as before (NVIDIA's table of Xids)."""


_SLOW_COUNTERS: tuple[tuple[str, Callable[..., Any], tuple[int, ...], float], ...] = (
    ("temperature_c", pynvml.nvmlDeviceGetTemperature, (pynvml.NVML_TEMPERATURE_GPU,), 1),
    ("sm_clock_mhz", pynvml.nvmlDeviceGetClockInfo, (pynvml.NVML_CLOCK_SM,), 1),
    ("mem_clock_mhz", pynvml.nvmlDeviceGetClockInfo, (pynvml.NVML_CLOCK_MEM,), 1),
    ("power_w", pynvml.nvmlDeviceGetPowerUsage, (), 1000),
    ("pcie_rx_mib_s", pynvml.nvmlDeviceGetPcieThroughput, (pynvml.NVML_PCIE_UTIL_RX_BYTES,), 1024),
    ("pcie_tx_mib_s", pynvml.nvmlDeviceGetPcieThroughput, (pynvml.NVML_PCIE_UTIL_TX_BYTES,), 1024),
)
"""Attribute, how it is asked for, and how many of what NVML counts in are one of ours."""


class NvmlCard:
    """A card that is open for reading."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self._seen: dict[int, tuple[int, float]] = {}  # by process: its last sample, and when we saw it
        self._reports_processes = True
        self.mps: Mps | None = None
        """The server on the card, as of the last reading."""
        self.blind = False
        """Whether that server's activity is all that was told so far, and none of its clients'."""
        name = _ask(pynvml.nvmlDeviceGetName, handle)
        self.model = gpu_model(name.decode() if isinstance(name, bytes) else name or "")
        self.mode = _ask(pynvml.nvmlDeviceGetComputeMode, handle)
        self.unsound = False
        """Whether it has had errors that cannot be corrected, since the driver was loaded or while we looked."""
        self._events = _ask(pynvml.nvmlEventSetCreate)
        if self._events is not None:
            _ask(pynvml.nvmlDeviceRegisterEvents, handle, pynvml.nvmlEventTypeXidCriticalError, self._events)
        limit = _ask(pynvml.nvmlDeviceGetEnforcedPowerLimit, handle)
        self._power_limit_w = limit / 1000 if limit else None

    @property
    def one_process(self) -> bool:
        """Whether the card's compute mode turns a second process away; a server of MPS is one process."""
        return not is_open(self.mode, self.mps is not None)

    def read(self, *, everything: bool) -> CardSample:
        """Activity and processes; with `everything` also power, temperature, clocks and PCIe.

        PCIe counters alone hold the caller for 20 ms each on real cards, which is why they can be left out.
        """
        if everything:
            self._look_for_errors()
        rates = _ask(pynvml.nvmlDeviceGetUtilizationRates, self.handle)
        memory = _ask(pynvml.nvmlDeviceGetMemoryInfo, self.handle)
        return CardSample(
            util_pct=rates and float(rates.gpu),
            mem_access_pct=rates and float(rates.memory),
            mem_used_mib=memory and memory.used / _MIB,
            mem_total_mib=memory and memory.total / _MIB,
            other=self._other() if everything else {},
            processes=self._processes(),
        )

    def _look_for_errors(self) -> None:
        errors = _ask(
            pynvml.nvmlDeviceGetTotalEccErrors, self.handle, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            pynvml.NVML_VOLATILE_ECC,
        )  # fmt: skip
        self.unsound |= bool(errors)
        while self._events is not None and (event := _ask(pynvml.nvmlEventSetWait_v2, self._events, 0)) is not None:
            self.unsound |= event.eventData not in XIDS_OF_PROGRAMS

    def _other(self) -> dict[str, float]:
        handle = self.handle
        found = {name: (_ask(question, handle, *more), unit) for name, question, more, unit in _SLOW_COUNTERS}
        values = {name: value / unit for name, (value, unit) in found.items() if value is not None}
        if "power_w" in values and self._power_limit_w:
            values["power_pct"] = 100 * values["power_w"] / self._power_limit_w
        return values

    def _processes(self) -> dict[int, ProcessLoad] | None:
        running = _ask(pynvml.nvmlDeviceGetComputeRunningProcesses, self.handle)
        if running is None:
            return None
        clients = _ask(pynvml.nvmlDeviceGetMPSComputeRunningProcesses, self.handle) or ()
        used = {int(process.pid): process.usedGpuMemory for process in (*running, *clients)}
        loads = self._loads(used.keys())
        servers = {pid: uid for pid in used if (uid := mps_server_uid(pid)) is not None}
        others = used.keys() - servers.keys()
        if not servers and not clients:
            self.mps, self.blind = None, False
        else:
            told = any(loads[pid][0] for pid in others)
            self.blind = not told and (self.blind or self.mps is None)
            self.mps = Mps.ONE_USER if any(servers.values()) else Mps.ALL_USERS  # root's serves all users
            if self.blind:
                return None
        return {pid: ProcessLoad(None if used[pid] is None else used[pid] / _MIB, *loads[pid]) for pid in others}

    def _loads(self, pids: Collection[int]) -> dict[int, tuple[float | None, float | None]]:
        """Mean (SM, memory) utilisation of each process over its samples since the last call.

        The driver samples more slowly than we may ask, and says nothing of a process that is idle: a short silence
        is unknown, a long one is 0.
        """
        now = time.monotonic()
        self._seen = {pid: self._seen.get(pid, (0, now)) for pid in pids}
        sums: dict[int, list[float]] = {}
        for sample in self._new_samples(min((seen_us for seen_us, _ in self._seen.values()), default=0)):
            pid, at_us = int(sample.pid), int(sample.timeStamp)
            # Real drivers pad the list with entries from long ago and with garbage.
            if pid not in self._seen or at_us <= self._seen[pid][0] or sample.smUtil > 100 or sample.memUtil > 100:
                continue
            total = sums.setdefault(pid, [0.0, 0.0, 0.0, 0.0])
            total[0] += 1
            total[1] += sample.smUtil
            total[2] += sample.memUtil
            total[3] = max(total[3], at_us)
        loads: dict[int, tuple[float | None, float | None]] = {}
        for pid, (_, heard) in self._seen.items():
            if pid in sums:
                n, sm, mem, latest_us = sums[pid]
                self._seen[pid] = (int(latest_us), now)
                loads[pid] = (sm / n, mem / n)
            else:
                loads[pid] = (0.0, 0.0) if self._reports_processes and now - heard > _SILENCE_S else (None, None)
        return loads

    def _new_samples(self, since_us: int) -> Sequence[Any]:
        try:
            samples: Sequence[Any] = pynvml.nvmlDeviceGetProcessUtilization(self.handle, since_us)
        except pynvml.NVMLError as error:
            if error.value == pynvml.NVML_ERROR_NOT_SUPPORTED:
                self._reports_processes = False
            return ()
        return samples


def is_open(mode: int | None, mps: bool) -> bool:
    """Whether a compute mode lets a second job onto the card: EXCLUSIVE_PROCESS is right under MPS, wrong without."""
    right = (pynvml.NVML_COMPUTEMODE_DEFAULT, pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS if mps else None)
    return mode is None or mode in right


def open_cards(indices: Sequence[int]) -> dict[int, NvmlCard]:
    """The cards that the node calls by these indices; NvmlError where that cannot be."""
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
        # Where the job's device cgroup hides the other cards, NVML numbers the visible ones from 0.
        hidden = count == len(indices)
        return {
            index: NvmlCard(pynvml.nvmlDeviceGetHandleByIndex(position if hidden else index))
            for position, index in enumerate(sorted(indices))
        }
    except pynvml.NVMLError as error:
        raise NvmlError(str(error)) from error


def processes_by_card() -> dict[int, list[int]]:
    """The processes on each card of the node; NvmlError where that cannot be."""
    try:
        pynvml.nvmlInit()
        handles = {index: pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())}
    except pynvml.NVMLError as error:
        raise NvmlError(str(error)) from error
    found = {index: _ask(pynvml.nvmlDeviceGetComputeRunningProcesses, handle) for index, handle in handles.items()}
    return {
        index: [pid for process in running or () if mps_server_uid(pid := int(process.pid)) is None]
        for index, running in found.items()
    }


# Calls that may never come back: a driver in trouble can hang inside NVML for hours, a file system too.


Result = TypeVar("Result")
_NVML_LIMIT_S = 2.0
"""A driver that is only slow (no persistence mode) answers later, and is then used."""
_NVML_RETRY_S = 30.0


class Stuck(Exception):
    """The call has not returned in time; it may still."""


class Bounded:
    """Runs calls one after the other in a thread of its own and waits for each only so long.

    A thread, not a process: a second interpreter would double the sampler's memory. ctypes lets go of the
    interpreter's lock during a foreign call, so a hung one holds up nobody else; the thread is a daemon, so the
    process can still end.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._last: Future[Any] | None = None

    def call(self, function: Callable[[], Result], timeout_s: float) -> Result:
        """What `function` returns or raises; `Stuck` if that, or an earlier call, takes too long."""
        if self._last is None:
            threading.Thread(target=self._serve, name="bounded", daemon=True).start()
        elif not self._last.done():
            raise Stuck
        answer: Future[Result] = Future()
        self._last = answer
        self._calls.put((function, answer))
        if not wait([answer], timeout_s).done:
            raise Stuck
        return answer.result()

    def _serve(self) -> None:
        while True:
            function, answer = self._calls.get()
            try:
                answer.set_result(function())
            except BaseException as error:  # noqa: BLE001 - handed to the caller, whatever it is
                answer.set_exception(error)


class Cards:
    """The job's cards behind NVML, whatever state NVML is in."""

    def __init__(self, indices: Sequence[int], log: Callable[[str], None]) -> None:
        self._indices = indices
        self._log = log
        self._bounded = Bounded()
        self._open: dict[int, NvmlCard] = {}
        self._trouble = ""
        self._retry_at = 0.0
        self.lost = False
        """Whether a card has fallen off the bus."""

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
            self.lost = getattr(error.__cause__, "value", None) == pynvml.NVML_ERROR_GPU_IS_LOST
            self._open = {}
            self._fail(f"NVML: {error}", retry_s=_NVML_RETRY_S)
            return {}
        if self._trouble:
            self._log("NVML answers again")
            self._trouble, self.lost = "", False
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


# Which cards a job is on, where Slurm does not say.
#
# The prolog of a job that starts just after slurmctld did has no SLURM_JOB_GPUS: the node has not registered yet.


class CardSearch:
    """Looks for a job's processes on the node's cards."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._bounded = Bounded()

    def look(self) -> tuple[int, ...]:
        """The indices of the cards that a process of the job is on now; empty while there is none, or NVML fails."""
        self._members.refresh()
        try:
            found = self._bounded.call(processes_by_card, _NVML_LIMIT_S)
        except (Stuck, NvmlError):
            return ()
        return tuple(index for index, pids in sorted(found.items()) if any(self._members.owns(pid) for pid in pids))
