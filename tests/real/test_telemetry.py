"""Jobs of known demand, measured by prolog, sampler and epilog on a real Slurm with emulated cards."""

from __future__ import annotations

import pwd
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurm_gpushare.telemetry.record import Closed, Kind, Record, Scope, parse_record
from slurm_gpushare.testbed.cluster import Testbed
from slurm_gpushare.testbed.confs import with_keys
from slurm_gpushare.testbed.emulator.node import set_fault
from slurm_gpushare.testbed.jobs import submit, wait_for
from slurm_gpushare.testbed.layout import Shape

CLOSE = 3.0  # points
TOKEN = "gs-abcdefghijklmnop2345"
SHARD = "--gres=shard:v100_{gpu}:1"


@pytest.fixture(scope="module", autouse=True)
def raw_shards(testbed_session: Testbed) -> Iterator[None]:
    """These tests place jobs by hand, which is the helper's privilege unless RawShards=allow."""
    layout = testbed_session.layout
    files = [layout.gpushare_conf, layout.etc_pristine / layout.gpushare_conf.name]
    before = [path.read_text() for path in files]
    for path, text in zip(files, before, strict=True):
        path.write_text(with_keys(text, {"RawShards": "allow"}))
    yield
    for path, text in zip(files, before, strict=True):
        path.write_text(text)


@pytest.fixture(autouse=True)
def own_settings(testbed: Testbed) -> Iterator[None]:
    """What a test sets in gpushare.conf goes with it, without the restart of slurmctld that a reset would make."""
    yield
    conf = testbed.layout.gpushare_conf
    conf.write_text((testbed.layout.etc_pristine / conf.name).read_text())


def until(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


def workload(util: float = 50, access: float = 20, mem_mib: int = 2048, work_s: float = 5, epochs: int = 1) -> str:
    return (
        f"python -m slurm_gpushare.testbed.workload --gpu-util {util} --mem-access {access} --mem-mib {mem_mib} "
        f"--work-s {work_s} --epochs {epochs}"
    )


def start(testbed: Testbed, script: str, *options: str, gpu: int = 0, node: str = "gpu0", user: str = "games") -> int:
    home = testbed.layout.home / user
    return submit(
        testbed, script, SHARD.format(gpu=gpu), f"--nodelist={node}", "--output=%j.out", *options, user=user, cwd=home
    )


def output(testbed: Testbed, job: int, user: str = "games") -> str:
    return (testbed.layout.home / user / f"{job}.out").read_text()


def open_credential(testbed: Testbed, path: Path) -> tuple[int, Record] | None:
    """Whose record it is, and the record; None if the file has just been replaced."""
    done = testbed.run(["unmunge", f"--input={path}"], check=False)
    header, _, payload = done.stdout.partition("\n\n")
    found = re.search(r"^UID:.*\((\d+)\)", header, re.MULTILINE)
    return (int(found.group(1)), parse_record(payload)) if found else None


def spooled(testbed: Testbed, kind: Kind) -> list[tuple[int, Record]]:
    suffix = "f" if kind is Kind.FINAL else "i"
    paths = (testbed.layout.gpushare / "spool" / "incoming").glob(f"*-{suffix}.rec")
    return [found for path in paths if (found := open_credential(testbed, path))]


def final_records(testbed: Testbed, count: int = 1, timeout_s: float = 30.0) -> dict[int, Record]:
    """Final records by job, once there are `count`."""
    incoming = testbed.layout.gpushare / "spool" / "incoming"
    until(lambda: len(list(incoming.glob("*-f.rec"))) >= count, timeout_s)
    return {record.job_id: record for _, record in spooled(testbed, Kind.FINAL)}


def node_dir(testbed: Testbed, node: str = "gpu0") -> Path:
    return testbed.layout.gpushare / "state" / "nodes" / node


def log(testbed: Testbed, node: str = "gpu0") -> str:
    path = node_dir(testbed, node) / "sampler.log"
    return path.read_text() if path.exists() else ""


def hook_script(
    testbed: Testbed, name: str, job: int, gpus: str = "0", **changes: str
) -> subprocess.CompletedProcess[str]:
    """Run the node's prolog or epilog by hand, as slurmd would."""
    env = {
        "SLURM_JOB_ID": str(job), "SLURMD_NODENAME": "gpu0", "SLURM_JOB_GPUS": gpus, "SLURM_JOB_PARTITION": "gpu",
        "SLURM_JOB_UID": str(pwd.getpwnam("games").pw_uid),
    }  # fmt: skip
    script = testbed.layout.etc / f"{name}.sh"
    return subprocess.run([script], env={**env, **changes}, capture_output=True, text=True, timeout=20, check=False)


def assert_features(record: Record, mgup: float, mgmap: float, mgtsamp: float) -> None:
    assert record.features.mgup == pytest.approx(mgup, abs=CLOSE)
    assert record.features.mgmap == pytest.approx(mgmap, abs=CLOSE)
    assert record.features.mgtsamp == pytest.approx(mgtsamp, abs=CLOSE)


# --- what is measured ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("util", "access", "mem_mib"), [(20, 5, 1024), (61, 43, 7000), (100, 70, 16000)])
def test_a_job_alone_is_profiled_as_it_is(testbed: Testbed, util: float, access: float, mem_mib: int) -> None:
    job = start(testbed, workload(util, access, mem_mib), gpu=1)
    record = final_records(testbed)[job]
    assert_features(record, util, 100 * mem_mib / 16384, access)
    assert (record.node, record.gpu_index, record.gpu_model) == ("gpu0", 1, "V100")
    assert record.features.mem_used_mib == mem_mib
    assert record.shared_s == 0
    assert record.alone_s == pytest.approx(5, abs=1.5)
    assert record.profile.stats["job_processes"].max >= 2
    assert {uid for uid, _ in spooled(testbed, Kind.FINAL)} == {0}, "a node's record is root's"


def test_sharers_are_profiled_by_their_own_processes(testbed: Testbed) -> None:
    first = start(testbed, workload(70, 40, 6000, work_s=16))
    until(lambda: any(record.alone_s > 4 for _, record in spooled(testbed, Kind.INTERIM)))
    second = start(testbed, workload(50, 20, 3000, work_s=5), user="nobody")
    records = final_records(testbed, 2, timeout_s=60)
    rate = float(re.findall(r"rate=([\d.]+)", output(testbed, second, "nobody"))[-1])
    assert_features(records[second], 50 * rate, 100 * 3000 / 16384, 20 * rate)
    assert records[second].shared_s == pytest.approx(5 / rate, abs=1.5)
    assert [neighbour.job_id for neighbour in records[second].neighbours] == [first]

    resident = records[first]
    assert_features(resident, 70, 100 * 6000 / 16384, 40)
    assert resident.alone_s > 4
    assert resident.shared_s == pytest.approx(records[second].shared_s, abs=1.5)
    assert [neighbour.job_id for neighbour in resident.neighbours] == [second]
    # What learning needs: the same counter, alone and beside the neighbour, in the proportion of the speeds.
    slowed = re.findall(r"rate=([\d.]+) isd", output(testbed, first))
    alone, shared = resident.alone.stats["proc_sm_pct"], resident.shared.stats["proc_sm_pct"]
    assert alone.max == pytest.approx(70, abs=CLOSE)
    assert shared.max < alone.max - CLOSE, slowed


def test_the_job_itself_can_tell_that_its_epoch_is_over(testbed: Testbed) -> None:
    script = f'{workload(40, 10, 1024, work_s=8, epochs=2)}; test -n "$GPUSHARE_EPOCH_FILE"'
    job = start(testbed, script)
    record = final_records(testbed)[job]
    assert record.closed is Closed.EPOCH
    assert record.profile.seconds == pytest.approx(4, abs=1.5)
    assert record.alone_s == pytest.approx(8, abs=2.5), "activity is followed to the end"
    wait_for(testbed, job, ["COMPLETED"])


def test_a_profile_is_no_longer_than_the_site_allows(testbed: Testbed) -> None:
    configure(testbed, ProbeSeconds="2")
    job = start(testbed, workload(work_s=6))
    record = final_records(testbed)[job]
    assert record.closed is Closed.LIMIT
    assert record.profile.seconds == pytest.approx(2, abs=1)


def test_an_interim_record_says_how_it_goes(testbed: Testbed) -> None:
    job = start(testbed, workload(40, 10, 1024, work_s=60))
    until(lambda: any(record.seq >= 2 and record.features.mgup for _, record in spooled(testbed, Kind.INTERIM)))
    [(_, record)] = spooled(testbed, Kind.INTERIM)
    assert (record.job_id, record.closed) == (job, Closed.OPEN)
    testbed.run(["scancel", str(job)])
    assert final_records(testbed)[job].run_id == record.run_id
    assert spooled(testbed, Kind.INTERIM) == []


def test_every_record_of_32_concurrent_jobs_arrives(short_tmp: Path, request: pytest.FixtureRequest) -> None:
    testbed = Testbed(short_tmp / "many").up(
        Shape(nodes=4, gpus=4, shards=2), accounting=False, suite=request.config.option.slurm
    )
    try:
        configure(testbed, RawShards="allow")
        jobs = [
            start(testbed, workload(20 + index, 10, 1024, work_s=20), node=f"gpu{index // 8}", gpu=index // 2 % 4)
            for index in range(32)
        ]
        wait_for(testbed, jobs, ["RUNNING"])
        records = final_records(testbed, 32, timeout_s=120)
        assert records.keys() == set(jobs)
        for index, job in enumerate(jobs):
            partner = jobs[index ^ 1]
            assert [neighbour.job_id for neighbour in records[job].neighbours] == [partner]
            assert records[job].features.mem_used_mib == 1024
    finally:
        testbed.down(purge=True)


def test_no_word_of_the_user_s_reaches_a_record(testbed: Testbed) -> None:
    secret = "resnet-imagenet-secret"
    script = f"export MODEL={secret}; {workload(work_s=3)} --checkpoint ./{secret}"
    start(testbed, script, f"--job-name={secret}", f"--comment={secret}")
    final_records(testbed)
    for path in (testbed.layout.gpushare / "spool").rglob("*.rec"):
        text = path.name + testbed.run(["unmunge", f"--input={path}"], check=False).stdout.partition("\n\n")[2]
        assert secret not in text
        assert "games" not in text


# --- prolog and epilog ---------------------------------------------------------------------------------------


def samplers(testbed: Testbed) -> list[int]:
    """Live samplers of this testbed, by what the prologs wrote."""
    pids = [int(path.read_text().split()[0]) for path in node_dir(testbed).parent.glob("*/jobs/*")]
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_prolog_and_epilog_may_run_twice(testbed: Testbed) -> None:
    assert hook_script(testbed, "prolog", 900001).returncode == 0
    [pid] = samplers(testbed)
    assert hook_script(testbed, "prolog", 900001).returncode == 0
    assert samplers(testbed) == [pid]
    until(lambda: list((testbed.layout.gpushare / "spool" / "incoming").glob("*-i.rec")))
    for _ in range(2):
        assert hook_script(testbed, "epilog", 900001).returncode == 0
    until(lambda: not Path(f"/proc/{pid}").exists())
    assert list(final_records(testbed)) == [900001]
    left = [path for path in node_dir(testbed).rglob("*") if path.is_file()]
    assert [path.name for path in left] == ["sampler.log"]


def test_an_epilog_before_the_sampler_is_up_costs_no_record(testbed: Testbed) -> None:
    hook_script(testbed, "prolog", 900002)
    hook_script(testbed, "epilog", 900002)
    assert final_records(testbed)[900002].features.mgup is None


def test_a_requeued_job_is_measured_anew(testbed: Testbed) -> None:
    job = start(testbed, workload(40, 10, 1024, work_s=30), "--requeue")
    until(lambda: spooled(testbed, Kind.INTERIM))
    testbed.run(["scontrol", "requeue", str(job)])
    wait_for(testbed, job, ["PENDING"])
    # Slurm itself waits two minutes; 22.05 runs no second prolog for a job that starts anew within a second.
    testbed.run(["scontrol", "update", f"JobId={job}", "StartTime=now+2seconds"])
    wait_for(testbed, job, ["RUNNING"])
    until(lambda: spooled(testbed, Kind.INTERIM))
    testbed.run(["scancel", str(job)])
    until(lambda: len(spooled(testbed, Kind.FINAL)) == 2)
    runs = {record.run_id for _, record in spooled(testbed, Kind.FINAL)}
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


def test_a_sampler_outlives_its_slurmd_s_restart(testbed: Testbed) -> None:
    job = start(testbed, workload(40, 10, 1024, work_s=8))
    until(lambda: spooled(testbed, Kind.INTERIM))
    testbed.restart("slurmd-gpu0")
    assert_features(final_records(testbed)[job], 40, 6.25, 10)


def test_both_sharers_are_in_dcgm_s_job_mapping(testbed: Testbed) -> None:
    mapping = testbed.layout.gpushare / "dcgm"
    configure(testbed, DcgmJobMappingDir=str(mapping))
    mapping.mkdir()
    (mapping / "1").write_text("4242\n")  # somebody else's line
    first = start(testbed, "sleep 60", gpu=1)
    second = start(testbed, "sleep 60", gpu=1)
    until(lambda: sorted((mapping / "1").read_text().split()) == sorted(["4242", str(first), str(second)]))
    testbed.run(["scancel", str(first)])
    until(lambda: (mapping / "1").read_text().split() == ["4242", str(second)])
    testbed.run(["scancel", str(second)])
    until(lambda: (mapping / "1").read_text() == "4242\n")


# --- faults --------------------------------------------------------------------------------------------------


def configure(testbed: Testbed, **changes: str) -> None:
    """Set keys of gpushare.conf, which prologs and samplers read anew for each job."""
    path = testbed.layout.gpushare_conf
    path.write_text(with_keys(path.read_text(), changes))


@pytest.mark.parametrize("fault", ["* hang", "nvmlDeviceGetUtilizationRates hang", "* 15", "nvmlInit 9"])
def test_a_broken_nvml_costs_numbers_and_nothing_else(testbed: Testbed, fault: str) -> None:
    set_fault(testbed.layout.emu, "gpu0", fault)
    job = start(testbed, workload(work_s=3))
    wait_for(testbed, job, ["COMPLETED"])
    record = final_records(testbed)[job]
    assert record.features.mgup is None
    assert record.profile.stats["job_processes"].max >= 1
    assert log(testbed).count("without GPU numbers") == 1


def test_an_nvml_that_hung_for_a_while_is_used_again(testbed: Testbed) -> None:
    set_fault(testbed.layout.emu, "gpu0", "nvmlDeviceGetMemoryInfo hang 3")
    job = start(testbed, workload(40, 10, 1024, work_s=60))
    until(lambda: "has not answered" in log(testbed))
    set_fault(testbed.layout.emu, "gpu0", "none 0")
    until(lambda: "answers again" in log(testbed))
    until(lambda: any((record.features.mgup or 0) > 37 for _, record in spooled(testbed, Kind.INTERIM)))
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
    assert list((full_disk / "incoming").iterdir()) == []
    (full_disk / "filler").unlink()
    until(lambda: list((full_disk / "incoming").glob(f"gpu0-{job}-*-f.rec")))


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


# --- gpushare profile ---------------------------------------------------------------------------------------


def test_a_user_profiles_a_command_inside_a_job(testbed: Testbed) -> None:
    command = workload(65, 33, 5000, work_s=4)
    job = start(
        testbed, f"echo input | gpushare profile --token {TOKEN} -- sh -c 'cat; {command}; exit 9'; echo code $?"
    )
    wait_for(testbed, job, ["COMPLETED"])
    until(lambda: len(spooled(testbed, Kind.FINAL)) == 2)
    by_scope = {record.scope: (uid, record) for uid, record in spooled(testbed, Kind.FINAL)}
    uid, record = by_scope[Scope.COMMAND]
    assert uid == pwd.getpwnam("games").pw_uid
    assert (record.job_id, record.token, record.closed) == (job, TOKEN, Closed.EPOCH)
    assert_features(record, 65, 100 * 5000 / 16384, 33)
    assert by_scope[Scope.JOB][1].token is None
    said = output(testbed, job)
    assert said.startswith("input\n")
    assert said.endswith("code 9\n")
    assert "profiling" not in said, "progress is for terminals"


@pytest.mark.parametrize("how", ["--max-seconds 2 --", "--"], ids=["time", "SIGUSR1"])
def test_sampling_stops_and_the_command_goes_on(testbed: Testbed, how: str) -> None:
    script = f"gpushare profile {how} sh -c '{workload(work_s=60)} & exec sleep 60'"
    if "max" not in how:
        script = f"{script} & sleep 4; kill -USR1 $!; wait $!"
    job = start(testbed, f"unset GPUSHARE_EPOCH_FILE; {script}")
    until(lambda: any(record.scope is Scope.COMMAND for _, record in spooled(testbed, Kind.FINAL)), 40)
    [record] = [record for _, record in spooled(testbed, Kind.FINAL) if record.scope is Scope.COMMAND]
    assert record.closed is (Closed.LIMIT if "max" in how else Closed.EPOCH)
    assert testbed.run(["squeue", "-h", "-j", str(job), "-o", "%T"]).stdout.strip() == "RUNNING"


def test_outside_a_job_profile_says_where_it_belongs(testbed: Testbed) -> None:
    done = testbed.run(["gpushare", "profile", "--", "true"], check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("gpushare: error: profile: not inside a job on a compute node.")


def test_scancel_ends_a_profiled_command_as_it_would_without(testbed: Testbed) -> None:
    job = start(
        testbed,
        "exec gpushare profile -- sh -c 'trap \"echo told; exit 0\" TERM; echo up; while :; do sleep 0.1; done'",
    )
    until(lambda: (testbed.layout.home / "games" / f"{job}.out").exists() and "up" in output(testbed, job))
    testbed.run(["scancel", "--signal=TERM", "--batch", str(job)])
    until(lambda: "told" in output(testbed, job))
    wait_for(testbed, job, ["COMPLETED"])
