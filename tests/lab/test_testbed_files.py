"""What a testbed writes before any daemon starts."""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from gpushare_lab.testbed import configuration, rootfs
from gpushare_lab.testbed.layout import Layout, Ports, Shape, State
from gpushare_lab.testbed.ports import free_ports
from gpushare_lab.testbed.processes import (
    marked_pids,
    recorded_pid,
    start_ticks,
    stop_pids,
    wait_until,
    with_descendants,
    write_pid,
)
from gpushare_lab.testbed.testbed import Testbed

from slurm_gpushare.protocol.errors import BadInput, GpushareError
from slurm_gpushare.protocol.settings import parse_config

LAYOUT = Layout(Path("/tmp/x"))
STATE = State("bookworm", "22.05.8", Shape(nodes=2, gpus=2, shards=3), True, Ports(20001, 20002, (20003, 20004)))


def test_gpus_are_typed_by_index_and_shards_are_untyped_in_both_files() -> None:
    slurm = configuration.slurm_conf(LAYOUT, STATE, "host", False)
    assert "Gres=gpu:v100_0:1,gpu:v100_1:1,shard:6 " in slurm
    assert "NodeName=gpu1 NodeHostname=host NodeAddr=127.0.0.1 Port=20004 " in slurm
    gres = configuration.gres_conf(LAYOUT, STATE).splitlines()
    assert "NodeName=gpu1 Name=gpu Type=v100_1 File=/tmp/x/dev/gpu1/nvidia1" in gres
    assert "NodeName=gpu1 Name=shard Count=6" in gres


def test_gpushare_conf_is_valid_and_stays_inside_the_testbed() -> None:
    config = parse_config(configuration.gpushare_conf(LAYOUT, STATE))
    assert config.partitions == (configuration.PARTITION,)
    assert config.slurm_version == "22.05.8"
    assert {config.hook_file.parent, config.spool_dir.parent, config.state_dir.parent} == {LAYOUT.gpushare}


def test_no_accounting_means_no_slurmdbd() -> None:
    without = State(STATE.suite, STATE.release, STATE.shape, False, STATE.ports, STATE.slurm_user)
    assert "AccountingStorage" in configuration.slurm_conf(LAYOUT, STATE, "host", False)
    assert "AccountingStorage" not in configuration.slurm_conf(LAYOUT, without, "host", False)


@pytest.mark.parametrize(("release", "disabled"), [("22.05.8", False), ("24.05.0", True), ("26.05.5", True)])
def test_cgroups_are_switched_off_where_the_release_can(release: str, disabled: bool) -> None:
    assert ("CgroupPlugin=disabled" in configuration.cgroup_conf(release)) is disabled


def test_keys_are_replaced_added_and_removed() -> None:
    assert configuration.with_keys("A=1\nb = 2\n# c\n", {"B": "3", "a": "", "D": "4"}) == "B=3\nD=4\n# c\n"


def test_state_survives_the_process(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    layout.claim()
    assert layout.read_state() is None
    layout.write_state(STATE)
    assert Layout(tmp_path).read_state() == STATE
    layout.state_file.write_text("{")
    with pytest.raises(GpushareError, match="not the state of a testbed"):
        layout.read_state()


@pytest.mark.parametrize("directory", ["relative", "/tmp/" + "x" * 100, "/tmp/a b", "/tmp/a%n", "/tmp/a,b"])
def test_a_directory_that_slurm_could_not_use_is_refused(directory: str) -> None:
    with pytest.raises(BadInput):
        Layout(Path(directory)).check()


def test_a_directory_that_somebody_else_made_or_can_write_to_is_refused(tmp_path: Path) -> None:
    """What lies in it, a prolog for instance, would run as root."""
    ours, open_to_all, link = tmp_path / "ours", tmp_path / "open", tmp_path / "link"
    ours.mkdir()
    Layout(ours).check_owner()
    Layout(tmp_path / "missing").check_owner()
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    link.symlink_to(ours)
    refused = [open_to_all, link]
    if os.geteuid() == 0:
        refused.append(tmp_path / "theirs")
        refused[-1].mkdir()
        os.chown(refused[-1], 1001, 1001)
    for directory in refused:
        with pytest.raises(BadInput, match="somebody else"):
            Layout(directory).check_owner()
        with pytest.raises(BadInput, match="somebody else"):
            _ = Testbed(directory).state


@pytest.mark.parametrize("shape", [(0, 1, 2), (1, 17, 2), (65, 1, 2), (1, 1, 0)])
def test_a_shape_out_of_range_is_refused(shape: tuple[int, int, int]) -> None:
    with pytest.raises(BadInput, match="must be from 1 to"):
        Shape(*shape)


def test_ports_in_use_are_passed_over() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(GpushareError, match="1 free TCP ports are needed, 0 were found"):
            claimed(1, [port])
    assert claimed(1, [port]) == [port]


def test_a_port_that_another_testbed_is_about_to_use_is_passed_over() -> None:
    """Its daemon listens some seconds later, until when the port looks free."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    with free_ports(1, [port]), pytest.raises(GpushareError, match="0 were found"):
        claimed(1, [port])
    assert claimed(1, [port]) == [port]


def test_ports_do_not_follow_from_a_seed() -> None:
    random.seed(1)
    first = claimed(8)
    random.seed(1)
    assert claimed(8) != first


def claimed(count: int, candidates: list[int] | None = None) -> list[int]:
    """Ports that were free for a moment."""
    with free_ports(count, candidates) as ports:
        return ports


def test_a_pid_file_of_an_earlier_process_with_the_same_pid_is_stale(tmp_path: Path) -> None:
    file = tmp_path / "x.pid"
    write_pid(file, os.getpid())
    assert recorded_pid(file) == os.getpid()
    file.write_text(f"{os.getpid()} 1\n")
    assert recorded_pid(file) is None


def test_a_process_may_call_itself_anything(tmp_path: Path) -> None:
    code = "import sys; open('/proc/self/comm', 'wb').write(b'\\xff\\xfe'); print(flush=True); sys.stdin.read()"
    odd = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert odd.stdout is not None
    odd.stdout.readline()
    try:
        assert marked_pids(tmp_path) == set()
    finally:
        odd.communicate()


def test_processes_are_found_by_mark_and_by_descent(tmp_path: Path) -> None:
    env = {**os.environ, "GPUSHARE_TESTBED": str(tmp_path)}
    parent = subprocess.Popen(["sh", "-c", "env -i sleep 60 & echo; wait"], env=env, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    parent.stdout.readline()
    try:
        assert parent.pid in marked_pids(tmp_path)
        family = with_descendants([parent.pid])
        assert len(family) == 2
    finally:
        stop_pids(with_descendants([parent.pid]))
        parent.wait()
    assert not marked_pids(tmp_path)
    assert not [pid for pid in family if start_ticks(pid)]


def test_ones_own_ancestors_are_never_found(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from gpushare_lab.testbed.processes import marked_pids;"
        f"print(marked_pids(Path({str(tmp_path)!r})))"
    )
    env = {**os.environ, "GPUSHARE_TESTBED": str(tmp_path)}
    found = subprocess.run(
        ["sh", "-c", f'{sys.executable} -c "{code}"; true'], env=env, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "set()"


@pytest.fixture
def fake_debootstrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A debootstrap that fails half-way."""
    script = tmp_path / "bin" / "debootstrap"
    script.parent.mkdir()
    script.write_text('#!/bin/sh\nmkdir -p "$3/usr"\necho "E: Couldn\'t download" >&2\nexit 1\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("GPUSHARE_CACHE", str(tmp_path / "cache"))
    return script


def test_a_root_file_system_that_cannot_be_made_is_one_line_and_leaves_nothing(
    fake_debootstrap: Path, tmp_path: Path
) -> None:
    half_built = tmp_path / "cache" / "trixie.part"
    half_built.mkdir(parents=True)
    with pytest.raises(GpushareError, match=r"debootstrap: exit 1: E: Couldn't download"):
        rootfs.root_of("trixie", lambda _: None)
    assert not half_built.exists()
    assert not (tmp_path / "cache" / "trixie").exists()


def test_a_build_that_was_killed_is_found_by_its_mark_and_locks_until_it_has_ended(
    fake_debootstrap: Path, tmp_path: Path
) -> None:
    fake_debootstrap.write_text("#!/bin/sh\nexec sleep 60\n")
    mark = {"GPUSHARE_TESTBED": str(tmp_path)}
    code = f"from gpushare_lab.testbed.rootfs import root_of; root_of('trixie', str, {mark})"
    builder = subprocess.Popen([sys.executable, "-c", code])
    assert wait_until(lambda: bool(marked_pids(tmp_path)), 60)
    builder.kill()
    builder.wait()
    with (tmp_path / "cache" / "trixie.lock").open() as lock:
        with pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        stop_pids(marked_pids(tmp_path))
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_root_file_system_without_its_last_file_is_not_used(fake_debootstrap: Path, tmp_path: Path) -> None:
    (tmp_path / "cache" / "trixie" / "usr").mkdir(parents=True)
    with pytest.raises(GpushareError, match="debootstrap: exit 1"):
        rootfs.root_of("trixie", lambda _: None)


def test_without_debootstrap_the_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("GPUSHARE_CACHE", str(tmp_path / "cache"))
    with pytest.raises(GpushareError, match="apt-get install debootstrap"):
        rootfs.root_of("forky", lambda _: None)


def test_the_cache_is_outside_the_repository_unless_told() -> None:
    assert rootfs.cache_dir({"GPUSHARE_CACHE": "/c"}) == Path("/c")
    assert rootfs.cache_dir({"XDG_CACHE_HOME": "/x"}) == Path("/x/slurm-gpushare")


def test_a_process_whose_name_is_no_text_can_be_looked_at(tmp_path: Path) -> None:
    script = os.fsencode(tmp_path) + b"/\xff) S \xfe"
    os.symlink(os.fsencode(shutil.which("sleep") or ""), script)
    with subprocess.Popen([script, b"60"]) as process:
        try:
            assert start_ticks(process.pid)
            assert process.pid in with_descendants([process.pid])
        finally:
            process.kill()


def test_no_default_is_in_a_directory_where_anybody_may_be_first() -> None:
    """Testbeds start as root: who makes a directory of a known name in /tmp beforehand could at least keep them out."""
    package = Path(configuration.__file__).resolve().parents[2]
    assert [path for path in package.rglob("*.py") if '"/tmp/' in path.read_text()] == []
    for name in ("testbed", "demo", "replay", "scenarios", "chaos"):
        Layout(Path(f"/var/lib/gpushare-{name}")).check()  # short enough for Unix sockets


def test_a_directory_that_slurm_user_cannot_enter_is_refused_before_anything_is_written(short_tmp: Path) -> None:
    closed = short_tmp / "closed"
    closed.mkdir(mode=0o700)
    with pytest.raises(BadInput, match="closed is closed to others"):
        Layout(closed / "bed").check()
