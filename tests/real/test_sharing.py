"""Two jobs on one typed shard share that GPU, and nothing else does."""

from __future__ import annotations

from gpushare_lab.experiment.submitting import show, submit, wait_for
from gpushare_lab.testbed.testbed import Testbed

TELL = 'echo "$SLURMD_NODENAME $CUDA_VISIBLE_DEVICES"; until [ -e go ]; do sleep 0.05; done'


def test_two_jobs_on_one_typed_shard_see_the_same_gpu(testbed: Testbed) -> None:
    work = testbed.layout.home / "pair"
    work.mkdir(exist_ok=True)
    (work / "go").unlink(missing_ok=True)
    jobs = [
        submit(testbed, TELL, "--gres=shard:v100_1:1", "--nodelist=gpu0", f"--output={work}/{name}", cwd=work)
        for name in ("a", "b")
    ]
    wait_for(testbed, jobs, ["RUNNING"])
    (work / "go").touch()
    wait_for(testbed, jobs, ["COMPLETED"])
    assert (work / "a").read_text() == (work / "b").read_text() == "gpu0 1\n"


def test_jobs_of_an_ordinary_user_run(testbed: Testbed) -> None:
    job = submit(testbed, "id -un", "--gres=gpu:1", "--output=out", user="games", cwd=testbed.layout.home / "games")
    wait_for(testbed, job, ["COMPLETED"])
    assert (testbed.layout.home / "games" / "out").read_text() == "games\n"
    assert show(testbed, job)["UserId"].startswith("games(")
