"""A job's view of an emulated card: who else is there, taking a seat, publishing load, leaving."""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING

from gpushare_lab.emulator import layout
from slurm_gpushare.protocol.errors import GpushareError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_U32 = struct.Struct("=I")
_U64 = struct.Struct("=Q")
LOCK_TIMEOUT_S = 10.0


def now_us() -> int:
    """The clock of every card file."""
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000


@dataclass(frozen=True)
class Demand:
    """What a job asks of a GPU when it has it alone, in the steady part of an epoch."""

    gpu_util_pct: float
    mem_access_pct: float
    mem_mib: int
    pcie_mib_s: float = 0.0
    cpu_pct: float = 0.0
    profile: str = ""  # its name in a pairs table, if it has one


@dataclass(frozen=True)
class Sample:
    """A job's own load at one moment."""

    at_us: int
    sm_pct: float
    mem_pct: float
    tx_kb_s: float
    rx_kb_s: float
    rate: float


@dataclass(frozen=True)
class SlotUse:
    """From when to when a job used a slot of the card; `until_us` is None while it is there and running."""

    slot: int
    since_us: int
    until_us: int | None
    demand: Demand


@dataclass(frozen=True)
class CardInfo:
    """What a card is."""

    index: int
    name: str
    uuid: str
    compute_mode: int
    mem_total_mib: int
    mem_reserved_mib: int

    @property
    def mem_usable_mib(self) -> int:
        """What jobs can allocate."""
        return self.mem_total_mib - self.mem_reserved_mib


class ComputeMode(IntEnum):
    """NVML's compute modes, as its numbers."""

    DEFAULT = 0
    PROHIBITED = 2
    EXCLUSIVE_PROCESS = 3


class OutOfMemory(GpushareError):
    """The card has not got the memory that a job allocates."""


class CardBusy(GpushareError):
    """The compute mode of the card admits no further process."""


def process_start(pid: int) -> tuple[str, int] | None:
    """State letter and start time of a process, or None if there is none that runs."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
    except OSError:
        return None
    state = fields[0].decode()
    return None if state in "ZX" else (state, int(fields[19]))


class EmulatedCard:
    """An open card file. Close it, or use it as a context manager."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(self._fd).st_size != layout.CARD_BYTES:
                raise GpushareError(f"{path} is not a card of this version", "Bring the testbed up again")
            self._map = mmap.mmap(self._fd, layout.CARD_BYTES)
            if self._map[:8] != layout.MAGIC:
                self._map.close()
                raise GpushareError(f"{path} is not a card of this version", "Bring the testbed up again")
        except BaseException:
            os.close(self._fd)
            raise

    def close(self) -> None:
        self._map.close()
        os.close(self._fd)

    def __enter__(self) -> EmulatedCard:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def info(self) -> CardInfo:
        fields = layout.HEADER.unpack_from(self._map)
        name, uuid = (text.rstrip(b"\0").decode() for text in fields[9:11])
        return CardInfo(fields[1], name, uuid, fields[4], fields[5], fields[6])

    def occupants(self, since_us: int) -> list[SlotUse]:
        """Every stay that reached past `since_us`, in the order of arrival.

        A process that died or is suspended was last there when it published last.
        """
        found = []
        for slot in range(layout.SLOTS):
            at = layout.slot_at(slot)
            join_us = self._u64(at + layout.JOIN_AT)
            if not join_us:
                continue
            left_us = self._u64(at + layout.LEAVE_AT)
            until_us: int | None = left_us or None
            pid = _U32.unpack_from(self._map, at)[0]
            if not left_us:
                process = process_start(pid)
                if process is None or process[1] != self._u64(at + layout.START_TICKS_AT) or process[0] in "Tt":
                    until_us = self._last_sample_us(at) or join_us
            if until_us is None or until_us > since_us:
                found.append(SlotUse(slot, join_us, until_us, self._demand(at)))
        return sorted(found, key=lambda stay: stay.since_us)

    def join(self, demand: Demand, clashes: frozenset[str] = frozenset()) -> Seat:
        """Allocate memory on the card and sit down, or raise OutOfMemory or CardBusy.

        `clashes` names profiles that are known not to fit beside this job, whatever their memory says.
        """
        with self._locked():
            present = self._present()
            mode = self.info.compute_mode
            if mode == ComputeMode.PROHIBITED or (mode == ComputeMode.EXCLUSIVE_PROCESS and present):
                raise CardBusy("CUDA error: all CUDA-capable devices are busy or unavailable")
            self._check_memory(demand.mem_mib, present, any(other.profile in clashes for other in present.values()))
            slot = self._free_slot(present)
            at = layout.slot_at(slot)
            self._put(at + layout.LEAVE_AT, 1)  # whoever looks while we write sees a stay that ended long ago
            self._put(at + layout.JOIN_AT, 0)
            pid = os.getpid()
            process = process_start(pid)
            assert process is not None
            _U32.pack_into(self._map, at + layout.PID_AT, pid)
            self._put(at + layout.START_TICKS_AT, process[1])
            self._put(at + layout.MEMORY_AT, demand.mem_mib)
            self._put(at + layout.HEAD_AT, 0)
            layout.DEMAND.pack_into(
                self._map, at + layout.DEMAND_AT,
                demand.gpu_util_pct, demand.mem_access_pct, demand.pcie_mib_s, demand.cpu_pct, 0.0, 0.0,
            )  # fmt: skip
            name = demand.profile.encode()[: layout.PROFILE_BYTES - 1].ljust(layout.PROFILE_BYTES, b"\0")
            self._map[at + layout.PROFILE_AT : at + layout.PROFILE_AT + layout.PROFILE_BYTES] = name
            joined_us = now_us()
            self._put(at + layout.LEAVE_AT, 0)
            self._put(at + layout.JOIN_AT, joined_us)
        return Seat(self, slot, joined_us)

    def joined_us(self, slot: int) -> int:
        """When the present or last holder of a slot sat down, 0 if there was none."""
        return self._u64(layout.slot_at(slot) + layout.JOIN_AT)

    def publish(self, slot: int, sample: Sample) -> None:
        """Append to the ring of a slot; the oldest sample goes."""
        at = layout.slot_at(slot)
        head = self._u64(at + layout.HEAD_AT)
        layout.SAMPLE.pack_into(
            self._map, at + layout.RING_AT + head % layout.RING * layout.SAMPLE.size,
            sample.at_us, sample.sm_pct, sample.mem_pct, sample.tx_kb_s, sample.rx_kb_s, sample.rate,
        )  # fmt: skip
        self._put(at + layout.HEAD_AT, head + 1)

    def leave(self, slot: int, at_us: int) -> None:
        """End a stay; its memory is free at once."""
        self._put(layout.slot_at(slot) + layout.LEAVE_AT, at_us)

    def grow(self, slot: int, more_mib: int) -> None:
        """Allocate more, or raise OutOfMemory."""
        with self._locked():
            present = self._present()
            self._check_memory(more_mib, present)
            self._put(layout.slot_at(slot) + layout.MEMORY_AT, present[slot].mem_mib + more_mib)

    def _check_memory(self, wanted_mib: int, present: Mapping[int, Demand], clash: bool = False) -> None:
        info = self.info
        used_mib = sum(demand.mem_mib for demand in present.values())
        free_mib = max(0, info.mem_usable_mib - used_mib)
        if wanted_mib > free_mib or clash:
            raise OutOfMemory(
                f"CUDA out of memory. Tried to allocate {_gib(wanted_mib)} (GPU {info.index}; "
                f"{_gib(info.mem_total_mib)} total capacity; {_gib(used_mib)} already allocated; {_gib(free_mib)} free)"
            )

    def _present(self) -> dict[int, Demand]:
        """Who holds memory, by slot: every process that lives, suspended ones too."""
        present = {}
        for slot in range(layout.SLOTS):
            at = layout.slot_at(slot)
            if self._u64(at + layout.JOIN_AT) and not self._u64(at + layout.LEAVE_AT):
                process = process_start(_U32.unpack_from(self._map, at)[0])
                if process is not None and process[1] == self._u64(at + layout.START_TICKS_AT):
                    present[slot] = self._demand(at)
        return present

    def _free_slot(self, present: Mapping[int, Demand]) -> int:
        """The slot that ended longest ago, so that neighbours have seen its end."""

        def ended_us(slot: int) -> int:
            at = layout.slot_at(slot)
            join_us = self._u64(at + layout.JOIN_AT)
            return join_us and (self._u64(at + layout.LEAVE_AT) or self._last_sample_us(at) or join_us)

        free = [slot for slot in range(layout.SLOTS) if slot not in present]
        if not free:
            raise CardBusy(f"all {layout.SLOTS} places of the emulated card are taken")
        return min(free, key=ended_us)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Only arrivals lock each other out: publishing, leaving and reading never wait."""
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if time.monotonic() > deadline:
                raise GpushareError("another job has been joining the emulated card for too long")
            time.sleep(0.01)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _demand(self, at: int) -> Demand:
        gpu, access, pcie, cpu, _, _ = layout.DEMAND.unpack_from(self._map, at + layout.DEMAND_AT)
        name = self._map[at + layout.PROFILE_AT : at + layout.PROFILE_AT + layout.PROFILE_BYTES]
        return Demand(
            gpu, access, self._u64(at + layout.MEMORY_AT), pcie, cpu, name.rstrip(b"\0").decode(errors="replace")
        )

    def _last_sample_us(self, at: int) -> int:
        head = self._u64(at + layout.HEAD_AT)
        if not head:
            return 0
        return self._u64(at + layout.RING_AT + (head - 1) % layout.RING * layout.SAMPLE.size)

    def _u64(self, at: int) -> int:
        return int(_U64.unpack_from(self._map, at)[0])

    def _put(self, at: int, value: int) -> None:
        _U64.pack_into(self._map, at, value)


@dataclass(frozen=True)
class Seat:
    """A job's own place on a card; once the card was emptied under it (a reset) it does nothing any more."""

    card: EmulatedCard
    slot: int
    joined_us: int

    def publish(self, sample: Sample) -> None:
        if self._held():
            self.card.publish(self.slot, sample)

    def grow(self, more_mib: int) -> None:
        if self._held():
            self.card.grow(self.slot, more_mib)

    def leave(self, at_us: int) -> None:
        if self._held():
            self.card.leave(self.slot, at_us)

    def _held(self) -> bool:
        return self.card.joined_us(self.slot) == self.joined_us


def _gib(mib: int) -> str:
    return f"{mib / 1024:.2f} GiB"
