"""The prolog by itself, without Slurm: how many samplers it starts for jobs whose GPUs Slurm does not name."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

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


SYSTEMCTL = """#!/bin/sh
echo "$@" >>{root}/calls
mkdir -p {root}/state/mps/0
case $1 in
start) [ -e {root}/broken ] && exit 1; : >{root}/state/mps/0/nvidia-cuda-mps-control.pid ;;
stop) rm -f {root}/state/mps/0/nvidia-cuda-mps-control.pid ;;
esac
"""


@pytest.fixture
def mps_node(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The node with a systemctl that notes what it is asked for; Mps=all."""
    node.conf.write_text(node.conf.read_text() + "Mps=all\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "systemctl").write_text(SYSTEMCTL.format(root=tmp_path))
    (tmp_path / "bin" / "systemctl").chmod(0o755)
    monkeypatch.setattr(subprocess, "run", functools.partial(_with_path, subprocess.run, str(tmp_path / "bin")))
    return tmp_path


def _with_path(run: Any, path: str, argv: Any, *, env: dict[str, str], **more: Any) -> Any:
    return run(argv, env=env | {"PATH": f"{path}:/usr/bin:/bin"}, **more)


def epilog(node: Node, job: int, gpus: str = "0") -> None:
    environ = {
        "GPUSHARE_CONF": str(node.conf), "SLURM_JOB_ID": str(job), "SLURMD_NODENAME": "n0", "SLURM_JOB_GPUS": gpus,
        "SLURM_JOB_PARTITION": "gpu",
    }  # fmt: skip
    assert subprocess.run([resource_dir("prolog") / "epilog.sh"], env=environ, timeout=60).returncode == 0


def clients(node: Node) -> set[str]:
    return {path.name for path in (node.here / "mps").glob("*")}


def test_a_daemon_starts_with_the_first_sharer_of_a_card_and_ends_with_the_last(node: Node, mps_node: Path) -> None:
    with ThreadPoolExecutor(2) as pool:  # the plan sends two together to an empty card
        list(pool.map(lambda job: node.prolog(job, "0"), (1, 2)))
    assert clients(node) == {"1", "2"}
    assert (node.here / "mps" / "1").read_text() == f"{mps_node}/state/mps/0\n"
    assert (mps_node / "state" / "mps" / "options").read_text() == "MULTI_USER=-multiuser-server\n"
    epilog(node, 1)
    assert "stop" not in (mps_node / "calls").read_text()
    epilog(node, 2)
    assert (mps_node / "calls").read_text().splitlines()[-1] == "stop gpushare-mps@0"
    assert clients(node) == set()


def test_a_card_is_under_mps_for_all_its_jobs_or_for_none(node: Node, mps_node: Path) -> None:
    node.prolog(1, "0", comment="")
    node.prolog(2, "0")
    node.prolog(3, "1,2")
    (mps_node / "broken").touch()
    node.prolog(4, "3")
    assert clients(node) == set(), "beside one without, of several cards, and where no daemon starts"
    assert (mps_node / "calls").read_text() == "start gpushare-mps@3\n"
