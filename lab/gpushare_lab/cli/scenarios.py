"""``gpushare-lab scenarios``: what a promise is worth when a job lies, grows, runs away, or the helper dies."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from gpushare_lab.cli.testbed import SLURM, Steps, stop_on_sigterm, throw_away_dir
from gpushare_lab.experiment.scenarios import SCENARIOS, SHORT, ScenarioOutcome, ScenarioResult
from slurm_gpushare.cli.console import JSON, echo_json, table
from slurm_gpushare.protocol.errors import BadInput, Exit


@click.command()
@click.option("--only", metavar="NAME[,NAME...]", help="Only these scenarios.")
@click.option("--short", is_flag=True, help=f"Only: {', '.join(SHORT)}.")
@click.option("--simulate", "simulated", is_flag=True, help="No Slurm: the same pairs and rules in the simulator.")
@SLURM
@JSON
@throw_away_dir("/var/lib/gpushare-scenarios")
def scenarios(
    only: str | None, short: bool, simulated: bool, suite: str | None, as_json: bool, directory: Path
) -> None:
    """Put promises to the test on a real Slurm with emulated GPUs.

    Ten scenarios, each with a resident and a guest on a card of its own: what was promised, what was measured, what
    the helper did, and whether the promise was kept. Exit code 3 if a promise of an honest job was broken by more
    than a tenth.
    """
    names = SHORT if short else tuple(only.split(",")) if only else tuple(item.name for item in SCENARIOS)
    chosen = [item for item in SCENARIOS if item.name in names]
    if len(chosen) < len(names):
        raise BadInput(f"--only {only}: no such scenario", f"There are: {', '.join(item.name for item in SCENARIOS)}.")
    release = "simulated"
    if simulated:
        from gpushare_lab.experiment.scenario_simulation import simulate

        results = [simulate(item) for item in chosen]
    else:
        release, results = _on_a_testbed(chosen, suite, directory)
    if as_json:
        echo_json({"slurm": release, "scenarios": [_json(result) for result in results]})
    else:
        click.echo(f"Slurm {release}" if not simulated else "simulated")
        click.echo(_table(results))
    if not all(result.kept for result in results):
        sys.exit(Exit.PROBLEMS)


def _on_a_testbed(chosen: list[Any], suite: str | None, directory: Path) -> tuple[str, list[ScenarioResult]]:
    from gpushare_lab.experiment.scenario_run import ScenarioRun
    from gpushare_lab.testbed.layout import Shape
    from gpushare_lab.testbed.testbed import Testbed

    steps = Steps()
    stop_on_sigterm()
    testbed = Testbed(directory, steps).up(Shape(nodes=len(chosen), gpus=1), suite=suite)
    try:
        return testbed.release, ScenarioRun(testbed, steps).run(chosen)
    finally:
        testbed.down(purge=True)


def _sides(result: ScenarioResult) -> tuple[ScenarioOutcome, ScenarioOutcome]:
    return result.resident, result.guest


def _table(results: list[ScenarioResult]) -> str:
    columns = [
        "SCENARIO", "PROMISED>", "MEASURED>", "ACTION",
        "VERDICT",
    ]  # fmt: skip
    rows = [
        (
            result.scenario.name,
            " / ".join(f"{side.promised_pct:.0f} %" if side.honest else "---" for side in _sides(result)),
            " / ".join("---" if side.measured_pct is None else f"{side.measured_pct:.0f} %" for side in _sides(result)),
            ", ".join(result.actions) or "none needed",
            result.verdict,
        )
        for result in results
    ]
    return table(columns, rows)


_OF_A_SIDE = ("promised_pct", "measured_pct", "honest", "state", "kept")


def _json(result: ScenarioResult) -> dict[str, Any]:
    return {
        "scenario": result.scenario.name,
        "actions": result.actions,
        "kept": result.kept,
        "verdict": result.verdict,
        **{side.role: {name: getattr(side, name) for name in _OF_A_SIDE} for side in _sides(result)},
    }
