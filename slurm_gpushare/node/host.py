"""Host counters: the node as a whole, and the job's own processes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping

import psutil

_MIB = 1024 * 1024
_CPU_STATES = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal", "guest", "guest_nice")
_MEMORY_KINDS = (
    "total", "available", "used", "free", "active", "inactive", "buffers", "cached", "shared", "slab",
)  # fmt: skip


class CounterRates:
    """Turns counters that only grow into rates per second. The first reading gives none."""

    def __init__(self) -> None:
        self._last: Mapping[str, float] = {}
        self._at = 0.0

    def update(self, counters: Mapping[str, float], now: float) -> dict[str, float]:
        elapsed = now - self._at
        rates = {
            name: max(0.0, value - self._last[name]) / elapsed
            for name, value in counters.items()
            if name in self._last and elapsed > 0
        }
        self._last, self._at = counters, now
        return rates


class NodeCounters:
    """What the whole node does; on a node with several jobs this is not the job's alone."""

    def __init__(self) -> None:
        self._rates = CounterRates()
        self._cores = psutil.cpu_count() or 1

    def read(self) -> dict[str, float]:
        """Values by attribute name."""
        now = time.monotonic()
        rates = self._rates.update(_node_counters(), now)
        values = {name: rate for name, rate in rates.items() if not name.startswith("cpu_")}
        seconds = {state: rates.get(f"cpu_{state}", 0.0) for state in _CPU_STATES}
        # Guest time is already inside user and nice time.
        total = sum(seconds.values()) - seconds["guest"] - seconds["guest_nice"]
        if total > 0:
            values |= {f"cpu_{state}_pct": 100 * share / total for state, share in seconds.items()}
            values["cpu_pct"] = min(100 * (total - seconds["idle"] - seconds["iowait"]) / total, 100.0)  # rounding
        values["cores"] = self._cores
        memory = psutil.virtual_memory()
        values["host_mem_pct"] = memory.percent
        values |= {f"host_mem_{kind}_mib": getattr(memory, kind) / _MIB for kind in _MEMORY_KINDS}
        disk = psutil.disk_usage("/")
        values |= {f"disk_{kind}_mib": getattr(disk, kind) / _MIB for kind in ("total", "used", "free")}
        values["disk_pct"] = disk.percent
        return values


_MIB_S = (("read", "read_bytes", "disk"), ("write", "write_bytes", "disk"), ("sent", "bytes_sent", "net"),
          ("received", "bytes_recv", "net"))  # fmt: skip
_NET_COUNTS = (("packets_sent", "packets_sent"), ("packets_received", "packets_recv"), ("errors_in", "errin"),
               ("errors_out", "errout"), ("drops_in", "dropin"), ("drops_out", "dropout"))  # fmt: skip


def _node_counters() -> dict[str, float]:
    cpu, stats = psutil.cpu_times(), psutil.cpu_stats()
    counters: dict[str, float] = {f"cpu_{state}": getattr(cpu, state, 0.0) for state in _CPU_STATES}
    for name in ("ctx_switches", "interrupts", "soft_interrupts"):
        counters[f"{name}_s"] = getattr(stats, name)
    found = {"disk": psutil.disk_io_counters(nowrap=False), "net": psutil.net_io_counters(nowrap=False)}
    for name, counter, kind in _MIB_S:
        if found[kind]:
            counters[f"{kind}_{name}_mib_s"] = getattr(found[kind], counter) / _MIB
    if found["net"]:
        counters |= {f"net_{name}_s": getattr(found["net"], counter) for name, counter in _NET_COUNTS}
    return counters


class JobCounters:
    """What the job's processes do, added up; a process that ended keeps counting with what it had done."""

    def __init__(self) -> None:
        self._rates = CounterRates()
        self._ended: Counter[str] = Counter()  # of floats
        self._last: dict[int, dict[str, float]] = {}
        self._mem_total = psutil.virtual_memory().total

    def read(self, processes: Iterable[psutil.Process]) -> dict[str, float]:
        """Values by attribute name; empty if there is no process."""
        counters: dict[int, dict[str, float]] = {}
        threads = resident = 0
        for process in processes:
            try:
                with process.oneshot():
                    counters[process.pid] = _process_counters(process)
                    threads += process.num_threads()
                    resident += process.memory_info().rss
            except psutil.Error:
                continue
        for pid in self._last.keys() - counters.keys():
            self._ended.update(self._last[pid])
        self._last = counters
        if not counters:
            return {}
        totals = self._ended.copy()
        for one in counters.values():
            totals.update(one)
        values = self._rates.update(totals, time.monotonic())
        if "job_cpu_user_pct" in values:
            values["job_cpu_pct"] = values["job_cpu_user_pct"] + values["job_cpu_system_pct"]
        return values | {
            "job_processes": len(counters),
            "job_threads": threads,
            "job_rss_mib": resident / _MIB,
            "job_mem_pct": 100 * resident / self._mem_total,
        }


def _process_counters(process: psutil.Process) -> dict[str, float]:
    cpu, switches = process.cpu_times(), process.num_ctx_switches()
    counters = {
        "job_cpu_user_pct": 100 * cpu.user,
        "job_cpu_system_pct": 100 * cpu.system,
        "job_ctx_switches_s": float(switches.voluntary + switches.involuntary),
    }
    try:
        io = process.io_counters()
    except psutil.Error:
        return counters  # /proc/PID/io of others is for root
    return counters | {"job_read_mib_s": io.read_bytes / _MIB, "job_write_mib_s": io.write_bytes / _MIB}
