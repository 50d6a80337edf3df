"""What a profile may hold: every attribute's name, unit, range, where it is read, and the paper's name for it.

This table is the schema of a record's statistics and the source of the list in docs/telemetry.md. Nothing in
it comes from the user: no name, path, argument or hyper-parameter.
"""

from __future__ import annotations

from dataclasses import dataclass

PERCENT = 100.0
ANY = 2.0**53  # the largest range in which every whole number is exact in JSON


@dataclass(frozen=True, slots=True)
class Attribute:
    """One measured quantity; values lie from 0 to `limit`."""

    name: str
    unit: str
    source: str
    paper: str = ""
    limit: float = ANY

    @property
    def is_share(self) -> bool:
        """Whether it is a percentage of a whole, which a histogram covers exactly."""
        return self.limit == PERCENT


def _share(name: str, source: str, paper: str = "") -> Attribute:
    return Attribute(name, "%", source, paper, PERCENT)


# The job's activity on its GPU: kept for the profile and, over the whole run, for time alone and time shared.
ACTIVITY: tuple[Attribute, ...] = (
    _share("gpu_util_pct", "own: card's rate while alone, sum of own processes' smUtil while shared",
           "MGUP, GPU_Util_%_ran, Min_GPU_Util_%"),
    _share("mem_access_pct", "own: card's memory rate while alone, own processes' memUtil while shared",
           "MaGTSAMP, GTSAMPR, MiGTSAMP"),
    _share("gpu_mem_pct", "own processes' usedGpuMemory / nvmlDeviceGetMemoryInfo total", "MGMAP"),
    Attribute("gpu_mem_mib", "MiB", "own processes' usedGpuMemory"),
    _share("proc_sm_pct", "nvmlDeviceGetProcessUtilization smUtil, own processes, alone and shared alike"),
    _share("proc_mem_access_pct", "nvmlDeviceGetProcessUtilization memUtil, own processes"),
    _share("outside_pct", "smUtil of processes that are of no job on the card, from 2 % on; counted as the job's own"),
    _share("card_util_pct", "nvmlDeviceGetUtilizationRates gpu, whole card"),
    _share("card_mem_access_pct", "nvmlDeviceGetUtilizationRates memory, whole card"),
    _share("card_mem_pct", "nvmlDeviceGetMemoryInfo used / total, whole card"),
)  # fmt: skip

CARD: tuple[Attribute, ...] = (
    Attribute("power_w", "W", "nvmlDeviceGetPowerUsage"),
    _share("power_pct", "power / nvmlDeviceGetEnforcedPowerLimit", "GPUPR, MaGPUPR, MiGPUPR"),
    Attribute("temperature_c", "°C", "nvmlDeviceGetTemperature", "GPU_Temp_ran, Max_GPU_Temp, Min_GPU_Temp"),
    Attribute("sm_clock_mhz", "MHz", "nvmlDeviceGetClockInfo SM"),
    Attribute("mem_clock_mhz", "MHz", "nvmlDeviceGetClockInfo MEM"),
    Attribute("pcie_rx_mib_s", "MiB/s", "nvmlDeviceGetPcieThroughput RX"),
    Attribute("pcie_tx_mib_s", "MiB/s", "nvmlDeviceGetPcieThroughput TX"),
)

JOB: tuple[Attribute, ...] = (
    Attribute("job_cpu_pct", "% of a core", "/proc/PID/stat utime + stime"),
    Attribute("job_cpu_user_pct", "% of a core", "/proc/PID/stat utime"),
    Attribute("job_cpu_system_pct", "% of a core", "/proc/PID/stat stime"),
    Attribute("job_processes", "", "scontrol listpids or the job's cgroup"),
    Attribute("job_threads", "", "/proc/PID/stat num_threads", "CPU_Thds"),
    Attribute("job_rss_mib", "MiB", "/proc/PID/stat rss", "MaPMiU(non swap)"),
    _share("job_mem_pct", "resident memory / MemTotal", "PMiU(non swap)_%"),
    Attribute("job_ctx_switches_s", "1/s", "/proc/PID/status ctxt_switches"),
    Attribute("job_read_mib_s", "MiB/s", "/proc/PID/io read_bytes"),
    Attribute("job_write_mib_s", "MiB/s", "/proc/PID/io write_bytes"),
)

NODE: tuple[Attribute, ...] = (
    _share("cpu_pct", "/proc/stat", "CPU_Util_%_ran, Max_CPU_Util_%, Min_CPU_Util_%"),
    *(_share(f"cpu_{state}_pct", f"/proc/stat {state}", f"SCT_{short}") for state, short in (
        ("user", "user"), ("nice", "nice"), ("system", "sys"), ("idle", "idle"), ("iowait", "iowait"),
        ("irq", "irq"), ("softirq", "softirq"), ("steal", "steal"), ("guest", "guest"), ("guest_nice", "guest_nice"),
    )),
    Attribute("cores", "", "psutil.cpu_count", "Cor_in_Sys"),
    Attribute("ctx_switches_s", "1/s", "/proc/stat ctxt", "CS_ctx_switches"),
    Attribute("interrupts_s", "1/s", "/proc/stat intr", "CS_interrupts"),
    Attribute("soft_interrupts_s", "1/s", "/proc/stat softirq", "CS_soft_interrupts"),
    _share("host_mem_pct", "/proc/meminfo",
           "Sys_Mem_Util_%_ran, Max_Sys_Mem_Util_%, Min_Sys_Mem_Util_%, SMU_percent"),
    *(Attribute(f"host_mem_{kind}_mib", "MiB", "/proc/meminfo", f"SMU_{kind}") for kind in (
        "total", "available", "used", "free", "active", "inactive", "buffers", "cached", "shared", "slab",
    )),
    Attribute("disk_total_mib", "MiB", "statvfs /", "DU_total"),
    Attribute("disk_used_mib", "MiB", "statvfs /", "DU_used"),
    Attribute("disk_free_mib", "MiB", "statvfs /", "DU_free"),
    _share("disk_pct", "statvfs /", "DU_percent"),
    Attribute("disk_read_mib_s", "MiB/s", "/proc/diskstats"),
    Attribute("disk_write_mib_s", "MiB/s", "/proc/diskstats"),
    Attribute("net_sent_mib_s", "MiB/s", "/proc/net/dev", "NIOB_sent"),
    Attribute("net_received_mib_s", "MiB/s", "/proc/net/dev", "NIOB_received"),
    Attribute("net_packets_sent_s", "1/s", "/proc/net/dev", "NIOP_sent"),
    Attribute("net_packets_received_s", "1/s", "/proc/net/dev", "NIO_received"),
    Attribute("net_errors_in_s", "1/s", "/proc/net/dev", "NIO_errin"),
    Attribute("net_errors_out_s", "1/s", "/proc/net/dev", "NIO_errout"),
    Attribute("net_drops_in_s", "1/s", "/proc/net/dev", "NIO_dropin"),
    Attribute("net_drops_out_s", "1/s", "/proc/net/dev", "NIO_dropout"),
)  # fmt: skip

ATTRIBUTES: dict[str, Attribute] = {attribute.name: attribute for attribute in (*ACTIVITY, *CARD, *JOB, *NODE)}
ACTIVITY_NAMES: frozenset[str] = frozenset(attribute.name for attribute in ACTIVITY)
