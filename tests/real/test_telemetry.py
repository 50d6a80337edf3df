"""Jobs of known demand, measured by prolog, sampler and epilog on a real Slurm with emulated cards."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from gpushare_lab.experiment.submitting import wait_for
from gpushare_lab.testbed.layout import Shape
from gpushare_lab.testbed.testbed import Testbed
from telemetry_bed import (
    CLOSE,
    assert_features,
    configure,
    endless,
    final_records,
    output,
    spooled,
    start,
    start_measured,
    until,
    workload,
)

from slurm_gpushare.protocol.record import Closed, Record, RecordKind

pytestmark = pytest.mark.usefixtures("raw_shards")


@pytest.mark.parametrize(("util", "access", "mem_mib"), [(20, 5, 1024), (61, 43, 7000), (100, 70, 16000)])
def test_a_job_alone_is_profiled_as_it_is(testbed: Testbed, util: float, access: float, mem_mib: int) -> None:
    job = start_measured(testbed, workload(util, access, mem_mib, work_s=4), gpu=1)
    record = final_records(testbed)[job]
    assert_features(record, util, 100 * mem_mib / 16384, access)
    assert (record.node, record.gpu_index, record.gpu_model) == ("gpu0", 1, "V100")
    assert record.features.mem_used_mib == mem_mib
    assert record.shared_s == 0
    assert record.alone_s == pytest.approx(4, abs=1.5)
    assert record.profile.stats["job_processes"].max >= 2
    assert {uid for uid, _ in spooled(testbed, RecordKind.FINAL)} == {0}, "a node's record is root's"


def test_sharers_are_profiled_by_their_own_processes(testbed: Testbed) -> None:
    first = start(testbed, endless(70, 40, 6000))
    until(lambda: any(record.alone_s > 4 for _, record in spooled(testbed, RecordKind.INTERIM)))
    second = start_measured(testbed, workload(50, 20, 3000, work_s=5), user="nobody")
    final_records(testbed)
    testbed.run(["scancel", str(first)])
    records = final_records(testbed, 2)
    _, shared_s, rate = result(output(testbed, second, "nobody"))
    assert_features(records[second], 50 * rate, 100 * 3000 / 16384, 20 * rate)
    assert records[second].shared_s == pytest.approx(shared_s, abs=1.5)
    assert [neighbour.job_id for neighbour in records[second].neighbours] == [first]

    resident = records[first]
    assert_features(resident, 70, 100 * 6000 / 16384, 40)
    assert resident.alone_s > 4
    assert resident.shared_s == pytest.approx(shared_s, abs=1.5)
    assert [neighbour.job_id for neighbour in resident.neighbours] == [second]
    # What learning needs: the same counter, alone and beside the neighbour, in the proportion of the speeds.
    alone, shared = resident.alone.stats["proc_sm_pct"], resident.shared.stats["proc_sm_pct"]
    work_s, time_s, _ = result(output(testbed, first))
    resident_rate = 1 - (time_s - work_s) / shared_s
    assert alone.max == pytest.approx(70, abs=CLOSE)
    assert shared.max == pytest.approx(70 * resident_rate, abs=CLOSE)


def result(said: str) -> tuple[float, float, float]:
    """What a job says of its whole run: the work that it did, the time that it took, its mean speed."""
    work_s, time_s, rate = re.findall(r"work_s=([\d.]+) time_s=([\d.]+) rate=([\d.]+)", said)[-1]
    return float(work_s), float(time_s), float(rate)


def test_the_job_itself_can_tell_that_its_epoch_is_over(testbed: Testbed) -> None:
    script = f'{workload(40, 10, 1024, work_s=8, epochs=2)}; test -n "$GPUSHARE_EPOCH_FILE"'
    job = start_measured(testbed, script, "--comment=gpushare:gs-epochsepochsepochs22")
    record = final_records(testbed)[job]
    assert record.closed is Closed.EPOCH
    assert record.profile.seconds == pytest.approx(4, abs=1.5)
    assert record.alone_s == pytest.approx(8, abs=2.5), "activity is followed to the end"
    wait_for(testbed, job, ["COMPLETED"])


def test_frameworks_of_whoever_takes_part_let_their_memory_grow(testbed: Testbed) -> None:
    asked = "echo grow=$TF_FORCE_GPU_ALLOW_GROWTH preallocate=$XLA_PYTHON_CLIENT_PREALLOCATE"
    whole, token = "--gres=gpu:1", "--comment=gpushare:gs-frameworkframework22"
    own = {"XLA_PYTHON_CLIENT_PREALLOCATE": "true"}
    jobs = {
        "probe": start(testbed, asked, whole, token),
        "sharer": start(testbed, asked, token),
        "its owner knows better": start(testbed, asked, whole, token, env=own),
        "takes no part": start(testbed, asked, whole),
    }
    wait_for(testbed, list(jobs.values()), ["COMPLETED"])
    assert {who: output(testbed, job).strip() for who, job in jobs.items()} == {
        "probe": "grow=true preallocate=false",
        "sharer": "grow=true preallocate=false",
        "its owner knows better": "grow=true preallocate=true",
        "takes no part": "grow= preallocate=",
    }


def test_pytorch_is_fenced_where_the_site_wants_it_and_what_its_owner_set_stays(testbed: Testbed) -> None:
    configure(testbed, FrameworkMemory="fence")
    asked, token = "echo conf=$PYTORCH_CUDA_ALLOC_CONF", "--comment=gpushare:gs-frameworkframework22"
    own = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    fraction = {"PYTORCH_CUDA_ALLOC_CONF": "per_process_memory_fraction:0.9"}
    jobs = {
        "sharer": start(testbed, asked, token),
        "appended": start(testbed, asked, token, env=own),
        "its owner knows better": start(testbed, asked, token, env=fraction),
        "has a whole card": start(testbed, asked, "--gres=gpu:1", token),
    }
    wait_for(testbed, list(jobs.values()), ["COMPLETED"])
    assert {who: output(testbed, job).strip() for who, job in jobs.items()} == {
        "sharer": "conf=per_process_memory_fraction:0.47",
        "appended": "conf=expandable_segments:True,per_process_memory_fraction:0.47",
        "its owner knows better": "conf=per_process_memory_fraction:0.9",
        "has a whole card": "conf=",
    }


def test_a_profile_is_no_longer_than_the_site_allows(testbed: Testbed) -> None:
    configure(testbed, ProbeSeconds="4")  # long beside what a sampler is late by on a busy machine
    job = start_measured(testbed, workload(work_s=12))
    record = final_records(testbed)[job]
    assert record.closed is Closed.LIMIT
    assert record.profile.seconds == pytest.approx(4, abs=2)


def test_an_interim_record_says_how_it_goes(testbed: Testbed) -> None:
    job = start(testbed, endless(40, 10, 1024))
    until(lambda: any(record.seq >= 2 and record.features.mgup for _, record in spooled(testbed, RecordKind.INTERIM)))
    [(_, record)] = spooled(testbed, RecordKind.INTERIM)
    assert (record.job_id, record.closed) == (job, Closed.OPEN)
    testbed.run(["scancel", str(job)])
    assert final_records(testbed)[job].run_id == record.run_id
    until(lambda: not spooled(testbed, RecordKind.INTERIM))


def test_every_record_of_32_concurrent_jobs_arrives(short_tmp: Path, request: pytest.FixtureRequest) -> None:
    testbed = Testbed(short_tmp / "many").up(
        Shape(nodes=4, gpus=4, shards=2), accounting=False, suite=request.config.option.slurm
    )
    try:
        configure(testbed, RawShards="allow")
        jobs = [
            start(testbed, endless(20 + index, 10, 1024), node=f"gpu{index // 8}", gpu=index // 2 % 4)
            for index in range(32)
        ]
        partners = {job: {jobs[index ^ 1]} for index, job in enumerate(jobs)}
        wait_for(testbed, jobs, ["RUNNING"], timeout_s=300)
        until(lambda: neighbours(spooled(testbed, RecordKind.INTERIM)) == partners, 300)
        testbed.run(["scancel", *map(str, jobs)])
        final_records(testbed, 32, timeout_s=300)
        finals = spooled(testbed, RecordKind.FINAL)
        assert neighbours(finals) == partners
        assert {record.features.mem_used_mib for _, record in finals} == {1024}
    finally:
        testbed.down(purge=True)


def neighbours(spool: list[tuple[int, Record]]) -> dict[int, set[int]]:
    return {record.job_id: {neighbour.job_id for neighbour in record.neighbours} for _, record in spool}


def test_no_word_of_the_user_s_reaches_a_record(testbed: Testbed) -> None:
    secret = "resnet-imagenet-secret"
    script = f"export MODEL={secret}; {workload(work_s=3)} --checkpoint ./{secret}"
    start(testbed, script, f"--job-name={secret}", f"--comment={secret}")
    final_records(testbed)
    for path in (testbed.layout.gpushare / "spool").rglob("*.rec"):
        text = path.name + testbed.run(["unmunge", f"--input={path}"], check=False).stdout.partition("\n\n")[2]
        assert secret not in text
        assert "games" not in text
