"""The prolog by itself, without Slurm: how many samplers it starts for jobs whose GPUs Slurm does not name."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from slurm_gpushare.protocol.files import resource_dir

MOST = 8


class Node:
    """A node with samplers that do nothing for a minute."""

    def __init__(self, directory: Path) -> None:
        self.here = directory / "state" / "nodes" / "n0"
        self.conf = directory / "gpushare.conf"
        self.conf.write_text(f"Partitions=gpu\nStateDir={directory}/state\n")
        self.python = directory / "python"
        self.python.write_text("#!/bin/sh\nexec sleep 60\n")
        self.python.chmod(0o755)

    def prolog(self, job: int, gpus: str = "", comment: str = "gpushare:gs-x") -> None:
        environ = {
            "GPUSHARE_CONF": str(self.conf), "GPUSHARE_PYTHON": str(self.python), "SLURM_JOB_ID": str(job),
            "SLURMD_NODENAME": "n0", "SLURM_JOB_GPUS": gpus, "SLURM_JOB_PARTITION": "gpu", "SLURM_JOB_COMMENT": comment,
        }  # fmt: skip
        assert subprocess.run([resource_dir("prolog") / "prolog.sh"], env=environ, timeout=60).returncode == 0

    def samplers(self) -> dict[int, int]:
        """The process of each job that has one."""
        return {int(path.name): int(path.read_text().split()[0]) for path in (self.here / "jobs").iterdir()}

    @property
    def log(self) -> list[str]:
        return (self.here / "sampler.log").read_text().splitlines()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    for pid in node.samplers().values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_cpu_jobs_with_our_word_start_few_samplers(node: Node) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(node.prolog, range(100, 120)))
    assert len(node.samplers()) == MOST
    assert sum("not measured: Slurm names no GPU of it" in line for line in node.log) == 20 - MOST
    assert len(list((node.here / "tokens").iterdir())) == 20, "the task prolog must know all the same"


def test_jobs_whose_gpus_are_named_are_measured_all_the_same(node: Node) -> None:
    for job in range(100, 100 + MOST + 1):
        node.prolog(job)
    node.prolog(200, gpus="0", comment="")
    assert 200 in node.samplers()
    assert 100 + MOST not in node.samplers()


def end(pid: int) -> None:
    """Kill a process, and wait until it has let go of all that it held; whoever started it may reap it later."""
    os.kill(pid, signal.SIGKILL)
    for _ in range(1000):
        with contextlib.suppress(FileNotFoundError):
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
                time.sleep(0.01)
                continue
        return
    raise AssertionError(f"{pid} does not end")


def test_a_sampler_whose_search_is_over_makes_room(node: Node) -> None:
    for job in range(100, 100 + MOST):
        node.prolog(job)
    end(node.samplers()[100])
    node.prolog(200)
    node.prolog(201)
    assert 200 in node.samplers()
    assert 201 not in node.samplers()
