"""``gpushare profile`` outside Slurm: a fake allocation, no GPU, no munged. The command must not notice."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

GPUSHARE = [sys.executable, "-m", "slurm_gpushare", "profile"]


@pytest.fixture
def job_env(tmp_path: Path) -> dict[str, str]:
    conf = tmp_path / "gpushare.conf"
    conf.write_text(f"SpoolDir={tmp_path}/spool\nSampleSeconds=0.05\nMungeSocket={tmp_path}/none\n")
    return {
        **os.environ, "GPUSHARE_CONF": str(conf), "SLURM_JOB_ID": "5", "SLURMD_NODENAME": "n1", "SLURM_JOB_GPUS": "0",
        "TERM": "xterm",
    }  # fmt: skip


def test_without_nvml_and_munge_the_command_runs_and_two_lines_say_what_is_lost(job_env: dict[str, str]) -> None:
    done = subprocess.run([*GPUSHARE, "--", "sh", "-c", "sleep 0.2; echo out; exit 4"],
                          env=job_env, capture_output=True, text=True)  # fmt: skip
    assert (done.returncode, done.stdout) == (4, "out\n")
    warnings = done.stderr.splitlines()
    assert [line.split(":")[:2] for line in warnings] == [["gpushare", " warning"]] * len(warnings)
    assert "without GPU numbers" in warnings[0]
    assert "the profile is lost" in warnings[-1]


def test_without_a_configuration_the_command_runs_all_the_same(job_env: dict[str, str]) -> None:
    env = {**job_env, "GPUSHARE_CONF": "/nonexistent"}
    done = subprocess.run([*GPUSHARE, "--", "sh", "-c", "exit 4"], env=env, capture_output=True, text=True)
    assert done.returncode == 4
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_progress_is_shown_on_a_terminal_and_only_there(job_env: dict[str, str]) -> None:
    command = [*GPUSHARE, "--", "sh", "-c", "sleep 0.5; test -t 1"]
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(sys.executable, command, job_env)
    seen = b""
    try:
        while chunk := os.read(terminal, 4096):
            seen += chunk
    except OSError:  # the terminal's other end is closed: the command is done
        pass
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, "the command has the terminal"
    assert b"gpushare: profiling" in seen
    piped = subprocess.run(command, env=job_env, capture_output=True)
    assert b"profiling" not in piped.stderr


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--token", "resnet", "--", "true"], "--token: not a token"),
        (["--token", "gs-abcdefghijklmnop", "--name", "x", "--", "true"], "--token and --name are the same thing"),
        (["--max-seconds", "0", "--", "true"], "--max-seconds"),
        ([], "Missing argument"),
    ],
)
def test_a_wrong_call_is_one_line_and_runs_nothing(job_env: dict[str, str], options: list[str], says: str) -> None:
    done = subprocess.run([*GPUSHARE, *options], env=job_env, capture_output=True, text=True)
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(("command", "code"), [("/no/such/thing", 127), ("/etc/passwd", 126)])
def test_a_command_that_cannot_run_ends_as_in_a_shell(job_env: dict[str, str], command: str, code: int) -> None:
    assert subprocess.run([*GPUSHARE, "--", command], env=job_env, capture_output=True).returncode == code
