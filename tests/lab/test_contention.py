"""How emulated jobs slow each other: by the model, and by a measured table."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from gpushare_lab.emulator.card import Demand
from gpushare_lab.job.contention import rate
from gpushare_lab.job.demands import infer_demand, read_demand
from gpushare_lab.job.pair_rates import read_pairs
from gpushare_lab.job.workload import rate_function
from hypothesis import given
from hypothesis import strategies as st

from slurm_gpushare.protocol.errors import BadInput

ROOT = Path(__file__).resolve().parents[2]
LIGHT, HEAVY, IDLE = Demand(25, 10, 1000), Demand(95, 50, 8000), Demand(0, 0, 500)
HEADER = "profile_a,profile_b,gpu_model,feasible,rate_a,rate_b\n"

percent = st.floats(1, 100)
demands = st.builds(lambda gpu, share: Demand(gpu, gpu * share, 1000), percent, st.floats(0, 1))


@given(demands, demands)
def test_a_rate_is_a_fraction(victim: Demand, neighbour: Demand) -> None:
    assert 0.17 < rate(victim, [neighbour]) <= 1.0


@given(demands, demands, st.floats(1, 40))
def test_a_busier_neighbour_never_slows_less(victim: Demand, neighbour: Demand, more: float) -> None:
    busier = Demand(min(100, neighbour.gpu_util_pct + more), neighbour.mem_access_pct, 1000)
    assert rate(victim, [busier]) <= rate(victim, [neighbour])


@given(demands, demands, demands)
def test_each_further_neighbour_slows(victim: Demand, first: Demand, second: Demand) -> None:
    assert rate(victim, [first, second]) < rate(victim, [first]) <= 1.0


def test_alone_or_beside_an_idle_job_the_speed_is_full() -> None:
    assert rate(HEAVY, []) == rate(HEAVY, [IDLE]) == rate(IDLE, [HEAVY]) == 1.0


def test_contention_is_directional_the_light_job_suffers_more() -> None:
    assert rate(LIGHT, [HEAVY]) < 0.6 < 0.9 < rate(HEAVY, [LIGHT])


def test_a_memory_bound_victim_suffers_more() -> None:
    assert rate(Demand(60, 55, 1000), [HEAVY]) < rate(Demand(60, 10, 1000), [HEAVY])


@pytest.mark.data
def test_the_model_spreads_as_the_measured_pairs_do(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    from bench.bench_contention import model_rates, population, summary

    measured = summary(read_pairs(data_dir / "v100_pairs.csv", "V100").rates)
    model = summary(model_rates(population(data_dir / "paper_workloads.csv")))
    assert measured["pairs"] == 328
    for quantile, tolerance in ((5, 3), (50, 5), (95, 30)):
        assert model["isd_pct"][quantile] == pytest.approx(measured["isd_pct"][quantile], abs=tolerance)
    for quantile in (5, 50, 95):
        assert model["ps_pct"][quantile] == pytest.approx(measured["ps_pct"][quantile], abs=3)
    assert model["explained_by_neighbour_pct"] == pytest.approx(73, abs=5)
    assert model["explained_by_victim_pct"] == pytest.approx(17, abs=5)


def table_file(tmp_path: Path, rows: str, header: str = HEADER) -> Path:
    path = tmp_path / "pairs.csv"
    path.write_text(header + rows)
    return path


def test_a_measured_pair_outranks_the_model_in_each_direction(tmp_path: Path) -> None:
    table = read_pairs(table_file(tmp_path, "a,b,V100,1,0.4,0.9\n"), "Tesla V100-SXM2-16GB")
    a, b = Demand(25, 10, 1000, profile="a"), Demand(95, 50, 8000, profile="b")
    assert rate_function(a, table)([b]) == 0.4
    assert rate_function(b, table)([a]) == 0.9
    assert rate_function(a, table)([LIGHT]) == rate(a, [LIGHT])
    assert rate_function(a, table)([b, LIGHT]) == pytest.approx(0.4 * rate(a, [LIGHT]))


def test_two_runs_of_one_job_slow_each_other_alike(tmp_path: Path) -> None:
    table = read_pairs(table_file(tmp_path, "a,a,V100,1,0.5,0.6\n"), "V100")
    assert table.rates["a", "a"] == pytest.approx(0.55)


def test_pairs_of_another_gpu_do_not_count(tmp_path: Path) -> None:
    path = table_file(tmp_path, "a,b,V100,1,0.4,0.9\na,b,K80,1,0.1,0.2\n")
    assert read_pairs(path, "Tesla V100-SXM2-16GB").rates["a", "b"] == 0.4
    assert read_pairs(path, "Tesla K80").rates["a", "b"] == 0.1


@pytest.mark.parametrize(
    ("rows", "header", "says"),
    [
        ("a,b,V100,1,fast,0.9\n", HEADER, r"pairs.csv:2: rate_a is 'fast', not a number"),
        ("a,b,V100,1,0.9,\n", HEADER, r"pairs.csv:2: rate_b '' is not a rate"),
        ("a,b,V100,1,-0.5,1\n", HEADER, r"pairs.csv:2: rate_a '-0.5' is not a rate"),
        ("", "profile_a,profile_b\n", r"no column gpu_model"),
    ],
)
def test_a_bad_pairs_file_is_named_with_its_line(tmp_path: Path, rows: str, header: str, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        read_pairs(table_file(tmp_path, rows, header), "V100")


def test_a_profile_known_by_its_pairs_only_gets_a_demand_that_explains_them(tmp_path: Path) -> None:
    rows = "gentle,gentle,V100,1,0.9,0.9\ngentle,brute,V100,1,0.3,0.95\nbrute,brute,V100,0,,\n"
    table = read_pairs(table_file(tmp_path, rows), "V100")
    gentle, brute = (infer_demand(table, name, 16160) for name in ("gentle", "brute"))
    assert gentle.gpu_util_pct < 40 < 80 < brute.gpu_util_pct
    assert rate(gentle, [brute]) < 0.5 < 0.85 < rate(brute, [gentle])
    assert gentle.mem_mib + brute.mem_mib <= 16160 < 2 * brute.mem_mib


@pytest.mark.data
def test_measured_pairs_that_ran_together_fit_by_their_inferred_memory(data_dir: Path) -> None:
    table = read_pairs(data_dir / "v100_pairs.csv", "V100")
    memory = {name: infer_demand(table, name, 16160).mem_mib for name in table.profiles}
    assert all(memory[a] + memory[b] <= 16160 for a, b in table.rates)
    wrong = [(a, b) for a, b in table.infeasible if a <= b and memory[a] + memory[b] <= 16160]
    assert len(wrong) <= 1  # of 23; one contradicts the others


def test_telemetry_of_a_profile_is_its_demand_maxima_first(tmp_path: Path) -> None:
    path = tmp_path / "profiles.csv"
    path.write_text(
        "profile,gpu_model,gpu_util_mean_pct,mgup,mem_access_mean_pct,mem_used_mib\np,V100,50,61.5,20,3000\nq,V100,,,,\n"
    )
    assert read_demand(path, "p") == Demand(61.5, 20, 3000, profile="p")
    with pytest.raises(BadInput, match="no profile 'z'"):
        read_demand(path, "z")
    with pytest.raises(BadInput, match="'q' has no number in mgup or gpu_util_mean_pct"):
        read_demand(path, "q")


def test_a_job_needs_none_of_the_scientific_stack() -> None:
    heavy = {"numpy", "click", "sqlalchemy"}
    code = f"import sys, gpushare_lab.job.workload; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
