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


@pytest.mark.parametrize(
    "options", ["--gpus=1 --cpus-per-gpu=2 --mem-per-gpu=1000", "--gpus-per-node=v100:1", "--gpus-per-task=1 -n1 -c2"]
)
def test_script_sees_the_variables_of_a_whole_card(shared: Testbed, options: str) -> None:
    """The jobs differ in nothing but the GPU's number and in what SLURM_STEP_GRES says to srun."""
    script = (
        "env | grep -E '^SLURM_.*(GPU|PER_|TRES|CPUS)' | grep -v '^SLURM_JOB_GPUS=' | sort > ~/variables.$SLURM_JOB_ID"
    )
    whole = sbatch(shared, *options.split(), script=script, token=None)
    wait_for(shared, whole.job_id, ["COMPLETED"])
    job = sbatch(shared, *options.split(), script=script)
    place(shared, job.job_id, index=1, node="gpu0")
    wait_for(shared, job.job_id, ["COMPLETED"])
    seen, wanted = ((home_of(shared) / f"variables.{j.job_id}").read_text() for j in (job, whole))
    if version(shared.release) >= (25, 5):  # it takes the variable from the request as the hook has left it
        wanted = wanted.replace("SLURM_TRES_PER_TASK=cpu=2,gres/gpu=1", "SLURM_TRES_PER_TASK=cpu=2")
    assert seen == wanted
    assert "GPU" in seen


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
    assert shown["AdminComment"] == f"GS1:probe;t={token}"
    unknown = sbatch(shared, "--gpus=1", token="other-telling-name,max=10")
    assert show(shared, unknown.job_id)["Comment"] == "gpushare:?,max=10"
    assert "no token is called" in unknown.said
    assert "telling-name" not in (shared.layout.log / "slurmctld.log").read_text(errors="replace")
    assert "telling-name" not in shared.run(["sacct", "-a", "-n", "-P", "-o", "JobID,Comment,AdminComment"]).stdout
    assert sbatch(shared, "--gpus=1", token=KNOWN).tag(shared) is not None
