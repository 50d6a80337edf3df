"""Nobody else notices: every way to ask for GPUs gives what it gives on plain Slurm, also without files of ours."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from gpushare_lab import step_forms
from gpushare_lab.forms import Form, GpusSeen, TrialJobs, forms
from gpushare_lab.testbed.configuration import PARTITION, UNMANAGED_PARTITION, version
from gpushare_lab.testbed.layout import GPU_MODEL, Shape
from gpushare_lab.testbed.testbed import Testbed
from hook_testbed import USER, home_of, write_hook_file

from slurm_gpushare.protocol.errors import GpushareError


def brief(testbed: Testbed) -> list[Form]:
    found = forms(GPU_MODEL, testbed.shape.gpus, PARTITION, UNMANAGED_PARTITION, version(testbed.release))
    return [form for form in found if form.brief]


def try_on(testbed: Testbed, wanted: Sequence[Form]) -> list[GpusSeen]:
    """As an ordinary user."""

    def run(argv: Sequence[str], timeout_s: float) -> CompletedProcess[str]:
        try:
            return testbed.run(list(argv), user=USER, check=False, timeout_s=timeout_s)
        except GpushareError:
            return CompletedProcess(argv, 124, "", "")

    return TrialJobs(run, home_of(testbed)).try_forms(wanted)


def differences(seen: Sequence[GpusSeen]) -> list[str]:
    return [f"{one.form}: {one.outcome} ({one.said})" for one in seen if not one.as_expected]


@pytest.fixture(scope="module")
def plain(slurm_suite: str | None, short_tmp: Path, testbed_session: Testbed) -> Iterator[Testbed]:
    """Slurm without us."""
    bed = Testbed(short_tmp / "plain").up(Shape(nodes=2, gpus=2), accounting=False, suite=slurm_suite, plain=True)
    yield bed
    bed.down(purge=True)


def test_plain_slurm_gives_what_we_say_it_gives(plain: Testbed) -> None:
    assert differences(try_on(plain, brief(plain))) == []


def test_with_us_nobody_else_notices(testbed: Testbed) -> None:
    write_hook_file(testbed)
    assert differences(try_on(testbed, brief(testbed))) == []


def test_steps_of_a_job_without_a_token_run_and_see_what_they_would_without_us(
    plain: Testbed, testbed: Testbed
) -> None:
    write_hook_file(testbed)
    _, found = step_forms.compared((plain, testbed), USER, step_forms.BRIEF_JOBS, shared=False)
    old = version(testbed.release) < (23, 11)
    assert (step_forms.unexpected(found, old=True) if old else found) == {}


def test_steps_of_a_job_that_shares_run_and_see_what_they_would_on_a_whole_card(
    plain: Testbed, testbed: Testbed
) -> None:
    _, found = step_forms.compared((plain, testbed), USER, step_forms.BRIEF_JOBS, shared=True)
    old = version(testbed.release) < (23, 11)
    assert step_forms.unexpected(found, old=old) == {}
    assert ("--gpus=1", "-n1 --cpus-per-gpu=1") in found, "what cannot be mended is seen"


def test_without_gpushare_conf_nobody_notices_either(testbed: Testbed) -> None:
    testbed.layout.gpushare_conf.unlink()
    testbed.wait_for_hook()
    assert differences(try_on(testbed, brief(testbed))) == []


def test_nor_without_any_other_file_of_ours(testbed: Testbed) -> None:
    """job_submit.lua is taken from under a slurmctld that runs; cli_filter.lua alone must stay."""
    etc = testbed.layout.etc
    for path in (etc / "job_submit.lua", testbed.layout.gpushare_conf):
        path.unlink()
    for name in ("prolog.sh", "epilog.sh", "task_prolog.sh"):
        (etc / name).write_text("#!/bin/sh\n/nowhere/gpushare\nexit 0\n")
    testbed.wait_for_hook()
    assert differences(try_on(testbed, brief(testbed))) == []


def test_the_command_says_what_a_user_sees(testbed: Testbed) -> None:
    write_hook_file(testbed)
    command = [sys.executable, "-m", "gpushare_lab", "forms", "--brief", "--json"]
    done = testbed.run(command, user=USER, cwd=home_of(testbed), timeout_s=300)
    found = {finding["check"]: finding for finding in json.loads(done.stdout)}
    assert {finding["level"] for finding in found.values()} == {"pass"}
    assert found["sbatch --gpus=v100:1"]["found"] == "sees 1 GPU"
    assert list(home_of(testbed).iterdir()) == []
