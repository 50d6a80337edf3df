"""A command under ``gpushare profile`` cannot be told from the command itself. All processes and signals are real."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

WRAPPER = [
    sys.executable,
    "-c",
    "import os, sys\n"
    "from slurm_gpushare.node.profile import Command\n"
    "from slurm_gpushare.node.profile import wait_to_the_end\n"
    "sys.exit(wait_to_the_end(Command(sys.argv[1:], os.environ)))",
]


def wrapped(*command: str) -> list[str]:
    return [*WRAPPER, *command]


@pytest.mark.parametrize("code", [0, 1, 3, 255])
def test_exit_code_is_the_command_s(code: int) -> None:
    assert subprocess.run(wrapped("sh", "-c", f"exit {code}")).returncode == code


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_death_by_signal_is_death_by_the_same_signal(number: signal.Signals) -> None:
    assert subprocess.run(wrapped("sh", "-c", f"kill -{number.value} $$")).returncode == -number


def test_stdin_stdout_and_further_descriptors_are_the_command_s_own(tmp_path: Path) -> None:
    (tmp_path / "third").write_bytes(b"three")
    data = bytes(range(256)) * 4096
    with (tmp_path / "third").open("rb") as third:
        done = subprocess.run(
            wrapped("bash", "-c", f"cat; cat <&{third.fileno()}; echo err >&2"),
            input=data,
            capture_output=True,
            pass_fds=[third.fileno()],
        )
    assert done.stdout == data + b"three"
    assert done.stderr == b"err\n"


def start_saying(script: str) -> tuple[subprocess.Popen[bytes], int]:
    """A wrapped shell that has said it is ready, and its own pid."""
    process = subprocess.Popen(wrapped("sh", "-c", script), stdout=subprocess.PIPE)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


@pytest.mark.parametrize("name", ["TERM", "INT", "HUP", "QUIT", "USR2", "ALRM", "WINCH"])
def test_a_signal_to_us_reaches_the_command_once(name: str) -> None:
    script = f"n=0; trap 'n=$((n+1))' {name}; echo $$; while [ $n = 0 ]; do sleep 0.02; done; sleep 0.1; exit $((40+n))"
    process, _ = start_saying(script)
    process.send_signal(getattr(signal, f"SIG{name}"))
    assert process.wait(60) == 41


def test_an_untrapped_signal_ends_both_as_it_would_have_ended_one() -> None:
    process, _ = start_saying("echo $$; exec sleep 60")
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == -signal.SIGTERM


def test_sigusr1_is_for_us_and_leaves_the_command_alone() -> None:
    process, _ = start_saying("echo $$; sleep 0.3; exit 7")
    process.send_signal(signal.SIGUSR1)
    assert process.wait(60) == 7


def test_the_command_has_the_signal_mask_that_we_were_given() -> None:
    status = ("grep", "SigBlk", "/proc/self/status")
    direct = subprocess.run(status, capture_output=True).stdout
    assert subprocess.run(wrapped(*status), capture_output=True).stdout == direct


def test_we_stop_when_the_command_stops_and_go_on_with_it() -> None:
    process, child = start_saying("echo $$; kill -STOP $$; exit 5")
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    process.send_signal(signal.SIGCONT)
    with contextlib.suppress(ProcessLookupError):  # it may have gone on and ended already
        os.kill(child, signal.SIGCONT)
    assert process.wait(60) == 5


def test_ctrl_c_on_a_terminal_arrives_once() -> None:
    script = "n=0; trap 'n=$((n+1))' INT; echo ready; while [ $n = 0 ]; do sleep 0.02; done; sleep 0.2; exit $((40+n))"
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, wrapped("sh", "-c", script))
    seen = b""
    end = time.monotonic() + 60
    while b"ready" not in seen and time.monotonic() < end:
        if select.select([terminal], [], [], 0.2)[0]:
            seen += os.read(terminal, 1024)
    os.write(terminal, b"\x03")
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 41


def test_a_command_that_is_not_there_is_said_as_shells_do() -> None:
    code = (
        "import os\nfrom slurm_gpushare.node.profile import CannotRun, Command\n"
        "try: Command(['/no/such/thing'], os.environ)\n"
        "except CannotRun as error: print(error.shell_code, error)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    assert said == "127 /no/such/thing: No such file or directory\n"
