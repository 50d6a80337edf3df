"""The emulated training job, run for real; times are those of the job's own clock."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from emulated import NODE, EmulatedNode, figures
from gpushare_lab.emulator import ComputeMode, create_node, set_compute_mode
from gpushare_lab.job.workload import main
from gpushare_lab.testbed.processes import wait_until

PAIRS = "profile_a,profile_b,gpu_model,feasible,rate_a,rate_b\nsmall,large,V100,1,0.40,0.85\nhuge,large,V100,0,,\n"


@pytest.fixture
def pairs(tmp_path: Path) -> str:
    path = tmp_path / "pairs.csv"
    path.write_text(PAIRS)
    return str(path)


def occupants(node: EmulatedNode, gpu: int = 0) -> int:
    with node.card(gpu) as card:
        return sum(stay.until_us is None for stay in card.occupants(0))


def test_a_lone_job_takes_its_stated_time_and_prints_its_epochs(emulated_node: EmulatedNode) -> None:
    code, out, err = emulated_node.run_job("--work-s", "0.3", "--epochs", "3", CUDA_VISIBLE_DEVICES="1")
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert lines[0].startswith("training on GPU 1 (Tesla V100-SXM2-16GB)")
    assert [line.split()[:2] for line in lines[1:-1]] == [["epoch", f"{n}/3"] for n in (1, 2, 3)]
    done = figures(lines[-1])
    assert done["time_s"] == pytest.approx(0.3, rel=0.03)
    assert done["isd_pct"] == pytest.approx(0, abs=3)
    assert occupants(emulated_node, 1) == 0


def test_a_pair_is_slowed_as_the_table_says_each_in_its_direction(emulated_node: EmulatedNode, pairs: str) -> None:
    large = emulated_node.job("--pairs", pairs, "--profile", "large", "--work-s", "60", "--epochs", "6")
    assert large.stdout is not None
    assert large.stdout.readline().startswith("training")
    code, out, _ = emulated_node.run_job("--pairs", pairs, "--profile", "small", "--work-s", "0.3")
    small = figures(out.splitlines()[-1])
    assert code == 0
    assert small["isd_pct"] == pytest.approx(100 * (1 / 0.40 - 1), abs=3)
    large.terminate()
    so_far = figures(large.communicate(timeout=60)[0].splitlines()[-1])
    lost_s = small["time_s"] * (1 - 0.85)  # it had full speed before and after
    assert so_far["work_s"] == pytest.approx(so_far["time_s"] - lost_s, abs=0.01)


def test_a_job_shows_on_its_card_while_it_runs(emulated_node: EmulatedNode) -> None:
    job = emulated_node.job("--work-s", "30", "--gpu-util", "70", "--mem-access", "30", "--mem-mib", "5000")
    assert job.stdout is not None
    job.stdout.readline()
    shown = emulated_node.nvml(
        "*[(p.pid, p.usedGpuMemory >> 20) for p in n.nvmlDeviceGetComputeRunningProcesses(card)]"
    )
    assert shown == f"({job.pid}, 5000)"
    job.terminate()
    out, _ = job.communicate(timeout=60)
    assert (job.returncode, out.split()[0]) == (143, "stopped")
    assert occupants(emulated_node) == 0


def test_memory_that_is_taken_kills_the_allocator_only(emulated_node: EmulatedNode) -> None:
    first = emulated_node.job("--work-s", "30", "--mem-mib", "12000")
    assert first.stdout is not None
    first.stdout.readline()
    code, out, err = emulated_node.run_job("--work-s", "1", "--mem-mib", "6000")
    assert (code, out) == (1, "")
    assert err.startswith(
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 5.86 GiB (GPU 0; 16.00 GiB"
    )
    assert first.poll() is None
    first.kill()
    first.communicate()
    assert emulated_node.run_job("--work-s", "0.05", "--mem-mib", "6000")[0] == 0


def test_a_job_that_grows_past_the_card_dies_halfway(emulated_node: EmulatedNode) -> None:
    code, out, err = emulated_node.run_job(
        "--work-s", "0.3", "--epochs", "3", "--mem-mib", "9000", "--mem-grow-mib", "8000"
    )
    assert code == 1
    assert "epoch 1/3" in out
    assert "epoch 2/3" not in out
    assert err.startswith("torch.cuda.OutOfMemoryError")
    assert occupants(emulated_node) == 0


def test_a_pair_that_did_not_fit_on_the_real_card_does_not_fit_here(emulated_node: EmulatedNode, pairs: str) -> None:
    large = emulated_node.job("--pairs", pairs, "--profile", "large", "--work-s", "30", "--mem-mib", "100")
    assert large.stdout is not None
    large.stdout.readline()
    code, _, err = emulated_node.run_job("--pairs", pairs, "--profile", "huge", "--work-s", "1", "--mem-mib", "100")
    assert (code, err.split(":")[0]) == (1, "torch.cuda.OutOfMemoryError")
    large.kill()
    large.communicate()


def test_an_exclusive_card_turns_the_second_job_away(emulated_node: EmulatedNode) -> None:
    set_compute_mode(emulated_node.emu_dir, NODE, 0, ComputeMode.EXCLUSIVE_PROCESS)
    first = emulated_node.job("--work-s", "30")
    assert first.stdout is not None
    first.stdout.readline()
    code, _, err = emulated_node.run_job("--work-s", "1")
    assert (code, err) == (1, "workload: error: CUDA error: all CUDA-capable devices are busy or unavailable\n")
    first.kill()
    first.communicate()


@pytest.mark.slow
def test_a_stopped_job_resumes_from_its_checkpoint(emulated_node: EmulatedNode, tmp_path: Path) -> None:
    saved = tmp_path / "progress"
    options = ("--work-s", "2", "--epochs", "40", "--checkpoint", str(saved))
    job = emulated_node.job(*options)
    assert job.stdout is not None
    while not job.stdout.readline().startswith("epoch 3/"):
        pass
    job.terminate()
    job.communicate(timeout=60)
    done_s = json.loads(saved.read_text())["done_s"]
    assert done_s >= 0.15
    code, out, _ = emulated_node.run_job(*options)
    assert code == 0
    assert out.splitlines()[1].startswith("resumed")
    assert figures(out.splitlines()[-1])["work_s"] == pytest.approx(2 - done_s, abs=0.01)
    assert not saved.exists()


@pytest.mark.parametrize(("restarts", "resumed"), [("1", True), ("0", False)])
def test_a_requeued_job_resumes_by_its_id_and_a_new_one_with_that_id_does_not(
    emulated_node: EmulatedNode, restarts: str, resumed: bool
) -> None:
    saved = emulated_node.emu_dir / "checkpoints" / "77.batch.0"
    saved.write_text(json.dumps({"work_s": 0.2, "epochs": 2, "done_s": 0.15}))
    code, out, _ = emulated_node.run_job(
        "--work-s", "0.2", "--epochs", "2", SLURM_JOB_ID="77", SLURM_RESTART_COUNT=restarts
    )
    assert code == 0
    assert ("resumed" in out) is resumed
    assert not saved.exists()


def test_the_end_of_the_first_epoch_touches_the_epoch_file(emulated_node: EmulatedNode, tmp_path: Path) -> None:
    marker = tmp_path / "epoch"
    job = emulated_node.job("--work-s", "30", "--epochs", "20", GPUSHARE_EPOCH_FILE=str(marker))
    assert job.stdout is not None
    job.stdout.readline()
    assert not marker.exists()
    assert job.stdout.readline().startswith("epoch 1/")
    assert wait_until(marker.exists, 60)
    job.kill()
    job.communicate()


@pytest.mark.slow
def test_suspended_time_is_not_worked(emulated_node: EmulatedNode) -> None:
    job = emulated_node.job("--work-s", "2", "--epochs", "20")
    assert job.stdout is not None
    while not job.stdout.readline().startswith("epoch 1/"):
        pass
    job.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, job.pid, os.WSTOPPED)
    emulated_node.run_job("--work-s", "0.7", CUDA_VISIBLE_DEVICES="1")  # something that takes a while
    job.send_signal(signal.SIGCONT)
    out, _ = job.communicate(timeout=60)
    assert figures(out.splitlines()[-1])["time_s"] > 2 + 0.6


@pytest.mark.parametrize(
    ("arguments", "env", "says"),
    [
        (["--profile", "nobody", "--pairs", "PAIRS"], {}, "no profile 'nobody' in"),
        (["--profile", "small"], {}, "--profile goes with --pairs or --profiles"),
        (["--profile", "small", "--pairs", "nowhere.csv"], {}, "nowhere.csv: cannot be read"),
        ([], {"CUDA_VISIBLE_DEVICES": "7"}, "GPU 7 does not exist on node gpu0, which has 2"),
        ([], {"CUDA_VISIBLE_DEVICES": "GPU-0000"}, "GPU GPU-0000 does not exist"),
        ([], {"CUDA_VISIBLE_DEVICES": ""}, "the GPU named by an empty list does not exist"),
        ([], {"GPUSHARE_EMU_DIR": ""}, "GPUSHARE_EMU_DIR is not set"),
        ([], {"GPUSHARE_EMU_NODE": ""}, "neither SLURMD_NODENAME nor GPUSHARE_EMU_NODE"),
        ([], {"SLURMD_NODENAME": "gpu9"}, "node gpu9 has no emulated GPUs"),
        (["--gpu-util", "140"], {}, "--gpu-util 140 is out of range"),
        (["--gpu-util", "nan"], {}, "--gpu-util nan is out of range"),
        (["--epochs", "0"], {}, "--epochs 0 is out of range"),
        (["--frobnicate"], {}, "unrecognized arguments"),
        (["--work-s", "soon"], {}, "invalid float value"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    emulated_node: EmulatedNode,
    pairs: str,
    arguments: list[str],
    env: dict[str, str],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(os, "environ", emulated_node.env(**env))
    code = main([pairs if word == "PAIRS" else word for word in arguments])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert says in err
    assert err.count("\n") == 1
    assert occupants(emulated_node) == 0
    assert not list((emulated_node.emu_dir / "checkpoints").iterdir())


def test_making_a_node_again_empties_it_in_place_and_old_jobs_disturb_nobody(emulated_node: EmulatedNode) -> None:
    path = emulated_node.emu_dir / NODE / "card0"
    before = path.stat().st_ino
    old = emulated_node.job("--work-s", "60")
    assert old.stdout is not None
    old.stdout.readline()
    create_node(emulated_node.emu_dir, NODE, 2)
    assert (path.stat().st_ino, occupants(emulated_node)) == (before, 0)
    new = emulated_node.job("--work-s", "60")
    assert new.stdout is not None
    new.stdout.readline()
    old.terminate()
    old.communicate(timeout=60)
    assert occupants(emulated_node) == 1
    new.kill()
    new.communicate()
