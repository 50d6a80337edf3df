"""Between two tests the testbed becomes as new, whatever the first one did to it."""

from __future__ import annotations

import subprocess

from gpushare_lab.experiment.submitting import show, submit, wait_for
from gpushare_lab.testbed.processes import start_ticks, wait_until
from gpushare_lab.testbed.reset import reset
from gpushare_lab.testbed.testbed import Testbed

SHARED = ("--gres=shard:v100_0:1", "--nodelist=gpu0")


def test_no_job_or_reservation_outlives_a_reset(testbed: Testbed) -> None:
    stubborn = submit(testbed, "trap '' TERM INT; while :; do sleep 1; done")
    submit(testbed, "sleep 1000", "--array=0-3", "--hold")
    when = ("StartTime=now", "Duration=60", "Users=root")
    testbed.run(["scontrol", "create", "reservation", "ReservationName=mine", "Nodes=gpu1", *when])
    submit(testbed, "sleep 1000", "--begin=now+1hour", user="games", cwd=testbed.layout.home / "games")
    wait_for(testbed, stubborn, ["RUNNING"])
    reset(testbed)
    assert testbed.run(["squeue", "-h", "-a"]).stdout == ""
    assert "mine" not in testbed.run(["scontrol", "show", "reservations"]).stdout


def test_configuration_goes_back_and_slurmctld_has_read_it(testbed: Testbed) -> None:
    before = testbed.layout.slurm_conf.read_text()
    testbed.configure(slurm={"KillWait": "77"}, gpushare={"LeaseSeconds": "33"})
    assert "KillWait                = 77 sec" in testbed.run(["scontrol", "show", "config"]).stdout
    reset(testbed)
    assert testbed.layout.slurm_conf.read_text() == before
    assert "LeaseSeconds=33" not in testbed.layout.gpushare_conf.read_text()
    assert "KillWait                = 77 sec" not in testbed.run(["scontrol", "show", "config"]).stdout


def test_killed_daemons_and_drained_nodes_come_back(testbed: Testbed) -> None:
    testbed.kill("slurmd-gpu1")
    testbed.kill("munged")
    testbed.restart("munged")
    testbed.kill("slurmctld")
    testbed.restart("slurmctld")
    testbed.run(["scontrol", "update", "NodeName=gpu0", "State=DRAIN", "Reason=test"])
    reset(testbed)
    assert all(testbed.running().values())
    wait_for(testbed, [submit(testbed, "true", f"--nodelist={node}") for node in ("gpu0", "gpu1")], ["COMPLETED"])


def test_shards_that_a_restarted_slurmctld_lost_are_found_again(testbed: Testbed) -> None:
    sharers = [submit(testbed, "sleep 1000", *SHARED) for _ in range(2)]
    wait_for(testbed, sharers, ["RUNNING"])
    testbed.restart("slurmctld")
    assert {show(testbed, job)["JobState"] for job in sharers} == {"RUNNING"}
    reset(testbed)
    again = [submit(testbed, "sleep 1000", *SHARED) for _ in range(2)]
    wait_for(testbed, again, ["RUNNING"])


def test_files_and_processes_of_the_last_test_are_gone(testbed: Testbed) -> None:
    record = testbed.layout.gpushare / "spool" / "incoming" / "x.rec"
    record.touch()
    argv, env = testbed.command(["sleep", "1000"])
    left = subprocess.Popen(argv, env=env, cwd="/")
    assert wait_until(lambda: left.pid in testbed.strays(), 30)  # it has no environment yet while it is being made
    reset(testbed)
    assert not record.exists()
    assert start_ticks(left.pid) is None
    left.wait()
