"""The emulated NVML, asked through the real pynvml by processes of their own."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from emulated import NODE, EmulatedNode
from gpushare_lab.emulator import ComputeMode, build_library, clear_faults, create_node, set_compute_mode, set_fault
from gpushare_lab.emulator.card import CardBusy, Demand, OutOfMemory, Sample, Seat, now_us
from gpushare_lab.testbed.processes import wait_until

from slurm_gpushare.protocol.errors import GpushareError

GPU_IS_LOST, NOT_FOUND, DRIVER_NOT_LOADED, NOT_SUPPORTED, FUNCTION_NOT_FOUND, INVALID_ARGUMENT = 15, 6, 9, 3, 13, 2
HOLD = """
import sys
from pathlib import Path
from gpushare_lab.emulator.card import EmulatedCard, Demand, Sample, now_us
card = EmulatedCard(Path({path!r}))
seat = card.join(Demand(50, 20, 3000))
seat.publish(Sample(now_us(), 50, 20, 0, 0, 1))
print("seated", flush=True)
sys.stdin.read()
"""


@contextmanager
def seated(node: EmulatedNode, sm: float = 40, access: float = 20, mem_mib: int = 2048, gpu: int = 0) -> Iterator[Seat]:
    """This very process as a job on the card."""
    with node.card(gpu) as card:
        seat = card.join(Demand(sm, access, mem_mib))
        seat.publish(Sample(now_us(), sm, access, 1000, 5000, 1.0))
        yield seat
        seat.leave(now_us())


def test_a_device_is_what_the_node_says(emulated_node: EmulatedNode) -> None:
    names = "[n.nvmlDeviceGetName(card), n.nvmlDeviceGetIndex(card), n.nvmlDeviceGetMinorNumber(card)]"
    assert emulated_node.nvml(f"n.nvmlDeviceGetCount(), {names}") == "2 ['Tesla V100-SXM2-16GB', 0, 0]"


def test_a_device_is_found_by_uuid_and_by_pci_address(emulated_node: EmulatedNode) -> None:
    second = "n.nvmlDeviceGetHandleByIndex(1)"
    by_uuid = f"n.nvmlDeviceGetHandleByUUID(n.nvmlDeviceGetUUID({second}))"
    by_pci = f"n.nvmlDeviceGetHandleByPciBusId(n.nvmlDeviceGetPciInfo({second}).busId)"
    by_legacy = f"n.nvmlDeviceGetHandleByPciBusId(n.nvmlDeviceGetPciInfo({second}).busIdLegacy)"
    found = ", ".join(f"n.nvmlDeviceGetIndex({handle})" for handle in (by_uuid, by_pci, by_legacy))
    assert emulated_node.nvml(found) == "1 1 1"


def test_each_node_shows_its_own_gpus(emulated_node: EmulatedNode) -> None:
    create_node(emulated_node.emu_dir, "gpu1", 4)
    assert emulated_node.nvml("n.nvmlDeviceGetCount()", SLURMD_NODENAME="gpu1") == "4"
    uuid = "n.nvmlDeviceGetUUID(card)"
    assert emulated_node.nvml(uuid, SLURMD_NODENAME="gpu1") != emulated_node.nvml(uuid)


@pytest.mark.parametrize(
    "env", [{"GPUSHARE_EMU_NODE": "elsewhere"}, {"GPUSHARE_EMU_NODE": ""}, {"GPUSHARE_EMU_DIR": ""}]
)
def test_a_node_without_gpus_has_no_driver(emulated_node: EmulatedNode, env: dict[str, str]) -> None:
    assert emulated_node.nvml("0", **env) == f"NVMLError {DRIVER_NOT_LOADED}"


def test_an_idle_card_is_idle(emulated_node: EmulatedNode) -> None:
    shown = emulated_node.nvml(
        "n.nvmlDeviceGetUtilizationRates(card).gpu, n.nvmlDeviceGetComputeRunningProcesses(card), "
        "n.nvmlDeviceGetMemoryInfo(card, n.nvmlMemory_v2).used, n.nvmlDeviceGetClockInfo(card, n.NVML_CLOCK_SM)"
    )
    assert shown == "0 [] 0 135"
    assert emulated_node.nvml("n.nvmlDeviceGetProcessUtilization(card, 0)") == f"NVMLError {NOT_FOUND}"


def test_a_busy_card_shows_its_job(emulated_node: EmulatedNode) -> None:
    with seated(emulated_node, sm=40, access=20, mem_mib=2048):
        shown = emulated_node.nvml(
            "[(p.pid, p.usedGpuMemory) for p in n.nvmlDeviceGetComputeRunningProcesses(card)], "
            "[(s.pid, s.smUtil, s.memUtil) for s in n.nvmlDeviceGetProcessUtilization(card, 0)], "
            "n.nvmlDeviceGetUtilizationRates(card).gpu, n.nvmlDeviceGetUtilizationRates(card).memory, "
            "n.nvmlDeviceGetPcieThroughput(card, n.NVML_PCIE_UTIL_RX_BYTES)"
        )
    pid = os.getpid()
    assert shown == f"[({pid}, {2048 * 2**20})] [({pid}, 40, 20)] 40 20 5000"


def test_memory_adds_up_in_both_versions(emulated_node: EmulatedNode) -> None:
    with seated(emulated_node, mem_mib=1000), seated(emulated_node, mem_mib=500):
        old, new = (
            emulated_node.nvml(f"[getattr(n.nvmlDeviceGetMemoryInfo(card{more}), f) >> 20 for f in {fields}]")
            for more, fields in (
                ("", ["total", "used", "free"]),
                (", n.nvmlMemory_v2", ["total", "reserved", "used", "free"]),
            )
        )
    assert old == "[16384, 1724, 14660]"  # the older call counts what the driver keeps as used
    assert new == "[16384, 224, 1500, 14660]"


def test_every_version_of_the_process_list_agrees(emulated_node: EmulatedNode) -> None:
    with seated(emulated_node):
        shown = emulated_node.nvml(
            "*[len(getattr(n, f'nvmlDeviceGetComputeRunningProcesses_v{v}')(card)) for v in (2, 3)]"
        )
        code = (
            "import ctypes, pynvml as n\nn.nvmlInit()\ncard = n.nvmlDeviceGetHandleByIndex(0)\n"
            "room, count = (ctypes.c_ulonglong * 8)(), ctypes.c_uint(4)\n"
            "code = n.nvmlLib.nvmlDeviceGetComputeRunningProcesses(card, ctypes.byref(count), room)\n"
            "print(code, count.value, room[0])"
        )
        first = emulated_node.python(code).communicate(timeout=60)[0]
    assert shown == "1 1"
    assert first.split() == ["0", "1", str(os.getpid())]


def test_a_card_is_never_more_than_fully_used(emulated_node: EmulatedNode) -> None:
    with seated(emulated_node, sm=80, access=60), seated(emulated_node, sm=70, access=70):
        assert emulated_node.nvml("str(n.nvmlDeviceGetUtilizationRates(card))").endswith("(gpu: 100 %, memory: 100 %)")


def test_a_busy_card_is_hotter_and_draws_more_within_its_limit(emulated_node: EmulatedNode) -> None:
    ask = (
        "n.nvmlDeviceGetTemperature(card, 0), n.nvmlDeviceGetPowerUsage(card), n.nvmlDeviceGetEnforcedPowerLimit(card)"
    )
    idle = [int(word) for word in emulated_node.nvml(ask).split()]
    with seated(emulated_node, sm=100, access=70):
        busy = [int(word) for word in emulated_node.nvml(ask).split()]
    assert idle[0] < busy[0] < 90
    assert idle[1] < busy[1] <= busy[2] == 300_000


def test_samples_are_told_once_with_wall_clock_time(emulated_node: EmulatedNode) -> None:
    with seated(emulated_node) as seat:
        newest = int(emulated_node.nvml("n.nvmlDeviceGetProcessUtilization(card, 0)[0].timeStamp"))
        assert abs(newest / 1e6 - time.time()) < 60
        later = newest + 1000  # the two processes read the clocks apart
        again = f"n.nvmlDeviceGetProcessUtilization(card, {later})"
        assert emulated_node.nvml(again) == f"NVMLError {NOT_FOUND}"
        time.sleep(0.002)
        seat.publish(Sample(now_us(), 75, 30, 0, 0, 1.0))
        assert emulated_node.nvml(f"[s.smUtil for s in {again}]") == "[75]"


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_job_is_gone_at_once(emulated_node: EmulatedNode, end: signal.Signals) -> None:
    path = str(emulated_node.emu_dir / NODE / "card0")
    holder = emulated_node.python(HOLD.format(path=path))
    assert holder.stdout is not None
    assert holder.stdout.readline() == "seated\n"
    count = (
        "len(n.nvmlDeviceGetComputeRunningProcesses(card)), n.nvmlDeviceGetMemoryInfo(card, n.nvmlMemory_v2).used >> 20"
    )
    assert emulated_node.nvml(count) == "1 3000"
    holder.send_signal(end)
    holder.communicate(timeout=60)
    assert emulated_node.nvml(count) == "0 0"
    with emulated_node.card() as card:
        card.join(Demand(50, 20, 16000)).leave(now_us())  # its memory is free again


def test_a_suspended_job_keeps_its_memory_and_does_nothing(emulated_node: EmulatedNode) -> None:
    holder = emulated_node.python(HOLD.format(path=str(emulated_node.emu_dir / NODE / "card0")))
    assert holder.stdout is not None
    holder.stdout.readline()
    holder.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, holder.pid, os.WSTOPPED)
    used = "n.nvmlDeviceGetMemoryInfo(card, n.nvmlMemory_v2).used >> 20, n.nvmlDeviceGetUtilizationRates(card).gpu"
    assert wait_until(lambda: emulated_node.nvml(used) == "3000 0", 20), "the last samples of who was stopped count"
    holder.kill()
    holder.communicate()


def test_no_reader_ever_sees_half_a_sample(emulated_node: EmulatedNode) -> None:
    code = (
        "import pynvml as n\nn.nvmlInit()\ncard = n.nvmlDeviceGetHandleByIndex(0)\nprint('ready', flush=True)\n"
        "seen = [n.nvmlDeviceGetUtilizationRates(card) for _ in range(4000)]\n"
        "print(all(abs(rates.gpu - 2 * rates.memory) <= 1 for rates in seen), len({rates.gpu for rates in seen}) > 1)"
    )
    with seated(emulated_node, sm=40, access=20) as seat:
        reader = emulated_node.python(code)
        assert reader.stdout is not None
        reader.stdout.readline()
        level = 0
        while reader.poll() is None:
            level = (level + 7) % 90
            seat.publish(Sample(now_us() + 2_000_000 * level, level, level / 2, 0, 0, 1.0))
        assert reader.stdout.read() == "True True\n"
        reader.communicate()


def test_what_a_v100_has_not_got_is_an_nvml_error(emulated_node: EmulatedNode) -> None:
    assert emulated_node.nvml("n.nvmlDeviceGetFanSpeed(card)") == f"NVMLError {NOT_SUPPORTED}"
    assert emulated_node.nvml("n.nvmlDeviceGetVbiosVersion(card)") == f"NVMLError {FUNCTION_NOT_FOUND}"
    assert emulated_node.nvml("n.nvmlDeviceGetHandleByIndex(2)") == f"NVMLError {INVALID_ARGUMENT}"
    assert emulated_node.nvml("n.nvmlErrorString(15)") == "GPU is lost"


def test_a_fault_comes_and_goes(emulated_node: EmulatedNode) -> None:
    memory, name = "n.nvmlDeviceGetMemoryInfo(card).total >> 30", "n.nvmlDeviceGetName(card)"
    set_fault(emulated_node.emu_dir, NODE, f"nvmlDeviceGetMemoryInfo {GPU_IS_LOST}")
    assert emulated_node.nvml(memory) == f"NVMLError {GPU_IS_LOST}"
    assert emulated_node.nvml(name) == "Tesla V100-SXM2-16GB"
    set_fault(emulated_node.emu_dir, NODE, f"* {DRIVER_NOT_LOADED}")
    assert emulated_node.nvml(name) == f"NVMLError {DRIVER_NOT_LOADED}"
    clear_faults(emulated_node.emu_dir, NODE)
    assert emulated_node.nvml(memory) == "16"


def test_a_hanging_call_returns_when_the_fault_is_taken_away(emulated_node: EmulatedNode) -> None:
    set_fault(emulated_node.emu_dir, NODE, "nvmlDeviceGetName hang")
    code = (
        "import pynvml as n\nn.nvmlInit()\ncard = n.nvmlDeviceGetHandleByIndex(0)\nprint('ask', flush=True)\n"
        "print(n.nvmlDeviceGetName(card))"
    )
    asker = emulated_node.python(code)
    assert asker.stdout is not None
    asker.stdout.readline()
    assert asker.poll() is None
    clear_faults(emulated_node.emu_dir, NODE)
    assert asker.communicate(timeout=60)[0] == "Tesla V100-SXM2-16GB\n"


def test_exclusive_mode_admits_one_process_and_is_reported(emulated_node: EmulatedNode) -> None:
    set_compute_mode(emulated_node.emu_dir, NODE, 0, ComputeMode.EXCLUSIVE_PROCESS)
    assert emulated_node.nvml("n.nvmlDeviceGetComputeMode(card)") == "3"
    with seated(emulated_node), pytest.raises(CardBusy, match="busy or unavailable"), seated(emulated_node):
        pass


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may change the compute mode")
def test_root_changes_the_compute_mode_through_nvml(emulated_node: EmulatedNode) -> None:
    assert emulated_node.nvml("n.nvmlDeviceSetComputeMode(card, 3), n.nvmlDeviceGetComputeMode(card)") == "None 3"


def test_memory_that_is_not_there_cannot_be_allocated(emulated_node: EmulatedNode) -> None:
    with seated(emulated_node, mem_mib=10_000) as first, pytest.raises(OutOfMemory, match="Tried to allocate 6"):
        first.card.join(Demand(10, 5, 6500))


def test_a_file_that_is_no_card_is_no_gpu(emulated_node: EmulatedNode) -> None:
    (emulated_node.emu_dir / NODE / "card1").write_bytes(b"something else" * 10_000)
    assert emulated_node.nvml("n.nvmlDeviceGetCount()") == "1"


def test_without_gcc_the_reason_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(GpushareError, match="gcc"):
        build_library(tmp_path / "lib")


def test_a_compiler_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gcc = tmp_path / "gcc"
    gcc.write_text("#!/bin/sh\necho 'stdint.h: fatal error: no such file' >&2\nexit 1\n")
    gcc.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(GpushareError, match="fatal error: no such file"):
        build_library(tmp_path / "lib")
    assert not list((tmp_path / "lib").iterdir())
