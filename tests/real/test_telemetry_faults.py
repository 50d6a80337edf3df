"""Prolog, epilog and sampler when they run twice, too early, or beside something that is broken."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpushare_lab.emulator.node import set_fault
from gpushare_lab.experiment.submitting import submit, wait_for
from gpushare_lab.testbed.layout import Shape
from gpushare_lab.testbed.reset import idle_nodes
from gpushare_lab.testbed.rootfs import host_suite
from gpushare_lab.testbed.testbed import Testbed
from hanging import left_behind, stopped_file_system
from telemetry_bed import (
    CLOSE,
    assert_features,
    configure,
    endless,
    final_records,
    hook_script,
    log,
    node_dir,
    read_or_empty,
    samplers,
    spooled,
    start,
    start_measured,
    until,
    workload,
)

from slurm_gpushare.protocol.record import RecordKind

pytestmark = pytest.mark.usefixtures("raw_shards")


def test_prolog_and_epilog_may_run_twice(testbed: Testbed) -> None:
    assert hook_script(testbed, "prolog", 900001).returncode == 0
    [pid] = samplers(testbed)
    assert hook_script(testbed, "prolog", 900001).returncode == 0
    assert samplers(testbed) == [pid]
    until(lambda: spooled(testbed, RecordKind.INTERIM))
    for _ in range(2):
        assert hook_script(testbed, "epilog", 900001).returncode == 0
    until(lambda: not Path(f"/proc/{pid}").exists())
    assert list(final_records(testbed)) == [900001]
    left = {path.name for path in node_dir(testbed).rglob("*") if path.is_file()}
    assert left - {"board", "board.lock"} == {"sampler.log"}, "but for the node's copy of what concerns it"


def test_an_epilog_before_the_sampler_is_up_costs_no_record(testbed: Testbed) -> None:
    hook_script(testbed, "prolog", 900002)
    hook_script(testbed, "epilog", 900002)
    assert final_records(testbed)[900002].features.mgup is None


def test_a_requeued_job_is_measured_anew(testbed: Testbed) -> None:
    job = start(testbed, endless(40, 10, 1024), "--requeue")
    until(lambda: spooled(testbed, RecordKind.INTERIM))
    testbed.run(["scontrol", "requeue", str(job)])
    wait_for(testbed, job, ["PENDING"])
    # Slurm itself waits two minutes; 22.05 runs no second prolog for a job that starts anew within a second.
    testbed.run(["scontrol", "update", f"JobId={job}", "StartTime=now+2seconds"])
    wait_for(testbed, job, ["RUNNING"])
    until(lambda: spooled(testbed, RecordKind.INTERIM))
    testbed.run(["scancel", str(job)])
    until(lambda: len(spooled(testbed, RecordKind.FINAL)) == 2)
    runs = {record.run_id for _, record in spooled(testbed, RecordKind.FINAL)}
    assert len(runs) == 2


@pytest.mark.parametrize(
    ("what", "changes"),
    [
        ("another partition", {"SLURM_JOB_PARTITION": "other"}),
        ("no GPU", {"SLURM_JOB_GPUS": ""}),
        ("no job id", {"SLURM_JOB_ID": ""}),
        ("a job id that is none", {"SLURM_JOB_ID": "../../etc"}),
        ("a node name that is none", {"SLURMD_NODENAME": "../x"}),
        ("GPUs that are none", {"SLURM_JOB_GPUS": "GPU-1234,$(touch x)"}),
    ],
)
def test_what_is_not_ours_is_left_alone(testbed: Testbed, what: str, changes: dict[str, str]) -> None:
    for name in ("prolog", "epilog"):
        done = hook_script(testbed, name, 900003, **changes)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), what
    assert list((testbed.layout.gpushare / "state").rglob("*/jobs/*")) == []


@pytest.mark.parametrize(("comment", "measured"), [("", False), ("my own words", False), ("x gpushare:gs-k", True)])
def test_only_a_job_that_takes_part_has_its_gpus_looked_for(testbed: Testbed, comment: str, measured: bool) -> None:
    """Slurm names no GPU of a CPU job, and none of a job that starts just after slurmctld."""
    hook_script(testbed, "prolog", 900004, gpus="", SLURM_JOB_COMMENT=comment)
    assert (node_dir(testbed) / "jobs" / "900004").exists() == measured
    hook_script(testbed, "epilog", 900004, gpus="", SLURM_JOB_COMMENT=comment)


def test_a_sampler_outlives_its_slurmd_s_restart(testbed: Testbed) -> None:
    job = start(testbed, endless(40, 10, 1024))
    until(lambda: any(record.alone_s > 2 for _, record in spooled(testbed, RecordKind.INTERIM)))
    testbed.restart("slurmd-gpu0")
    [(_, before)] = spooled(testbed, RecordKind.INTERIM)
    until(lambda: any(record.seq >= before.seq + 2 for _, record in spooled(testbed, RecordKind.INTERIM)))
    testbed.run(["scancel", str(job)])
    assert_features(final_records(testbed)[job], 40, 6.25, 10)


def test_both_sharers_are_in_dcgm_s_job_mapping(testbed: Testbed) -> None:
    mapping = testbed.layout.gpushare / "dcgm"
    configure(testbed, DcgmJobMappingDir=str(mapping))
    mapping.mkdir()
    (mapping / "1").write_text("4242\n")  # somebody else's line
    first = start(testbed, "sleep 600", gpu=1)
    until(lambda: str(first) in (mapping / "1").read_text().split())
    second = start(testbed, "sleep 600", gpu=1)
    until(lambda: sorted((mapping / "1").read_text().split()) == sorted(["4242", str(first), str(second)]))
    testbed.run(["scancel", str(first)])
    until(lambda: (mapping / "1").read_text().split() == ["4242", str(second)])
    testbed.run(["scancel", str(second)])
    until(lambda: (mapping / "1").read_text() == "4242\n")


def test_all_cards_of_a_job_with_several_are_in_dcgm_s_job_mapping(testbed: Testbed) -> None:
    """From 23.11 on a prolog is told of the last card only, where each has a type of its own."""
    mapping = testbed.layout.gpushare / "dcgm"
    configure(testbed, DcgmJobMappingDir=str(mapping), GpusPerNode=str(testbed.shape.gpus))
    each = f"for gpu in 0 1; do CUDA_VISIBLE_DEVICES=$gpu {workload(40, 10, 1024, work_s=600)} & done; wait"
    options = ("--gres=gpu:2", "--mem=100", "--output=/dev/null")
    job = submit(testbed, each, *options, user="games", cwd=testbed.layout.home / "games")

    def mapped() -> list[str]:
        return sorted(path.name for path in mapping.glob("[0-9]*") if str(job) in read_or_empty(path).split())

    until(lambda: mapped() == ["0", "1"])
    testbed.run(["scancel", str(job)])
    until(lambda: mapped() == [])


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("* hang", "NVML has not answered"),
        ("nvmlDeviceGetUtilizationRates hang", "NVML has not answered"),
        ("* 15", "NVML: "),
        ("nvmlInit 9", "NVML: "),
    ],
)
def test_a_broken_nvml_costs_numbers_and_nothing_else(testbed: Testbed, fault: str, said: str) -> None:
    set_fault(testbed.layout.emu, "gpu0", fault)
    job = start_measured(testbed, workload(work_s=2))
    wait_for(testbed, job, ["COMPLETED"])
    record = final_records(testbed)[job]
    assert record.features.mgup is None
    assert record.profile.stats["job_processes"].max >= 1
    # Once, however often it was tried. On a busy machine an NVML that answers with an error may be late with it too.
    (line,) = [line for line in log(testbed).splitlines() if said in line]
    assert "without GPU numbers" in line


def test_an_nvml_that_hung_for_a_while_is_used_again(testbed: Testbed) -> None:
    set_fault(testbed.layout.emu, "gpu0", "nvmlDeviceGetMemoryInfo hang 3")
    job = start(testbed, endless(40, 10, 1024))
    until(lambda: "has not answered" in log(testbed))
    set_fault(testbed.layout.emu, "gpu0", "none 0")
    until(lambda: "answers again" in log(testbed))
    until(lambda: any((record.features.mgup or 0) > 37 for _, record in spooled(testbed, RecordKind.INTERIM)))
    testbed.run(["scancel", str(job)])
    assert final_records(testbed)[job].features.mgup == pytest.approx(40, abs=CLOSE)


def test_no_nvml_at_all(testbed: Testbed) -> None:
    library = testbed.layout.lib / "libnvidia-ml.so.1"
    hidden = library.with_suffix(".hidden")
    library.rename(hidden)
    try:
        job = start(testbed, "sleep 3")
        wait_for(testbed, job, ["COMPLETED"])
        record = final_records(testbed)[job]
    finally:
        hidden.rename(library)
    assert (record.gpu_model, record.features.mgup) == (None, None)


@pytest.fixture
def full_disk(testbed: Testbed) -> Iterator[Path]:
    """A spool with no room left."""
    if testbed.state.suite != host_suite():
        pytest.skip("what is mounted here is not seen by a testbed with a root file system of its own")
    path = testbed.layout.gpushare / "full"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", path], check=False)
    if mounted.returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        (path / "incoming").mkdir()
        (path / "filler").write_bytes(bytes(40_000))
        with (path / "filler").open("ab", buffering=0) as file:
            try:
                while file.write(bytes(1024)):
                    pass
            except OSError:
                pass
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def test_a_full_disk_costs_no_job_and_a_record_waits_for_room(testbed: Testbed, full_disk: Path) -> None:
    configure(testbed, SpoolDir=str(full_disk))
    job = start(testbed, workload(work_s=3))
    wait_for(testbed, job, ["COMPLETED"])
    until(lambda: "No space left" in log(testbed))
    until(lambda: not list((full_disk / "incoming").iterdir()))  # but for the moment of another try
    (full_disk / "filler").unlink()
    until(lambda: list((full_disk / "incoming").glob(f"gpu0-{job}-*-f.rec")))


def test_a_record_outlives_a_reboot_of_its_node_while_the_spool_is_away(testbed: Testbed) -> None:
    spool = testbed.layout.gpushare / "spool"
    away = spool.with_name("unmounted")
    job = start_measured(testbed, workload(work_s=2))
    spool.rename(away)
    waits = testbed.layout.gpushare / "undelivered"
    try:
        wait_for(testbed, job, ["COMPLETED"])
        until(lambda: list(waits.glob(f"gpu0-{job}-*-f.rec")))
        assert not spool.exists(), "nodes make no directory that is not theirs"
        # The node reboots: whatever runs there dies, and /run is empty.
        for pid in Path("/proc").glob("[0-9]*"):
            if f"node.sampler\0{job}\0".encode() in read_bytes_or_none(pid / "cmdline"):
                os.kill(int(pid.name), signal.SIGKILL)
        shutil.rmtree(node_dir(testbed))
    finally:
        away.rename(spool)
    following = start(testbed, workload(work_s=1))
    wait_for(testbed, following, ["COMPLETED"])
    assert final_records(testbed, 2).keys() == {job, following}
    until(lambda: not list(waits.iterdir()))


def read_bytes_or_none(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize("state_dir", ["/proc/nowhere", "/dev/null/x"])
def test_a_state_directory_that_cannot_be_costs_no_job(testbed: Testbed, state_dir: str) -> None:
    configure(testbed, StateDir=state_dir)
    job = start(testbed, "exit 0")
    wait_for(testbed, job, ["COMPLETED"])


def test_a_broken_configuration_costs_no_job(testbed: Testbed) -> None:
    with testbed.layout.gpushare_conf.open("a") as file:
        file.write("nonsense\n")
    job = start(testbed, "exit 0")
    wait_for(testbed, job, ["COMPLETED"])
    until(lambda: "nonsense" in log(testbed))


@pytest.mark.full
def test_fifty_jobs_that_end_at_once_beside_a_stopped_file_server_leave_one_process(
    slurm_suite: str | None, short_tmp: Path
) -> None:
    if slurm_suite not in (None, host_suite()):
        pytest.skip("a testbed with a root of its own does not see the mount")
    bed = Testbed(short_tmp / "fifty").up(Shape(nodes=1, gpus=13, shards=4), accounting=False)
    try:
        bed.configure(gpushare={"RawShards": "allow", "EpilogHold": "1"})
        idle_nodes(bed)
        (node,), hold = bed.state.shape.node_names, bed.layout.gpushare / "spool" / "hold"
        hold.mkdir(exist_ok=True)
        for _ in range(50):
            submit(bed, "exec sleep 3000", "--gres=shard:1", "--mem=10", "--output=/dev/null")
        until(lambda: bed.run(["squeue", "-h", "-t", "R"]).stdout.count("\n") == 50)
        with stopped_file_system(hold):
            bed.run(["scancel", "--me"])
            until(lambda: not bed.run(["squeue", "-h"]).stdout.strip())
            assert len(left_behind(bed.layout.gpushare / "state" / "nodes" / node)) <= 1
    finally:
        bed.down(purge=True)
