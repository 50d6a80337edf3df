"""Making, resetting and breaking the emulated GPUs of a node."""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass
from pathlib import Path

from gpushare_lab.emulator import layout
from gpushare_lab.emulator.card import ComputeMode
from slurm_gpushare.protocol.errors import BadInput, GpushareError
from slurm_gpushare.protocol.files import replace_text, replacing

MODEL = "Tesla V100-SXM2-16GB"
MEM_TOTAL_MIB = 16384


@dataclass(frozen=True, slots=True)
class CardKind:
    """What NVML says of the cards of a model."""

    name: str
    mem_total_mib: int


CARDS = {"v100": CardKind(MODEL, MEM_TOTAL_MIB), "a100": CardKind("NVIDIA A100-SXM4-40GB", 40960)}
"""By the name that a site gives them."""
MEM_RESERVED_MIB = 224  # what the driver keeps of a V100: jobs can allocate 16160 MiB
POWER_LIMIT_W = 300
POWER_IDLE_W = 42
MAX_GPUS = 16
CHECKPOINTS = "checkpoints"


def card_path(emu_dir: Path, node: str, gpu: int) -> Path:
    """The file of one card."""
    return emu_dir / node / f"card{gpu}"


def create_node(emu_dir: Path, node: str, gpus: int, *, model: str = MODEL, mem_total_mib: int = MEM_TOTAL_MIB) -> None:
    """Give `node` its cards, idle, in DEFAULT mode, with neither faults nor checkpoints of earlier jobs.

    Cards that exist are emptied in place, since readers may have them mapped: between two tests it is a reset.
    """
    if not 1 <= gpus <= MAX_GPUS:
        raise BadInput(f"a node has 1 to {MAX_GPUS} emulated GPUs, not {gpus}")
    try:
        (emu_dir / node).mkdir(parents=True, exist_ok=True)
        checkpoints = emu_dir / CHECKPOINTS
        checkpoints.mkdir(exist_ok=True)
        checkpoints.chmod(0o1777)  # jobs of any user keep their progress here
        for stale in checkpoints.iterdir():
            stale.unlink(missing_ok=True)
        for gpu in range(gpus):
            _write_card(card_path(emu_dir, node, gpu), _header(node, gpu, model, mem_total_mib))
        for extra in range(gpus, MAX_GPUS):
            card_path(emu_dir, node, extra).unlink(missing_ok=True)
        clear_faults(emu_dir, node)
    except OSError as error:
        raise GpushareError(f"cannot make the emulated GPUs of {node}: {error}") from error


def set_compute_mode(emu_dir: Path, node: str, gpu: int, mode: ComputeMode) -> None:
    """What `nvidia-smi -c` does: EXCLUSIVE_PROCESS turns the second job on the card away."""
    with card_path(emu_dir, node, gpu).open("r+b", buffering=0) as file:
        os.pwrite(file.fileno(), int(mode).to_bytes(4, "little"), layout.COMPUTE_MODE_AT)


def set_fault(emu_dir: Path, node: str, *lines: str) -> None:
    """Make NVML fail on `node`: lines `FUNCTION CODE`, `FUNCTION hang` or `FUNCTION hang SECONDS`; `*` is any function.

    FUNCTION matches from the start of the name, so that ``nvmlDeviceGetMemoryInfo 15`` holds for every version of it.
    """
    replace_text(emu_dir / node / "fault", "".join(f"{line}\n" for line in lines))


def clear_faults(emu_dir: Path, node: str) -> None:
    """Let NVML work again; calls that hang return at once."""
    (emu_dir / node / "fault").unlink(missing_ok=True)


def _header(node: str, gpu: int, model: str, mem_total_mib: int) -> bytes:
    identity = uuid.uuid5(uuid.NAMESPACE_DNS, f"gpu{gpu}.{node}.gpushare.invalid")
    header = layout.HEADER.pack(
        layout.MAGIC,
        gpu,
        layout.SLOTS,
        layout.SLOT_BYTES,
        ComputeMode.DEFAULT,
        mem_total_mib,
        MEM_RESERVED_MIB,
        POWER_LIMIT_W,
        POWER_IDLE_W,
        model.encode(),
        f"GPU-{identity}".encode(),
        f"00000000:{0x15 + gpu:02X}:00.0".encode(),
    )
    return header.ljust(layout.HEADER_BYTES, b"\0")


def _write_card(path: Path, header: bytes) -> None:
    content = header + bytes(layout.SLOTS * layout.SLOT_BYTES)
    if path.exists() and path.stat().st_size == layout.CARD_BYTES:
        with path.open("r+b", buffering=0) as file:
            os.pwrite(file.fileno(), content, 0)
        return
    with replacing(path, 0o666) as draft:  # a job of any user may use any card, as with /dev/nvidia*
        draft.write_bytes(content)
