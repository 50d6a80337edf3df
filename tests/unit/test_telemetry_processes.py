from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from slurm_gpushare.node import processes
from slurm_gpushare.node.host import JobCounters, NodeCounters
from slurm_gpushare.node.nvml import Bounded, Stuck
from slurm_gpushare.node.processes import Members, cgroup_lister, descendants_lister, has_left, parse_listpids
from slurm_gpushare.node.profile import gpu_indices
from slurm_gpushare.node.sampler import NodeState

LISTPIDS = """\
PID      JOBID    STEPID   LOCALID GLOBALID
3795     12       batch    0       0
3799     12       batch    -       -
-1       12       extern   0       0
4001     13       0        0       0
"""


def test_only_the_job_s_own_processes_are_listed() -> None:
    assert parse_listpids(LISTPIDS, 12) == {3795, 3799}
    assert parse_listpids("JobId=12 does not exist on node gpu0.\n", 12) == set()


@pytest.mark.parametrize(
    "place",
    [
        "system.slice/slurmstepd.scope/job_12/step_batch/user/task_0",
        "system.slice/n7_slurmstepd.scope/job_12/step_0/user",
        "freezer/slurm/uid_1000/job_12/step_batch",
    ],
)
def test_a_job_s_cgroup_is_found_in_each_of_slurm_s_layouts(tmp_path: Path, place: str) -> None:
    leaf = tmp_path / place
    leaf.mkdir(parents=True)
    (leaf / "cgroup.procs").write_text("17\n18\n")
    lister = cgroup_lister(12, tmp_path)
    assert lister is not None
    assert lister() == {17, 18}
    assert cgroup_lister(1, tmp_path) is None


def test_children_belong_and_strangers_do_not() -> None:
    script = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        members = Members(descendants_lister(parent.pid))
        members.refresh()
        assert {process.pid for process in members.processes} == {parent.pid, child}
        assert members.owns(child)
        assert not members.owns(os.getpid())
        os.kill(child, 9)
        parent.wait()
        members.refresh()
        assert members.processes == ()


def test_a_child_that_was_not_listed_yet_is_known_by_its_parent() -> None:
    members = Members(lambda: {os.getpid()})
    members.refresh()
    with subprocess.Popen(["sleep", "60"]) as child:
        assert members.owns(child.pid)
        child.kill()


def test_a_lister_that_fails_forgets_nobody() -> None:
    answers = [{os.getpid()}]

    def lister() -> set[int]:
        if answers:
            return answers.pop()
        raise OSError("slurmd is restarting")

    clock = iter(range(0, 1000, 20))
    members = Members(lister, clock=lambda: float(next(clock)))
    members.refresh()
    members.refresh()
    assert os.getpid() in {process.pid for process in members.processes}


def test_host_counters_measure_this_very_process() -> None:
    import psutil

    job, node = JobCounters(), NodeCounters()
    processes = [psutil.Process()]
    job.read(processes), node.read()
    wall_s, cpu_s = time.monotonic(), time.process_time()
    sum(range(6_000_000))
    busy_pct = 100 * (time.process_time() - cpu_s) / (time.monotonic() - wall_s)  # little on a busy machine
    values = job.read(processes) | node.read()
    assert values["job_cpu_pct"] > busy_pct / 2
    assert values["job_rss_mib"] > 5
    assert 0 <= values["cpu_pct"] <= 100
    assert values["cores"] == psutil.cpu_count()


def test_a_call_that_hangs_is_given_up_and_taken_up_again() -> None:
    hang, bounded = threading.Event(), Bounded()
    with pytest.raises(Stuck):
        bounded.call(hang.wait, 0.01)
    with pytest.raises(Stuck):
        bounded.call(lambda: 1, 0.01)  # at once: the first call still has the thread
    hang.set()
    for _ in range(1000):
        try:
            assert bounded.call(lambda: 2, 1.0) == 2
            break
        except Stuck:
            time.sleep(0.001)
    else:
        pytest.fail("never recovered")


def test_an_error_inside_a_bounded_call_comes_out() -> None:
    with pytest.raises(ZeroDivisionError):
        Bounded().call(lambda: 1 / 0, 1.0)


def test_neighbours_are_the_other_jobs_that_were_given_the_card(tmp_path: Path) -> None:
    state = NodeState.of(tmp_path, "gpu0")
    gpu = state.root / "gpus" / "1"
    gpu.mkdir(parents=True)
    for name in ("12", "13", "junk"):
        (gpu / name).touch()
    assert state.neighbours(12, 1) == {13: None}
    (gpu / "13").write_text("1001\n")
    assert state.neighbours(12, 1) == {13: 1001}
    assert state.neighbours(12, 0) == {}


@pytest.mark.parametrize(
    ("text", "indices"), [("0", [0]), ("0,2", [0, 2]), ("1-3", [1, 2, 3]), ("", []), ("GPU-abc", []), ("0,x", [])]
)
def test_slurm_s_gpu_lists_are_read(text: str, indices: list[int]) -> None:
    assert gpu_indices(text) == indices


def test_who_has_left_its_job_is_its_owners_if_no_other_job_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        uid = os.getuid()
        assert has_left(child.pid, uid)
        assert not has_left(child.pid, uid + 1)
        monkeypatch.setattr(processes, "_JOB_OF_CGROUP", re.compile("(.)"))
        assert not has_left(child.pid, uid), "it is in a job's cgroup"
        child.kill()
    assert not has_left(child.pid, uid)


@pytest.mark.parametrize(
    ("text", "job"),
    [
        ("0::/system.slice/slurmstepd.scope/job_7/step_batch/user/task_0\n", 7),
        ("0::/system.slice/n7_slurmstepd.scope/job_7\n", 7),
        ("0::/system.slice/slurmstepd.scope/n7/job_7/step_0\n", 7),
        ("1:name=systemd:/system.slice/slurmd.service\n9:freezer:/slurm_n7/uid_1000/job_7/step_0\n", 7),
        ("0::/user.slice/user-1000.slice/user@1000.service/job_7\n", None),
        ("0::/user.slice/user-1000.slice/user@1000.service/system.slice/slurmstepd.scope/job_7\n", None),
    ],
)
def test_a_group_of_a_users_own_making_is_no_jobs(text: str, job: int | None) -> None:
    """With a session of their own users may make groups, and name one as that of somebody else's job."""
    found = processes._JOB_OF_CGROUP.search(text)
    assert (int(found[1]) if found else None) == job
