"""The emulated GPUs of a node: card files, and the libnvidia-ml.so.1 that reads them."""

from __future__ import annotations

from gpushare_lab.emulator.card import ComputeMode
from gpushare_lab.emulator.library import build_library
from gpushare_lab.emulator.node import CARDS, clear_faults, create_node, set_compute_mode, set_fault

__all__ = ["CARDS", "ComputeMode", "build_library", "clear_faults", "create_node", "set_compute_mode", "set_fault"]
