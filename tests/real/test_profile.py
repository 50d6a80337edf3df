"""``gpushare profile`` inside real jobs, and whose token a record counts for."""

from __future__ import annotations

import pwd

import pytest
from gpushare_lab.experiment.submitting import wait_for
from gpushare_lab.testbed.testbed import Testbed
from telemetry_bed import (
    CLOSE,
    assert_features,
    configure,
    final_records,
    ingest,
    ingest_until,
    output,
    spooled,
    start,
    start_measured,
    until,
    workload,
)

from slurm_gpushare.protocol.record import Closed, RecordKind, Scope
from slurm_gpushare.store import Store

pytestmark = pytest.mark.usefixtures("raw_shards")

TOKEN = "gs-abcdefghijklmnop2345"


def test_a_user_profiles_a_command_inside_a_job(testbed: Testbed) -> None:
    command = workload(65, 33, 5000, work_s=4)
    job = start(
        testbed, f"echo input | gpushare profile --token {TOKEN} -- sh -c 'cat; {command}; exit 9'; echo code $?"
    )
    wait_for(testbed, job, ["COMPLETED"])
    until(lambda: len(spooled(testbed, RecordKind.FINAL)) == 2)
    by_scope = {record.scope: (uid, record) for uid, record in spooled(testbed, RecordKind.FINAL)}
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
    script = f"gpushare profile {how} sh -c 'touch up; {workload(work_s=60)} & exec sleep 600'"
    if "max" not in how:
        script = f"{script} & until [ -e up ]; do sleep 0.1; done; kill -USR1 $!; wait $!"
    job = start(testbed, f"unset GPUSHARE_EPOCH_FILE; {script}")
    until(lambda: any(record.scope is Scope.COMMAND for _, record in spooled(testbed, RecordKind.FINAL)))
    [record] = [record for _, record in spooled(testbed, RecordKind.FINAL) if record.scope is Scope.COMMAND]
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


def test_a_record_counts_only_for_the_token_of_who_made_it(testbed: Testbed) -> None:
    testbed.run(["gpushare", "db", "migrate"])
    probe = start_measured(testbed, workload(60, 30, 4096, work_s=3))
    testbed.run(["scontrol", "update", f"JobId={probe}", f"AdminComment=GS1:probe;t={TOKEN}"])  # as the hook would
    final_records(testbed)
    accounted = ["sacct", "-n", "-P", "-j", str(probe), "-o", "AdminComment"]
    until(lambda: TOKEN in testbed.run(accounted).stdout)  # slurmdbd is told of the change when the job ends
    said = ingest_until(testbed, "counted")
    assert said["counted"] == 1, said
    thief = start(testbed, f"gpushare profile --token {TOKEN} -- {workload(5, 5, 100, work_s=2)}", user="nobody")
    wait_for(testbed, thief, ["COMPLETED"])
    until(lambda: len(spooled(testbed, RecordKind.FINAL)) == 2)
    said = ingest_until(testbed, "foreign")
    assert said["foreign"] == 1, said
    with Store(f"sqlite:///{testbed.layout.gpushare}/store.sqlite", read_only=True) as store:
        profile = store.profiles.get(TOKEN)
    assert profile is not None
    assert (profile.owner_uid, profile.gpu_model, profile.runs) == (pwd.getpwnam("games").pw_uid, "V100", 1)
    assert profile.features["mgup"] == pytest.approx(60, abs=CLOSE)
    assert profile.mem_used_mib == 4096


def test_records_may_go_straight_to_the_database(testbed: Testbed) -> None:
    testbed.run(["gpushare", "db", "migrate"])
    configure(testbed, RecordsTo="store")
    job = start(testbed, workload(60, 30, 4096, work_s=3))
    wait_for(testbed, job, ["COMPLETED"])
    until(lambda: ingest(testbed)["final"] == 1)  # an interim record may come before it
    assert list((testbed.layout.gpushare / "spool" / "incoming").iterdir()) == []
