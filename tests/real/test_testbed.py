"""A testbed comes up whole, tells the truth about itself, and leaves nothing behind, whatever is killed."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpushare_lab.experiment.submitting import submit, wait_for
from gpushare_lab.testbed import configuration
from gpushare_lab.testbed.layout import Layout, Shape
from gpushare_lab.testbed.processes import marked_pids, start_ticks, wait_until
from gpushare_lab.testbed.testbed import Testbed

from slurm_gpushare.protocol.errors import BadInput, GpushareError

GPUSHARE = [sys.executable, "-m", "gpushare_lab"]


class Spare(Testbed):
    """Small and quick to start, on the release that is tested."""

    def __init__(self, directory: Path, suite: str | None) -> None:
        super().__init__(directory)
        self.suite = suite
        self.up_argv = [*GPUSHARE, "testbed", "up", "--nodes=1", "--gpus=1", "--no-accounting", "--dir", str(directory)]
        self.up_argv += [f"--slurm={suite}"] if suite else []

    def start(self) -> None:
        self.up(Shape(nodes=1, gpus=1, shards=2), accounting=False, suite=self.suite)


@pytest.fixture
def spare(short_tmp: Path, slurm_suite: str | None) -> Iterator[Spare]:
    """A small testbed that is not up yet, to be broken."""
    if os.geteuid():
        pytest.skip("a real Slurm needs root")
    testbed = Spare(short_tmp / f"spare{time.monotonic_ns() % 10**6}", slurm_suite)
    yield testbed
    testbed.down(purge=True)


def command(testbed: Testbed, verb: str, *options: str) -> subprocess.CompletedProcess[str]:
    argv = [*GPUSHARE, "testbed", verb, "--dir", str(testbed.dir), *options]
    return subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)


def nothing_left(testbed: Testbed) -> bool:
    return not marked_pids(testbed.dir) and not testbed.dir.exists()


def test_status_names_a_killed_daemon_and_down_stops_the_rest(spare: Spare) -> None:
    spare.start()
    assert command(spare, "status").returncode == 0
    spare.kill("slurmd-gpu0")
    status = command(spare, "status")
    assert status.returncode == 3
    assert [line.split() for line in status.stdout.splitlines() if "slurmd" in line] == [["slurmd-gpu0", "dead"]]
    assert command(spare, "down", "--purge").returncode == 0
    assert nothing_left(spare)


def test_up_again_where_a_testbed_runs_is_refused_and_where_one_is_broken_starts_afresh(spare: Spare) -> None:
    spare.start()
    first = spare.running()
    with pytest.raises(GpushareError, match="runs here already"):
        Spare(spare.dir, spare.suite).start()
    assert spare.running() == first
    spare.kill("slurmctld")
    again = Spare(spare.dir, spare.suite)
    again.start()
    assert all(again.running().values())
    assert set(again.running().values()).isdisjoint(first.values())
    assert not [pid for pid in first.values() if pid in marked_pids(spare.dir)]


@pytest.mark.parametrize("moment", ["munged.pid", "slurmctld.pid"])
def test_a_start_that_was_killed_is_cleaned_up_by_down(spare: Spare, moment: str) -> None:
    up = subprocess.Popen(spare.up_argv, stderr=subprocess.DEVNULL)
    assert wait_until((spare.layout.run / moment).exists, 120)
    up.send_signal(signal.SIGKILL)
    up.wait()
    assert wait_until(lambda: bool(marked_pids(spare.dir)), 30)
    assert command(spare, "status").returncode == 3
    assert command(spare, "down", "--purge").returncode == 0
    assert nothing_left(spare)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_start_cleans_up_itself(spare: Spare, number: signal.Signals) -> None:
    up = subprocess.Popen(spare.up_argv, stderr=subprocess.DEVNULL)
    assert wait_until((spare.layout.run / "munged.pid").exists, 120)
    up.send_signal(number)
    assert up.wait(120) == 130
    assert nothing_left(spare)


def test_down_ends_jobs_that_hide_from_it(spare: Spare) -> None:
    spare.start()
    sleep = f"sleep {1000 + secrets.randbelow(10**9)}"  # nobody else's
    job = submit(spare, f"trap '' TERM; env -i {sleep} & env -i setsid {sleep}; wait")
    wait_for(spare, job, ["RUNNING"])
    assert wait_until(lambda: commands().count(sleep) == 2, 60)
    spare.down(purge=True)
    assert sleep not in commands()


def test_no_job_step_outlives_down(spare: Spare) -> None:
    spare.start()
    wait_for(spare, submit(spare, "sleep 1000"), ["RUNNING"])

    def steps() -> set[int]:
        return {pid for pid in marked_pids(spare.dir) if name_of(pid) == "slurmstepd"}

    assert wait_until(lambda: bool(steps()), 60)
    before = steps()
    spare.down(purge=True)
    assert not [pid for pid in before if start_ticks(pid)]


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""  # it ended meanwhile


def commands() -> list[str]:
    """Every process of the machine, as it was called."""
    return subprocess.run(["ps", "-eo", "args="], capture_output=True, text=True, check=True).stdout.splitlines()


def test_two_testbeds_live_side_by_side(testbed: Testbed, spare: Spare) -> None:
    spare.start()
    ports = [testbed.state.ports, spare.state.ports]
    used = [port for each in ports for port in (each.slurmctld, each.slurmdbd, *each.slurmd)]
    assert len(set(used)) == len(used)
    for each in (testbed, spare):
        wait_for(each, submit(each, "true"), ["COMPLETED"])
    before = testbed.running()
    spare.down(purge=True)
    assert testbed.running() == before
    wait_for(testbed, submit(testbed, "true"), ["COMPLETED"])


def test_a_daemon_that_does_not_start_is_named_with_its_log(spare: Spare, monkeypatch: pytest.MonkeyPatch) -> None:
    good = configuration.slurm_conf
    monkeypatch.setattr(configuration, "slurm_conf", lambda *args: good(*args) + "SelectType=select/nonsense\n")
    with pytest.raises(GpushareError, match=r"slurmctld: died at start: .*select/nonsense"):
        spare.start()
    assert nothing_left(spare)


def test_a_full_disk_is_one_line(spare: Spare) -> None:
    spare.dir.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=755", "tmpfs", str(spare.dir)], check=True)
    try:
        failed = command(spare, "up", "--nodes=1", "--gpus=1")
        assert failed.returncode == 1
        assert "a testbed needs" in failed.stderr
        assert failed.stderr.startswith("gpushare-lab: error: ")
        assert failed.stderr.count("\n") == 1
        assert not list(spare.dir.iterdir())
        assert not marked_pids(spare.dir)
    finally:
        subprocess.run(["umount", str(spare.dir)], check=True)


def test_without_gcc_nothing_is_left(spare: Spare, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for needed in ("/usr/sbin/slurmctld", "/usr/sbin/chroot"):
        (tmp_path / Path(needed).name).symlink_to(needed)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(GpushareError, match="gcc, which is not installed"):
        spare.start()
    monkeypatch.undo()
    assert nothing_left(spare)


def test_only_root_can_start_one(spare: Spare) -> None:
    argv = ["setpriv", "--reuid=nobody", "--clear-groups", *GPUSHARE, "testbed", "up", "--dir", str(spare.dir)]
    failed = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert failed.returncode == 1
    assert failed.stderr.startswith("gpushare-lab: error: testbed: only root")
    assert not spare.dir.exists()


def test_a_directory_that_holds_something_else_is_left_alone(spare: Spare) -> None:
    spare.dir.mkdir()
    precious = spare.dir / "thesis.tex"
    precious.write_text("x")
    for act in (spare.start, lambda: spare.down(purge=True)):
        with pytest.raises(BadInput, match="not a testbed's directory"):
            act()
    assert precious.read_text() == "x"
    precious.unlink()


def test_a_stale_pid_file_harms_nobody(spare: Spare) -> None:
    bystander = subprocess.Popen(["sleep", "100"])
    try:
        layout = Layout(spare.dir)
        spare.dir.mkdir()
        layout.claim()
        (layout.run / "slurmctld.pid").write_text(f"{bystander.pid} 12345\n")
        (layout.run / "munged.pid").write_text("not a number\n")
        spare.down(purge=True)
        assert bystander.poll() is None
        assert not spare.dir.exists()
    finally:
        bystander.kill()
        bystander.wait()


def test_the_machines_own_slurm_and_munge_are_not_touched(testbed: Testbed) -> None:
    for pid in marked_pids(testbed.dir):
        try:
            opened = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
        except OSError:
            continue  # it ended meanwhile
        assert not [path for path in opened if path.startswith(("/etc/slurm", "/run/munge", "/var/lib/mysql"))]
    standard = {6817, 6818, 6819, 3306}
    assert standard.isdisjoint(
        {testbed.state.ports.slurmctld, testbed.state.ports.slurmdbd, *testbed.state.ports.slurmd}
    )
