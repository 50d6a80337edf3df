"""The scenarios in the simulator: the helper's own judgement and decisions, on the true rates of the emulated jobs."""

from __future__ import annotations

import pytest
from gpushare_lab.experiment.scenario_simulation import simulate
from gpushare_lab.experiment.scenarios import SCENARIOS, SHORT, Scenario, begun


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_no_promise_of_an_honest_job_is_broken_by_more_than_a_tenth(scenario: Scenario) -> None:
    result = simulate(scenario)
    assert result.kept, (result.verdict, result.actions, result.resident, result.guest)


def test_a_job_that_did_not_come_to_its_end_had_its_promise_broken() -> None:
    result = begun(SCENARIOS[0])
    result.resident.state, result.guest.state = "COMPLETED", "TIMEOUT"
    result.resident.measured_pct = 10.0
    assert not result.kept
    assert result.verdict == "BROKEN: guest"


def test_the_short_form_names_scenarios() -> None:
    assert set(SHORT) <= {scenario.name for scenario in SCENARIOS}
