"""Rates of one mechanism scaled to the other, where nobody has measured them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from gpushare_lab.cli.simulate import simulate

from slurm_gpushare.whatif.traces import MeasuredPairs


def under(mechanism: str, *rates: float) -> list[float]:
    rate = np.array([[1.0, *rates]])
    return [round(value, 3) for value in MeasuredPairs(("a",), rate).under(mechanism).rate[0, 1:].tolist()]


def test_the_pair_that_was_measured_both_ways_comes_out_as_it_did() -> None:
    """1.76 of both speeds under MPS, 1.42 in slices."""
    assert sum(under("slices", 0.88, 0.88)) == pytest.approx(1.42, abs=0.01)
    assert sum(under("mps", 0.71, 0.71)) == pytest.approx(1.76, abs=0.01)


def test_nobody_comes_out_slower_than_by_turns_unless_it_was() -> None:
    assert under("slices", 0.95, 0.7, 0.4) == [pytest.approx(0.879), 0.5, 0.4]
    assert under("as-measured", 0.7, 0.4) == [0.7, 0.4]
    assert np.isnan(under("slices", float("nan"))).all()


def test_a_simulation_says_which_mechanism_its_rates_are_of_and_what_it_costs_in_energy(tmp_path: Path) -> None:
    trace, pairs, out = tmp_path / "trace.csv", tmp_path / "pairs.csv", tmp_path / "out.json"
    trace.write_text("submit_s,duration_s,num_gpus\n" + "".join(f"{n},100,1\n" for n in range(20)))
    pairs.write_text("profile_a,profile_b,gpu_model,feasible,rate_a,rate_b\na,a,V100,1,0.9,0.9\n")
    found = {}
    for mechanism in ("as-measured", "slices"):
        argv = ["--trace", str(trace), "--pairs", str(pairs), "--gpus", "2", "--policy", "fifo,gpushare"]
        done = CliRunner().invoke(
            simulate, [*argv, "--mechanism", mechanism, "--json", str(out)], catch_exceptions=False
        )
        assert done.exit_code == 0, done.output
        document = json.loads(out.read_text())
        found[mechanism] = {row["policy"]: row for row in document["policies"]}
        assert {"as-measured": "not known", "slices": "scaled to slices"}[mechanism] in document["meta"]["mechanism"]
    measured, slices = found["as-measured"], found["slices"]
    assert measured["gpushare"]["avg_jct_s"] < slices["gpushare"]["avg_jct_s"]
    assert measured["gpushare"]["energy_kwh"] < measured["fifo"]["energy_kwh"]
