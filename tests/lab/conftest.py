"""Fixtures of the lab's tests: a node on which programs find stand-ins of NVIDIA's."""

from __future__ import annotations

from pathlib import Path

import pytest
from cuda_kit import Node
from gpushare_lab.emulator import build_library
from gpushare_lab.emulator.library import build_cuda
from gpushare_lab.emulator.mps_control import install


@pytest.fixture(scope="module")
def stand_ins(short_tmp: Path) -> Path:
    """A directory, open to all, of libcuda, NVML and, under ``bin``, the control program."""
    directory = short_tmp / "stand-ins"
    build_library(directory)
    build_cuda(directory)
    install(directory / "bin")
    return directory


@pytest.fixture
def node(stand_ins: Path) -> Node:
    (stand_ins / "calls").unlink(missing_ok=True)
    return Node(stand_ins, stand_ins)
