"""A compute or login node: the wheel without extras, in an environment that has nothing else."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpushare_lab.experiment.submitting import wait_for
from gpushare_lab.testbed.testbed import Testbed
from telemetry_bed import final_records, output, start, workload
from test_wheel import build_wheel

pytestmark = pytest.mark.usefixtures("raw_shards")
TOKEN = "gs-abcdefghijklmnop2345"


@pytest.fixture(scope="module")
def node_python(short_tmp: Path, slurm_suite: str | None) -> Path:
    """The interpreter of an environment into which pip installed the wheel, with what it asks for by itself."""
    if slurm_suite is not None:
        pytest.skip("the environment's interpreter is this machine's, which another Debian does not have")
    top = short_tmp / "node"
    subprocess.run([sys.executable, "-m", "venv", top / "env"], check=True)
    python = top / "env" / "bin" / "python"
    pip = [python, "-m", "pip", "--disable-pip-version-check", "-qq", "install"]
    subprocess.run([*pip, build_wheel(top)], check=True)
    return python


@pytest.fixture
def measured_by_node_python(testbed: Testbed, node_python: Path) -> Iterator[Path]:
    """The prolog starts its sampler with that interpreter, and finds the package nowhere else."""
    prolog = testbed.layout.etc / "prolog.sh"
    pristine = prolog.read_text()
    here = f"unset PYTHONPATH\nexport GPUSHARE_PYTHON={shlex.quote(str(node_python))}\nexec "
    prolog.write_text(pristine.replace("exec ", here))
    yield node_python
    prolog.write_text(pristine)


def test_a_node_gets_three_libraries_and_no_more(node_python: Path) -> None:
    listed = subprocess.run([node_python, "-m", "pip", "list", "--format=freeze"], check=True, capture_output=True)
    names = {line.split("==")[0].lower() for line in listed.stdout.decode().splitlines()}
    assert names - {"pip", "setuptools"} == {"click", "nvidia-ml-py", "psutil", "slurm-gpushare"}


def test_prolog_sampler_token_and_profile_work_there(testbed: Testbed, measured_by_node_python: Path) -> None:
    gpushare = f"env -u PYTHONPATH {measured_by_node_python} -m slurm_gpushare"
    script = f"{gpushare} token mine && {gpushare} profile --token {TOKEN} -- {workload(40, 20, 3000, work_s=3)}"
    job = start(testbed, script)
    wait_for(testbed, job, ["COMPLETED"], timeout_s=180)  # it starts Python four times, without compiled files
    assert final_records(testbed, count=2), "the sampler's record and the command's"
    assert output(testbed, job).startswith("gs2-")


def test_job_jobs_and_status_answer_from_slurm_alone(testbed: Testbed, node_python: Path) -> None:
    job = start(testbed, "sleep 600")
    wait_for(testbed, job, ["RUNNING"])
    command = ["env", "-u", "PYTHONPATH", str(node_python), "-m", "slurm_gpushare"]
    for arguments in (["job", str(job)], ["jobs"], ["status"]):
        done = testbed.run([*command, *arguments], user="games", cwd=testbed.layout.home / "games")
        assert done.returncode == 0, done.stderr
    assert "gpu0" in done.stdout


def test_what_needs_more_says_which_extra(testbed: Testbed, node_python: Path) -> None:
    command = ["env", "-u", "PYTHONPATH", str(node_python), "-m", "slurm_gpushare", "assess"]
    done = testbed.run(command, check=False)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "slurm-gpushare[controller]" in done.stderr
