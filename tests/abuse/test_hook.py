"""What an ordinary user with a login may try against slurmctld and against the cards of others, at submission.

Each case says what is tried and what must come of it; `seen` is what did. A table is made of the three.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from gpushare_lab.experiment.submitting import show
from gpushare_lab.testbed.testbed import Testbed
from hook_testbed import KNOWN, OTHERS, is_old, prefix, sbatch, set_conf, write_hook_file

from slurm_gpushare.helper.changes import GUEST_NICE

USER = "games"
LATER = "--begin=now+1hour"
REQUEST = ("TresPerJob", "TresPerNode", "TresPerSocket", "TresPerTask", "AdminComment")


@dataclass(frozen=True)
class Case:
    """One attack."""

    attack: str
    expected: str
    seen: Callable[[Testbed], str]


def tried(testbed: Testbed, *argv: str, script: str = "#!/bin/sh\ntrue\n") -> str:
    """Runs a command of a user's: what its outcome was, in a word."""
    testbed.run(["true"], user=USER)
    home = testbed.layout.home / USER
    # Slurm's own commands may take a minute to send megabytes: that is their user's time.
    done = testbed.run(list(argv), user=USER, check=False, input=script, cwd=home, timeout_s=400)
    return "accepted" if done.returncode == 0 else "refused"


def request(testbed: Testbed, job_id: int) -> dict[str, str]:
    """What a job asks for, and its tag."""
    job = show(testbed, job_id)
    return {name: job[name] for name in REQUEST if name in job}


def slurmctld_cpu_s(testbed: Testbed) -> float:
    """CPU time that slurmctld has used: unlike a clock, it does not count what other processes do."""
    words = Path(f"/proc/{testbed.running()['slurmctld']}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def slurmctld_peak_mib(testbed: Testbed) -> float:
    status = Path(f"/proc/{testbed.running()['slurmctld']}/status").read_text()
    found = re.search(r"VmHWM:\s*(\d+) kB", status)
    assert found is not None
    return int(found[1]) / 1024


@contextmanager
def bounded(testbed: Testbed, outcome: list[str]) -> Iterator[None]:
    """Adds to the outcome whether slurmctld came through cheaply."""
    cpu_s, peak_mib = slurmctld_cpu_s(testbed), slurmctld_peak_mib(testbed)
    yield
    used_s, more_mib = slurmctld_cpu_s(testbed) - cpu_s, slurmctld_peak_mib(testbed) - peak_mib
    cheap = used_s < 2 and more_mib < 50
    outcome.append("cheap" if cheap else f"{used_s:.1f} s of CPU and {more_mib:.0f} MiB")


def long_constraint(testbed: Testbed) -> str:
    outcome: list[str] = []
    with bounded(testbed, outcome):
        result = tried(testbed, "sbatch", "--gres=gpu:v100:1", "-C", "(" * 120_000)
    return ", ".join([result, *outcome])


def long_request(testbed: Testbed) -> str:
    outcome: list[str] = []
    with bounded(testbed, outcome):
        result = tried(testbed, "sbatch", "--gres=" + "gpu:v100:1," * 11_000 + "gpu:1")
    return ", ".join([result, *outcome])


def long_change(items: int) -> Callable[[Testbed], str]:
    """Typed in, since the kernel limits the length of an argument."""

    def attempt(testbed: Testbed) -> str:
        job = sbatch(testbed, "--gpus=1", LATER, token=None)
        before = request(testbed, job.job_id)
        line = f"update JobId={job.job_id} TresPerNode=" + f"{prefix(testbed)}gpu:1," * items
        outcome: list[str] = []
        with bounded(testbed, outcome):
            tried(testbed, "scontrol", script=f"{line}\nquit\n")
        result = "refused" if request(testbed, job.job_id) == before else "accepted"
        return ", ".join([result, *outcome])

    return attempt


def long_directive(option: str, size: int) -> Callable[[Testbed], str]:
    """In the script's own lines an option may be longer than the kernel lets an argument be."""

    def attempt(testbed: Testbed) -> str:
        text = option + ("(" * size if option == "-C " else "gpu:v100:1," * (size // 11) + "gpu:1")
        outcome: list[str] = []
        with bounded(testbed, outcome):
            script = f"#!/bin/sh\n#SBATCH --gres=gpu:v100:1\n#SBATCH {text}\ntrue\n"
            result = tried(testbed, "sbatch", script=script)
        return ", ".join([result, *outcome])

    return attempt


def changed_request(token: str | None, *changes: str) -> Callable[[Testbed], str]:
    """Tries to change a pending job's request in each of these ways."""

    def attempt(testbed: Testbed) -> str:
        job = sbatch(testbed, "--gpus=1", LATER, token=token)
        before = request(testbed, job.job_id)
        results = {tried(testbed, "scontrol", "update", f"JobId={job.job_id}", change) for change in changes}
        after = request(testbed, job.job_id)
        return ", ".join([*sorted(results), "unchanged" if after == before else f"changed to {after}"])

    return attempt


def shards_elsewhere(testbed: Testbed) -> str:
    requests = ("--gres=shard:v100_1:1", "--gres=shard:1", "--gpus=1 --gres=shard:1")
    results = {tried(testbed, "sbatch", "-p", part, *r.split()) for r in requests for part in ("other", "other,gpu")}
    return ", ".join(sorted(results))


def moved_in(testbed: Testbed) -> str:
    """A job with shards from before the site refused them, moved to the partition that shares."""
    set_conf(testbed, RawShards="allow")
    job = sbatch(testbed, "-p", "other", "--gres=shard:1", LATER, token=None)
    set_conf(testbed, RawShards="deny")
    result = tried(testbed, "scontrol", "update", f"JobId={job.job_id}", "Partition=gpu")
    return f"{result}, in {show(testbed, job.job_id)['Partition']}"


def many_tasks(testbed: Testbed) -> str:
    """254 is "unset" in a field of eight bits. Whether Slurm takes a job that can never run depends on the release."""
    argv = ["sbatch", "--parsable", f"--comment=gpushare:{KNOWN}", "-n254", "--gpus-per-task=1"]
    testbed.run(["true"], user=USER)
    home = testbed.layout.home / USER
    done = testbed.run(argv, user=USER, check=False, input="#!/bin/sh\ntrue\n", cwd=home)
    said = "says why" if "several tasks" in done.stderr else done.stderr
    job = show(testbed, int(done.stdout)) if done.returncode == 0 else {}
    return f"{said}, {'tagged' if 'AdminComment' in job else 'not tagged'}"


def opted_out(testbed: Testbed) -> str:
    """A guest goes before everybody. Who is one and then asks for a whole GPU must not keep that."""
    job = sbatch(testbed, "--gpus=1", LATER).job_id
    if not is_old(testbed):  # there the hook has given it an index, and it keeps that
        tag = f"GS1:c=2;t={KNOWN};o=gpu:1;g=gpu0:1;n=7"
        placed = ["Gres=shard:v100_1:1", "ReqNodeList=gpu0", f"AdminComment={tag}", f"Nice={GUEST_NICE}"]
        testbed.run(["scontrol", "update", f"JobId={job}", *placed])
    else:
        testbed.run(["scontrol", "update", f"JobId={job}", "Nice=7"])
    tried(testbed, "scontrol", "update", f"JobId={job}", "Comment=")
    return f"nice {show(testbed, job)['Nice']}"


def grown(testbed: Testbed) -> str:
    """Short when it was given a place, longer and larger when it starts."""
    job = sbatch(testbed, "--gpus=1", LATER, "--time=5").job_id
    tag = show(testbed, job)["AdminComment"].strip()
    testbed.run(["scontrol", "update", f"JobId={job}", f"AdminComment={tag};g=gpu0:1;n=0"])
    changes = ("TimeLimit=500", "NumCPUs=4", "CpusPerTask=4", "NumTasks=4", "MinMemoryNode=500", "MinMemoryCPU=500")
    results = {tried(testbed, "scontrol", "update", f"JobId={job}", change) for change in changes}
    shorter = tried(testbed, "scontrol", "update", f"JobId={job}", "TimeLimit=3")
    return f"{', '.join(sorted(results))}; shorter is {shorter}"


def moved_out(testbed: Testbed) -> str:
    """Another partition of the same nodes, where no sampler starts."""
    job = sbatch(testbed, "--gpus=1", LATER).job_id
    targets = ("other", "gpu,other")
    results = {tried(testbed, "scontrol", "update", f"JobId={job}", f"Partition={target}") for target in targets}
    return f"{', '.join(sorted(results))}, in {show(testbed, job)['Partition']}"


def gang_of_one(testbed: Testbed) -> str:
    job = sbatch(testbed, "--gres=gpu:1", "--hold", token=None).job_id
    testbed.run(["scontrol", "update", f"JobId={job}", f"AdminComment=GS1:c=2;t={KNOWN};o=shard:2;k=2"])
    changes = ("NumTasks=2", "TasksPerNode=2", "CPUsPerTask=2")
    results = {tried(testbed, "scontrol", "update", f"JobId={job}", change) for change in changes}
    return ", ".join(sorted(results))


def more_cpus(testbed: Testbed) -> str:
    """The helper counts the CPUs of tasks. A node with too few of the others would be blocked for a lease."""
    left = sbatch(testbed, "--gpus=1", "--hold", "--mincpus=2")
    job = sbatch(testbed, "--gpus=1", "--hold", "-c2")
    result = tried(testbed, "scontrol", "update", f"JobId={job.job_id}", "MinCPUsNode=3")
    return f"{'shares' if left.tag(testbed) else 'does not share'}, change {result}"


def somebody_elses_token(testbed: Testbed) -> str:
    job = sbatch(testbed, "--gpus=1", LATER, token=OTHERS)
    told = "told whose it is" if "its token is another user's" in str(job.said) else str(job.said)
    return f"{'not tagged' if job.tag(testbed) is None else 'tagged'}, {told}"


def forged_tag(testbed: Testbed) -> str:
    tag = f"GS1:c=2;t={KNOWN};o=gpu:1"
    at_submission = tried(testbed, "sbatch", "--gpus=1", LATER, f"--admin-comment={tag}")
    job = sbatch(testbed, "--gpus=1", LATER, token=None).job_id
    later = tried(testbed, "scontrol", "update", f"JobId={job}", f"AdminComment={tag}")
    kept = show(testbed, job).get("AdminComment", "")
    return f"{at_submission}, {later}, {'tagged' if 'GS1:' in kept else 'not tagged'}"


def nobodys_job(testbed: Testbed) -> str:
    job = sbatch(testbed, "--gpus=1", LATER, token=OTHERS, user="nobody")
    tag = job.tag(testbed)
    return "shares" if tag is not None and tag.cluster == 1 else f"does not share: {job.said}"


CASES = [
    Case("a constraint of 120,000 parentheses with gpu:v100", "refused, cheap", long_constraint),
    Case("a request of 120 kB for GPUs", "refused, cheap", long_request),
    Case("a pending job changed to a request of 1.5 MB", "refused, cheap", long_change(150_000)),
    Case(
        "shards in a form that only Slurm understands, for a pending job",
        "refused, unchanged",
        changed_request(None, "TresPerNode=xgres:shard:v100_0:1", "TresPerNode=xgres/shard:1", "Gres=shard:1"),
    ),
    Case(
        "another GPU request for a pending job that is tagged",
        "refused, unchanged",
        changed_request(KNOWN, "TresPerNode=GRES:gpu:2", "TresPerNode=gres/gpu:2", "TresPerJob=gres:gpu:2", "Gres="),
    ),
    Case("shards on another partition with the same nodes", "refused", shards_elsewhere),
    Case("a job with shards moved to the partition that shares", "refused, in other", moved_in),
    Case("a GPU for each of 254 tasks", "says why, not tagged", many_tasks),
    Case("opting out with the nice value of a guest", "nice 7", opted_out),
    Case("growing between being placed and being started", "refused; shorter is accepted", grown),
    Case("a shared job moved to where nobody measures", "refused, in gpu", moved_out),
    Case("other tasks for a gang that waits", "refused", gang_of_one),
    Case("CPUs that the helper does not count (--mincpus)", "does not share, change refused", more_cpus),
    Case("somebody else's token", "not tagged, told whose it is", somebody_elses_token),
    Case("a forged tag in AdminComment", "refused, refused, not tagged", forged_tag),
    Case("a job of uid 65534, which is nobody", "shares", nobodys_job),
]


FULL = [
    Case("a constraint of 300 kB in the script", "refused, cheap", long_directive("-C ", 300_000)),
    Case("a request of 300 kB in the script", "refused, cheap", long_directive("--gpus-per-node=", 300_000)),
    Case("a pending job changed to a request of 8 MB", "refused, cheap", long_change(800_000)),
]


@pytest.mark.parametrize(
    "case", CASES + [pytest.param(case, marks=pytest.mark.full) for case in FULL], ids=lambda case: case.attack
)
def test_hook_holds(testbed: Testbed, case: Case, verdict: Callable[[str, str, str], None]) -> None:
    write_hook_file(testbed)
    verdict(case.attack, case.expected, case.seen(testbed))
    testbed.run(["scontrol", "ping"])
