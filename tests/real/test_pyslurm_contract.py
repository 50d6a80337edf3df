"""Both backends on the same real queue, where pyslurm can be loaded."""

from __future__ import annotations

import pytest
from gpushare_lab.experiment.submitting import submit, wait_for
from gpushare_lab.testbed.testbed import Testbed

from slurm_gpushare.slurm.commands import Slurm, connect
from slurm_gpushare.slurm.pyslurm_backend import why_not


def test_both_backends_say_the_same_of_one_queue(testbed: Testbed, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in testbed.env.items():
        monkeypatch.setenv(name, value)
    commands = Slurm()
    if reason := why_not(commands.release, commands.config):
        pytest.skip(f"pyslurm cannot be used: {reason}")
    submit(testbed, "sleep 600", "--array=0-20:4", "--hold")
    running = [submit(testbed, "sleep 600", option) for option in ("--gres=gpu:1", "--gpus=1", "--comment=caf\xe9")]
    wait_for(testbed, running, ["RUNNING"])  # nothing changes any more between the two looks
    both = connect("pyslurm")
    found = {job.key: job for job in both.jobs()}
    expected = {job.key: job for job in commands.jobs()}
    assert found == expected
