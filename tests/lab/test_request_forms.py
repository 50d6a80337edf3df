"""What trial jobs saw: how many GPUs, and whether tasks beside each other have the same one."""

from __future__ import annotations

import os
import subprocess

import pytest
from gpushare_lab.forms import _PROBE, _outcome


@pytest.mark.parametrize(
    ("said", "outcome"),
    [
        ("script=2 n0 - 0,1\ntask=1 n0 - 0\ntask=1 n0 - 1\n", "2, 1 1"),
        ("script=2 n0 - 0,1\ntask=1 n0 - 1\ntask=1 n0 - 1\n", "2, 1 1 (same)"),
        ("task=1 n0 - 0\ntask=1 n1 - 0\n", "1 1"),
        ("task=1 n0 -0- 0\ntask=1 n0 -1- 0\n", "1 1"),
        ("task=1 n0 -0- 0\ntask=1 n0 -0- 0\n", "1 1 (same)"),
        ("task=2 n0 - 0,1\ntask=1 n0 - 1\n", "1 2 (same)"),
        ("task=0 n0 - NoDevFiles\ntask=0 n0 - -\n", "0 0"),
        ("script=1 n0 - 0\nscript=1 n0 - 0\n", "1 1"),
        ("script=1 n0 - 0\nstep-refused\n", "1, refused"),
        ("", ""),
    ],
)
def test_tasks_that_see_the_same_gpu_are_told_from_those_with_their_own(said: str, outcome: str) -> None:
    assert _outcome(said) == outcome


@pytest.mark.parametrize(("devices", "outcome"), [("0,1", "2"), ("GPU-1f,GPU-2e", "2"), ("NoDevFiles", "0"), ("", "0")])
def test_a_job_counts_what_it_sees(devices: str, outcome: str) -> None:
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": devices, "SLURMD_NODENAME": "n0"}
    said = subprocess.run(["sh", "-c", _PROBE.replace("@KIND@", "task")], env=env, capture_output=True, text=True)
    assert _outcome(said.stdout) == outcome, said
