"""What is asked per GPU, what breaks, what is random, and what is none of our business."""

from __future__ import annotations

import random
import shutil

import pytest
from gpushare_lab.experiment.submitting import show, wait_for
from gpushare_lab.testbed.processes import wait_until
from gpushare_lab.testbed.testbed import Testbed
from hook_testbed import (
    KNOWN,
    OTHERS,
    UNKNOWN,
    home_of,
    hook_log,
    is_old,
    owned_directory,
    place,
    sbatch,
    set_conf,
    write_hook_file,
)

from slurm_gpushare.protocol.files import resource_dir


@pytest.fixture
def shared(testbed: Testbed) -> Testbed:
    write_hook_file(testbed)
    return testbed


def granted(testbed: Testbed, job_id: int) -> dict[str, str]:
    """CPUs and memory that a job got."""
    wait_for(testbed, job_id, ["COMPLETED"])
    job = show(testbed, job_id)
    pairs = dict(item.split("=", 1) for item in (job.get("AllocTRES") or job["TRES"]).split(","))
    return {name: pairs[name] for name in ("cpu", "mem", "node")}


@pytest.mark.parametrize(
    ("defaults", "options"),
    [
        ("", "--gpus=1 --cpus-per-gpu=6 --mem-per-gpu=3000"),
        ("", "--gpus=1 -n2 --cpus-per-gpu=6"),
        ("", "--ntasks-per-gpu=3 --gpus=1"),
        ("DefCpuPerGPU=6", "--gpus=1"),
        ("DefCpuPerGPU=6", "--gres=gpu:1 -c2"),
        ("DefCpuPerGPU=6,DefMemPerGPU=9000", "--gpus=1"),
        ("DefCpuPerGPU=6,DefMemPerGPU=9000", "--gpus=1 --mem=5000"),
        ("DefMemPerGPU=9000", "--gpus-per-node=1"),
    ],
)
def test_shared_job_gets_the_cpus_and_memory_of_an_unshared_one(shared: Testbed, defaults: str, options: str) -> None:
    """On the partition `other` the hook does nothing: what Slurm gives there is what must come out."""
    given = dict(item.split("=") for item in defaults.split(",") if item)
    set_conf(
        shared,
        DefCpuPerGpu=f"gpu:{given['DefCpuPerGPU']}" if "DefCpuPerGPU" in given else "",
        DefMemPerGpu=f"gpu:{given['DefMemPerGPU']}" if "DefMemPerGPU" in given else "",
    )
    for partition in ("gpu", "other"):
        shared.run(["scontrol", "update", f"PartitionName={partition}", f"JobDefaults={defaults}"])
    try:
        plain = granted(shared, sbatch(shared, *options.split(), "-p", "other", token=None).job_id)
        job = sbatch(shared, *options.split())
        assert job.tag(shared) is not None, job.said
        place(shared, job.job_id, index=0, node="gpu0")
        assert granted(shared, job.job_id) == plain
    finally:
        for partition in ("gpu", "other"):
            shared.run(["scontrol", "update", f"PartitionName={partition}", "JobDefaults="])


def test_broken_files_cost_only_sharing(shared: Testbed) -> None:
    hook_file = shared.layout.gpushare / "hook.sqlite"
    for damage in (lambda: hook_file.write_bytes(b"x" * 8192), hook_file.unlink, shared.layout.gpushare_conf.unlink):
        damage()
        shared.wait_for_hook()
        set_time = sbatch(shared, "--gpus=1", "--begin=now+1hour", token=None)  # any job, to be sure of an answer
        job = sbatch(shared, "--gpus=1", "--begin=now+1hour")
        assert job.job_id > set_time.job_id
    assert hook_log(shared)


def test_missing_module_does_not_keep_slurmctld_from_starting(shared: Testbed) -> None:
    bridge = shared.dir / "bridge"
    shutil.copytree(resource_dir("lua_bridge"), bridge)
    (bridge / "gpushare_share.lua").unlink()
    (shared.layout.etc / "job_submit.lua").write_text(f'return dofile("{bridge}/job_submit.lua")\n')
    shared.restart("slurmctld")
    job = sbatch(shared, "-n1")
    assert job.tag(shared) is None
    assert any("not loaded" in line for line in hook_log(shared))
    shutil.rmtree(bridge)


def test_five_hundred_random_submissions_leave_slurmctld_well(shared: Testbed) -> None:
    """As one user, in one shell, so that it takes seconds; what sbatch itself refuses is fine."""
    chance = random.Random(11)
    scraps = [
        "gpu",
        "shard",
        "v100",
        "v100_0",
        ":",
        ",",
        "=",
        "1",
        "2",
        "'",
        '"',
        ";",
        "--",
        "é",
        "%s",
        "GS1:c=1",
        "x" * 900,
    ]
    scraps += ["' OR '1'='1", "(", "|", "\n", "gres/"]

    def noise() -> str:
        return "".join(chance.choice(scraps) for _ in range(chance.randrange(6)))

    lines = []
    for _ in range(500):
        comment = chance.choice([f"gpushare:{KNOWN}", f"gpushare:{OTHERS},max=5", f"gpushare:{UNKNOWN}{noise()}",
                                 f"gpushare:{noise()}", noise()])  # fmt: skip
        gpus = chance.choice(["--gpus=1", "--gres=gpu:1", "--gpus-per-task=1 -n1", "--gres=gpu:v100:1", "--gpus=2", ""])
        odd = f"--gres={noise()}" if chance.random() < 0.3 else ""
        feature = chance.choice(["", "", "-C v100", "'-C(v100|v100)'"])
        lines.append(f"sbatch -Q -H -o /dev/null {_quoted(f'--comment={comment}')} {gpus} {_quoted(odd)} {feature} $S")
    script = home_of(shared) / "fuzz.sh"
    script.write_text("S=~/job.sh; printf '#!/bin/sh\\ntrue\\n' > $S\n" + "\n".join(lines) + "\nexit 0\n")
    before = len(hook_log(shared))
    shared.run(["sh", str(script)], user="games", timeout_s=500)
    shared.run(["scontrol", "ping"])
    assert [line for line in hook_log(shared)[before:] if "error" in line] == []
    queue = shared.run(["scontrol", "show", "job", "-o"]).stdout.splitlines()
    pending = [line for line in queue if "JobState=PENDING" in line]
    assert len(pending) > 100
    for line in pending:
        if f"gpushare:{KNOWN}" in line or f"gpushare:{UNKNOWN}" in line or f"gpushare:{OTHERS}" in line:
            continue
        assert "AdminComment=" not in line
        assert is_old(shared) or "shard" not in line.partition("TresPer")[2]


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'" if text else ""


TELLING = ("zanzibar", "quetzal", "xylophone", "marzipan")


def test_nothing_of_a_job_but_numbers_gets_into_our_files(shared: Testbed) -> None:
    name, content, variable, directory = TELLING
    work = owned_directory(home_of(shared) / directory)
    for token in (KNOWN, UNKNOWN):
        done = shared.run(
            [
                "sbatch",
                "--parsable",
                f"--job-name={name}",
                f"--output={work}/out",
                f"--comment=gpushare:{token}",
                "--gpus=1",
            ],
            user="games",
            env={"SECRET": variable},
            input=f"#!/bin/sh\n# {content}\nsleep 1; echo {content}\n",
            cwd=work,
        )
        job_id = int(done.stdout.split(";")[0])
        if token == KNOWN:
            place(shared, job_id, index=0, node="gpu0")
        wait_for(shared, job_id, ["COMPLETED"])
    incoming = shared.layout.gpushare / "spool" / "incoming"
    # Once there are the two final records and nothing else, no sampler writes or removes a file any more.
    assert wait_until(lambda: [path.name[-6:] for path in incoming.iterdir()] == ["-f.rec"] * 2, 120)
    ours = [path for path in shared.layout.gpushare.rglob("*") if path.is_file()]
    for path in [*ours, shared.layout.log / "slurmctld.log"]:
        text = path.read_bytes()
        for word in TELLING:
            assert word.encode() not in text, f"{word} in {path}"

    def accounted(*which: str) -> str:
        return shared.run(["sacct", "-n", "-P", "-o", "Comment,AdminComment", *which]).stdout

    assert wait_until(lambda: UNKNOWN in accounted("-j", str(job_id)), 60)  # slurmdbd is told later
    assert not any(word in accounted("-a") for word in TELLING)
