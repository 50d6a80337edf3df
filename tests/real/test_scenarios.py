"""The short form of ``gpushare-lab scenarios``: promises on a real Slurm, when one lies and when a limit is near."""

from __future__ import annotations

import pytest
from gpushare_lab.experiment.scenario_run import ScenarioRun
from gpushare_lab.experiment.scenarios import SCENARIOS, SHORT
from gpushare_lab.experiment.submitting import submit, wait_for
from gpushare_lab.testbed.configuration import version
from gpushare_lab.testbed.testbed import Testbed


@pytest.mark.alone
def test_promises_of_honest_jobs_are_kept_whatever_is_reloaded(testbed: Testbed) -> None:
    if version(testbed.release) >= (23, 11):  # a guest would get an idle card there: one card a node for the scenes
        for node in testbed.state.shape.node_names:
            job = submit(
                testbed, "exec sleep 600", "--gres=gpu:v100_1:1", f"--nodelist={node}", "--mem=1", "--output=/dev/null"
            )
            wait_for(testbed, job, ["RUNNING"])
    told: list[str] = []
    results = ScenarioRun(testbed, told.append, reloads=True).run([item for item in SCENARIOS if item.name in SHORT])
    assert all(result.kept for result in results), [(result.verdict, result.actions) for result in results]
    (liar,) = [result for result in results if result.scenario.name == "liar in utilisation"]
    assert "paused" in liar.actions
