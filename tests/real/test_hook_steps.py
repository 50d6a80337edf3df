"""srun inside a shared job just works, and names become tokens on the user's side."""

from __future__ import annotations

import os

import pytest
from gpushare_lab.experiment.submitting import show, wait_for
from gpushare_lab.testbed.configuration import version
from gpushare_lab.testbed.testbed import Testbed
from hook_testbed import KNOWN, home_of, place, sbatch, write_hook_file

from slurm_gpushare.protocol.tokens import TokenFile

STEPS = (
    "",
    "--gpus=1",
    "--gres=gpu:1",
    "--gpus-per-task=1",
    "--gpus-per-node=1",
    "-n1 --gpus-per-task=1",
    "--gres=gpu",
    "--gpus=1 --gpu-bind=closest",
    "--gres=shard:1",
    "--gpus=v100:1",
    "--gres=gpu:v100:1",
    "-n1 --gpus-per-task=v100:1",
    "--mem-per-gpu=500",
    "--gpus=1 --mem-per-gpu=1000",
)
SCRIPT = """
echo "alone $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES $SLURM_GPUS_ON_NODE" > ~/steps
while read -r options; do
  timeout 60 srun $options sh -c 'echo "$SLURMD_NODENAME $CUDA_VISIBLE_DEVICES"' >> ~/steps 2>> ~/errors < /dev/null
done <<'END'
@STEPS@
END
"""


@pytest.fixture
def shared(testbed: Testbed) -> Testbed:
    write_hook_file(testbed)
    for name in ("steps", "errors"):
        (home_of(testbed) / name).unlink(missing_ok=True)
    return testbed


@pytest.mark.parametrize(
    "options",
    [
        "--gpus=1",
        "--gres=gpu:v100:1",
        "--gpus-per-task=v100:1 -n1",
        "--gpus-per-task=1 -n1 -c2",
        "--gpus=1 --cpus-per-gpu=2 --mem-per-gpu=1000",
    ],
)
def test_every_srun_of_a_shared_job_sees_the_jobs_gpu(shared: Testbed, options: str) -> None:
    job = sbatch(shared, *options.split(), script=SCRIPT.replace("@STEPS@", "\n".join(STEPS)))
    index = place(shared, job.job_id, index=1, node="gpu0")
    wait_for(shared, job.job_id, ["COMPLETED"], timeout_s=300)
    errors = home_of(shared) / "errors"
    assert "error" not in (errors.read_text() if errors.exists() else "")
    lines = (home_of(shared) / "steps").read_text().splitlines()
    assert lines == [f"alone gpu0 {index} 1"] + [f"gpu0 {index}"] * len(STEPS)


def test_step_that_no_filter_can_mend_is_refused_with_what_to_write_and_no_gpu_is_none(shared: Testbed) -> None:
    steps = ("--cpus-per-gpu=2", "--gpus=1 --cpus-per-gpu=2 --mem-per-gpu=500", "--gpus=0")
    job = sbatch(shared, "--gpus=1", "-c2", script=SCRIPT.replace("@STEPS@", "\n".join(steps)))
    index = place(shared, job.job_id, index=1, node="gpu0")
    wait_for(shared, job.job_id, ["COMPLETED"], timeout_s=300)
    lines = (home_of(shared) / "steps").read_text().splitlines()
    old = version(shared.release) < (23, 11)
    assert lines == [f"alone gpu0 {index} 1"] + [f"gpu0 {index}"] * (2 if old else 0) + ["gpu0 "]
    errors = (home_of(shared) / "errors").read_text()
    assert errors.count("write -c 2 instead") == (0 if old else 2)


# In steps of jobs that ask for CPUs for each GPU srun adds what the filter has asked for instead.
ADDED = {"SLURM_CPUS_PER_TASK=2", "SLURM_TRES_PER_TASK=cpu=2"}


@pytest.mark.parametrize(
    "options",
    ["--gpus=1 --cpus-per-gpu=2 --mem-per-gpu=1000", "--gpus-per-node=1", "--gpus-per-task=1 -n1 -c2",
     "--gpus-per-socket=1 --sockets-per-node=1"],
)  # fmt: skip
def test_script_and_tasks_see_the_variables_of_a_whole_card(shared: Testbed, options: str) -> None:
    """The jobs differ in nothing but the GPU's number and in what SLURM_STEP_GRES says to srun."""
    names = "^(SLURM_.*(GPU|PER_|TRES|CPUS|TASKS|NPROCS)|GPUSHARE_EPOCH)"
    see = f"env | grep -E '{names}' | grep -Ev '_(JOB|STEP)_GPUS=' | sort"
    script = f'({see}) > ~/batch.$SLURM_JOB_ID; srun sh -c "{see}" > ~/task.$SLURM_JOB_ID'
    whole = sbatch(shared, *options.split(), script=script, token=None)
    wait_for(shared, whole.job_id, ["COMPLETED"])
    job = sbatch(shared, *options.split(), script=script)
    place(shared, job.job_id, index=1, node="gpu0")
    wait_for(shared, job.job_id, ["COMPLETED"])
    for kind in ("batch", "task"):
        seen, wanted = (set((home_of(shared) / f"{kind}.{j.job_id}").read_text().splitlines()) for j in (job, whole))
        if kind == "task" and "--cpus-per-gpu" in options:
            wanted |= ADDED & seen
        # 26.05 takes the script's variable from the request as the hook has left it.
        if kind == "batch" and version(shared.release) >= (25, 5) and "SLURM_TRES_PER_TASK=cpu=2,gres/gpu=1" in wanted:
            wanted = (wanted - {"SLURM_TRES_PER_TASK=cpu=2,gres/gpu=1"}) | {"SLURM_TRES_PER_TASK=cpu=2"}
        ours = {line for line in seen if line.startswith(("SLURM_STEP_GRES", "SLURM_SHARDS", "GPUSHARE_EPOCH_FILE"))}
        assert seen - ours == wanted, kind
        assert not any(line.startswith("GPUSHARE") for line in wanted)
        assert any("EPOCH" in line for line in ours)
        assert any("GPU" in line for line in wanted)


def test_two_jobs_on_one_card_run_their_steps_side_by_side(shared: Testbed) -> None:
    script = (
        "srun --gpus=1 sh -c 'echo $CUDA_VISIBLE_DEVICES > ~/step.$SLURM_JOB_ID; until [ -e ~/go ]; do sleep 0.1; done'"
    )
    (home_of(shared) / "go").unlink(missing_ok=True)
    jobs = [sbatch(shared, "--gpus=1", script=script).job_id for _ in range(4)]
    placed = {job: place(shared, job, index=1, node="gpu1") for job in jobs}
    pair = [job for job in jobs if placed[job] == placed[jobs[0]]][:2]  # on 22.05 the hook chose the index
    shared.run(["scancel", *(str(job) for job in jobs if job not in pair)])
    wait_for(shared, pair, ["RUNNING"])
    (home_of(shared) / "go").touch()
    wait_for(shared, pair, ["COMPLETED"])
    seen = {(home_of(shared) / f"step.{job}").read_text() for job in pair}
    assert seen == {f"{placed[jobs[0]]}\n"}


def test_name_becomes_a_token_before_anything_leaves_the_users_side(shared: Testbed) -> None:
    tokens = home_of(shared) / ".config/gpushare/tokens"
    token = TokenFile(tokens).get_or_make("very-telling-name")
    for path in (tokens.parent.parent, tokens.parent, tokens):
        os.chown(path, home_of(shared).stat().st_uid, -1)
    job = sbatch(shared, "--gpus=1", token="very-telling-name")
    shown = show(shared, job.job_id)
    assert shown["Comment"] == f"gpushare:{token}"
    assert shown["AdminComment"].startswith(f"GS1:probe;t={token}")
    unknown = sbatch(shared, "--gpus=1", token="other-telling-name,max=10")
    assert show(shared, unknown.job_id)["Comment"] == "gpushare:?,max=10"
    assert "no token is called" in unknown.said
    assert "telling-name" not in (shared.layout.log / "slurmctld.log").read_text(errors="replace")
    assert "telling-name" not in shared.run(["sacct", "-a", "-n", "-P", "-o", "JobID,Comment,AdminComment"]).stdout
    assert sbatch(shared, "--gpus=1", token=KNOWN).tag(shared) is not None
