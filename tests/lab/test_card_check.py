"""``gpushare card-check`` against stand-ins of libcuda, NVML and the MPS control program."""

from __future__ import annotations

import csv
import getpass
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from cuda_kit import Node
from emulated import NODE, EmulatedNode
from gpushare_lab.emulator import build_library, set_fault

from slurm_gpushare.node.card_check import TRIES
from slurm_gpushare.node.load_generator import KERNELS

ROOT = Path(__file__).resolve().parents[2]


def ptxas() -> Path | None:
    found = [Path(path) / "nvidia" / "cuda_nvcc" / "bin" / "ptxas" for path in sys.path]
    return next((path for path in found if path.is_file()), None)


@pytest.mark.parametrize("target", ["sm_70", "sm_75", "sm_80", "sm_90"])
def test_the_kernels_are_right_for_every_card_since_volta(target: str, tmp_path: Path) -> None:
    program = ptxas()
    if program is None:
        pytest.skip("no ptxas: pip install nvidia-cuda-nvcc-cu12")
    shutil.copy(program, tmp_path / "ptxas")  # some versions of pip leave it without the right to run
    (tmp_path / "ptxas").chmod(0o755)
    done = subprocess.run(
        [tmp_path / "ptxas", f"-arch={target}", "-o", tmp_path / "out", KERNELS], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_a_card_that_does_as_it_should_is_a_row_of_works_each(node: Node) -> None:
    rows = node.rows("driver", "compute-mode", "memory")
    assert [rows[name]["verdict"] for name in ("driver", "compute-mode")] == ["works", "works"]
    assert rows["driver"]["figures"] | {"compute_capability": "7.0", "multiprocessors": 80} == rows["driver"]["figures"]
    assert rows["memory"]["figures"]["most_mib"] > 14000
    assert "CUDA_ERROR_OUT_OF_MEMORY" in rows["memory"]["found"]
    assert "CUDA_ERROR_DEVICE_UNAVAILABLE" in rows["compute-mode"]["found"]  # in EXCLUSIVE_PROCESS
    calls = node.calls.read_text().split()
    assert calls[:4] == ["cuInit", "cuDeviceGet", "cuDeviceGetAttribute", "cuDeviceGetAttribute"]
    assert calls.index("cuCtxCreate_v2") < calls.index("cuModuleLoadDataEx") < calls.index("cuMemAlloc_v2")
    assert "cuLaunchKernel" in calls


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("cuModuleLoadDataEx 218", "cuModuleLoadDataEx: CUDA_ERROR_INVALID_PTX (218)"),
        ("cuInit 100", "cuInit: CUDA_ERROR_UNKNOWN (100)"),
        ("cuMemAlloc 2", "cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY (2)"),
        ("nvmlDeviceGetUUID 15", "GPU is lost"),
    ],
)
def test_an_error_of_the_driver_is_a_row_and_no_end(node: Node, fault: str, says: str) -> None:
    set_fault(node.emu, NODE, fault)
    done = node.check("driver", "devices")
    assert done.returncode == 3
    assert says in done.stdout
    assert re.search(r"^(untried|failed ) devices: .*\n(.*\n)*2 tries", done.stdout, re.MULTILINE)


def test_a_kernel_that_fails_while_it_runs_is_a_row(node: Node) -> None:
    set_fault(node.emu, NODE, "cuCtxSynchronize 719")
    assert "CUDA_ERROR_LAUNCH_FAILED" in node.rows("stop")["stop"]["found"]


def test_a_driver_that_is_not_there_is_a_row(node: Node, tmp_path: Path) -> None:
    library = tmp_path / "nvml-alone"
    build_library(library)
    assert node.rows("driver", LD_LIBRARY_PATH=str(library))["driver"]["found"] == "libcuda.so.1 cannot be loaded"


@pytest.mark.slow
def test_a_driver_that_hangs_is_a_row(node: Node) -> None:
    set_fault(node.emu, NODE, "cuCtxCreate hang")
    row = node.rows("driver")["driver"]
    assert (row["verdict"], row["found"]) == ("failed", "no answer within 9 s")


def test_a_card_that_tells_of_no_process_is_not_one_to_keep_promises_on(node: Node) -> None:
    set_fault(node.emu, NODE, "nvmlDeviceGetProcessUtilization 3")
    row = node.rows("process-alone")["process-alone"]
    assert (row["verdict"], row["set"]) == ("differs", "Policy=shadow: no promise can be kept here.")


@pytest.mark.slow
def test_every_try_comes_to_its_end(node: Node) -> None:
    rows = node.rows(*(name for name in TRIES if name not in ("slices", "mps")), seconds="1.0")
    verdicts = {name: row["verdict"] for name, row in rows.items()}
    # How fast processes are beside each other is this machine's business; that they could be asked is ours.
    assert {name for name, verdict in verdicts.items() if verdict not in ("works", "differs")} == {"devices", "dcgm"}, (
        rows
    )
    assert {rows[name]["verdict"] for name in ("devices", "dcgm")} == {"untried"}


@pytest.mark.slow
def test_an_mps_server_that_takes_all_figures_is_noticed(node: Node) -> None:
    row = node.rows("mps-figures", seconds="0.8", GPUSHARE_EMU_MPS_BLIND="1")["mps-figures"]
    assert (row["verdict"], row["found"]) == ("differs", "figures of 0 of the 2 processes: an MPS server has them all")


def test_under_mps_the_daemon_bounds_a_process_and_its_environment_tightens_that(node: Node) -> None:
    row = node.rows("mps-memory")["mps-memory"]
    assert row["verdict"] == "works", row
    assert 0 < row["figures"]["own_mib"] <= 512 < row["figures"]["most_mib"] <= 1024


@pytest.mark.slow
def test_the_rates_of_a_card_can_be_fitted(node: Node, tmp_path: Path) -> None:
    file = tmp_path / "pairs.csv"
    assert node.check("slices", "--pairs", str(file)).returncode == 0
    rows = list(csv.DictReader(file.open()))
    assert len(rows) == 15
    assert {row["load_a"] for row in rows} == {
        "arithmetic-25", "arithmetic-50", "arithmetic-100", "streaming-30", "streaming-100"
    }  # fmt: skip
    argv = [
        sys.executable,
        "-m",
        "slurm_gpushare",
        "kb",
        "fit",
        "--pairs",
        str(file),
        "--out",
        str(tmp_path / "kb.json"),
    ]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "V100" in done.stdout


def test_what_a_site_hands_on_tells_nothing_of_it(node: Node) -> None:
    text = node.check("--json", "driver", "attributes", "memory").stdout
    with EmulatedNode(node.emu, Path(), None).card(1) as card:  # type: ignore[arg-type]
        uuid = card.info.uuid
    for telling in (socket.gethostname(), NODE, uuid, getpass.getuser(), str(node.emu), "0000:", str(os.getpid())):
        assert telling not in text, telling


def test_a_dry_run_names_every_try_and_calls_nothing(node: Node) -> None:
    done = node.check("--dry-run")
    assert done.returncode == 0
    assert [line.split()[0] for line in done.stdout.splitlines()[1:]] == list(TRIES)
    assert not node.calls.exists()
    limits = [float(line.split()[-1]) for line in node.check("--dry-run", seconds="3.0").stdout.splitlines()[1:]]
    assert sum(limits) < 4000
    assert node.check("nonsense").returncode == 2


def test_each_assumption_about_cards_has_a_row_that_tries_it() -> None:
    """docs/real-cards.md and card-check name the same, and the code that an assumption is in exists."""
    page = (ROOT / "docs" / "real-cards.md").read_text()
    section = page.partition("## What is assumed")[2].partition("\n## ")[0]
    lines = re.findall(r"^\| (.+) \| (.+) \| (.+) \|$", section, re.MULTILINE)[1:]
    assert len(lines) >= len(TRIES)
    tried = {name for _, _, names in lines for name in re.findall(r"`([a-z-]+)`", names)}
    assert tried == set(TRIES)
    for assumption, code, names in lines:
        assert names.startswith("none: ") or re.search(r"`[a-z-]+`", names), assumption
        for path in re.findall(r"`([^`]+)`", code):
            assert (ROOT / path).exists() or (ROOT / "slurm_gpushare" / path).exists(), path
    product = ROOT / "slurm_gpushare"
    speak = {path for path in product.rglob("*.py") if re.search("import pynvml|CUDA_|nvidia-cuda", path.read_text())}
    told = {str(path.relative_to(product)) for path in speak} - {"node/card_check.py"}
    assert {path for path in told if f"`{path}`" not in section} == set(), "who speaks to cards assumes something"
