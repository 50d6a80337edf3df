"""The knowledge base: cells, files, and the two commands that outsiders try it with."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from slurm_gpushare.cli.kb import kb
from slurm_gpushare.knowledge.cells import (
    Cell,
    balanced_partners,
    believed_cells,
    isd_matrix,
    make_cells,
    packing_saving_pct,
    ps_matrix,
    tercile_clusters,
)
from slurm_gpushare.knowledge.interference import Coefficients, Spread, Telemetry
from slurm_gpushare.knowledge.kb import KnowledgeBase, default_kb, default_model
from slurm_gpushare.knowledge.learning import LearnedKnowledge
from slurm_gpushare.knowledge.tables import PairTable, ProfileTable
from slurm_gpushare.protocol.errors import BadInput

HEAD = "profile,gpu_model,gpu_util_mean_pct,mem_access_mean_pct,mem_used_mib,mem_total_mib\n"
ROWS = "a,X,10,5,4000,16000\nb,X,50,20,9000,16000\nc,X,95,60,8000,16000\nd,X,30,15,2000,16000\n"
PAIRS = "profile_a,profile_b,gpu_model,rate_a,rate_b\n"
RATES = "a,b,X,0.97,0.98\na,c,X,0.9,0.97\nb,c,X,0.6,0.75\nd,c,X,0.7,0.85\nc,c,X,0.5,0.5\nb,d,X,0.9,0.92\n"


@pytest.fixture
def fitted(tmp_path: Path) -> Path:
    (tmp_path / "p.csv").write_text(HEAD + ROWS)
    (tmp_path / "q.csv").write_text(PAIRS + RATES)
    run("fit", "--profiles", tmp_path / "p.csv", "--pairs", tmp_path / "q.csv", "--out", tmp_path / "kb.json")
    return tmp_path / "kb.json"


def run(*words: object) -> str:
    result = CliRunner().invoke(kb, [str(word) for word in words], catch_exceptions=False, standalone_mode=False)
    return result.output


def predict(fitted: Path, *more: object) -> dict[tuple[str, str], dict[str, str]]:
    out = fitted.parent / "pred.csv"
    run("predict", "--kb", fitted, "--profiles", fitted.parent / "p.csv", "--out", out, *more)
    with out.open() as stream:
        return {(row["profile_a"], row["profile_b"]): row for row in csv.DictReader(stream)}


def test_every_unordered_pair_is_predicted_with_itself_included(fitted: Path) -> None:
    rows = predict(fitted)
    assert len(rows) == 10
    assert ("c", "c") in rows
    for row in rows.values():
        assert 0 < float(row["low_a"]) <= float(row["rate_a"]) <= 1


def test_what_was_measured_comes_back(fitted: Path) -> None:
    rows = predict(fitted)
    assert float(rows["b", "c"]["rate_a"]) == pytest.approx(0.6, abs=0.03)
    assert float(rows["b", "c"]["rate_b"]) == pytest.approx(0.75, abs=0.03)


def test_memory_that_cannot_fit_is_never_feasible_but_has_rates(fitted: Path) -> None:
    rows = predict(fitted)
    assert rows["b", "c"]["feasible"] == "0"
    assert rows["a", "b"]["feasible"] == "1"
    assert rows["c", "c"]["feasible"] == "1"
    assert float(rows["b", "c"]["rate_a"]) > 0


def test_observations_move_predictions(fitted: Path) -> None:
    (fitted.parent / "p.csv").write_text(HEAD + ROWS.replace("10,5", "11,5").replace("95,60", "94,60"))
    before = predict(fitted)
    (fitted.parent / "o.csv").write_text(PAIRS + "a,c,X,0.5,0.97\na,c,X,0.52,0.96\na,d,X,,\n")
    after = predict(fitted, "--observed", fitted.parent / "o.csv")
    assert float(before["a", "c"]["rate_a"]) > 0.75
    assert float(after["a", "c"]["rate_a"]) < 0.6
    a_beside_b, b_beside_a = (
        float(after["a", "b"][way]) - float(before["a", "b"][way]) for way in ("rate_a", "rate_b")
    )
    assert a_beside_b < -0.02, "a is sensitive"
    assert b_beside_a > 0.005, "and presses less than believed, which c has shown"
    assert float(after["c", "d"]["rate_b"]) < float(before["c", "d"]["rate_b"]) - 0.02, "c presses hard"
    assert after["a", "d"]["feasible"] == "0"


def test_a_name_with_other_numbers_is_another_job(fitted: Path) -> None:
    base = KnowledgeBase.load(fitted)
    (fitted.parent / "p.csv").write_text(HEAD + ROWS.replace("50,20", "8,2"))
    assert float(predict(fitted)["b", "c"]["rate_a"]) > 0.8
    assert base.members[1].name == "b"


def test_knowledge_survives_its_file(fitted: Path) -> None:
    base = KnowledgeBase.load(fitted)
    again = KnowledgeBase.from_json(json.loads(json.dumps(base.to_json())))
    assert again.to_json() == base.to_json()


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "not JSON"), ("[]", "not a knowledge base"), ("{}", "not a knowledge base"), ('{"format": 99}', "format 99")],
)
def test_other_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "kb.json").write_text(text)
    with pytest.raises(BadInput, match=message):
        KnowledgeBase.load(tmp_path / "kb.json")


@pytest.mark.parametrize(
    ("profiles", "pairs", "message"),
    [
        (HEAD + ROWS, PAIRS + "a,z,X,0.5,0.5\n", "unknown profile 'z'"),
        (HEAD + ROWS, PAIRS + "a,b,Y,0.5,0.5\n", "profiles of X, pairs of Y"),
        (HEAD + ROWS, PAIRS + "a,b,X,,\n", "no pair was feasible"),
        (HEAD + "a,X,120,5,1,2\n", PAIRS + RATES, "gpu_util_mean_pct is 120"),
        (HEAD + ROWS + "a,X,10,5,1,2\n", PAIRS + RATES, "'a' again"),
    ],
)
def test_bad_input_writes_nothing(tmp_path: Path, profiles: str, pairs: str, message: str) -> None:
    (tmp_path / "p.csv").write_text(profiles)
    (tmp_path / "q.csv").write_text(pairs)
    with pytest.raises(BadInput, match=message):
        run("fit", "--profiles", tmp_path / "p.csv", "--pairs", tmp_path / "q.csv", "--out", tmp_path / "kb.json")
    assert not (tmp_path / "kb.json").exists()


def test_knowledge_of_another_gpu_model_is_not_used(fitted: Path) -> None:
    (fitted.parent / "p.csv").write_text((HEAD + ROWS).replace(",X,", ",Y,"))
    with pytest.raises(BadInput, match="profiles of Y, knowledge of X"):
        predict(fitted)


def test_one_profile_and_constant_columns_are_no_trouble(tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text(HEAD + "a,X,50,20,100,16000\nb,X,50,20,100,16000\n")
    (tmp_path / "q.csv").write_text(PAIRS + "a,b,X,0.8,0.8\n")
    run("fit", "--profiles", tmp_path / "p.csv", "--pairs", tmp_path / "q.csv", "--out", tmp_path / "kb.json")
    (tmp_path / "p.csv").write_text(HEAD + "n,X,50,20,100,16000\n")
    assert list(predict(tmp_path / "kb.json")) == [("n", "n")]


def test_cells_by_hand() -> None:
    victim, neighbour = np.array([0, 0, 1]), np.array([1, 1, 0])
    cells = make_cells(2, victim, neighbour, np.array([0.6, 0.8, 0.1]))
    cell = next(cell for cell in cells if (cell.victim, cell.neighbour) == (0, 1))
    assert cell.pairs == 2
    assert cell.mean == pytest.approx((1.4 + 2 * 0.5) / 4), "shrunk towards 0.5 by two pairs' worth"
    assert np.isnan(isd_matrix(cells, 2)[0, 0])
    assert isd_matrix(cells, 2)[0, 1] == pytest.approx((np.exp(0.6) - 1) * 100)
    assert ps_matrix(cells, 2)[0, 1] == ps_matrix(cells, 2)[1, 0]


def test_packing_saving_by_hand() -> None:
    assert packing_saving_pct(np.array(1.0), np.array(1.0)) == pytest.approx(50)
    assert packing_saving_pct(np.array(0.5), np.array(0.5)) == pytest.approx(0)
    # b runs at full speed and is done at 1; by then a has done half and needs another half alone
    assert packing_saving_pct(np.array(0.5), np.array(1.0)) == pytest.approx(25)


def test_terciles_are_light_middle_heavy() -> None:
    assert tercile_clusters(np.array([0.9, 0.1, 0.5, 0.2, 0.8, 0.4])).tolist() == [2, 0, 1, 0, 2, 1]


def test_shipped_knowledge_says_where_it_comes_from() -> None:
    base = default_kb()
    assert base.gpu_model == "V100"
    assert "328 feasible pairs" in base.source
    assert "terciles" in base.clusters_from
    assert sum(cell.pairs for cell in base.cells) == 656
    isd = isd_matrix(base.cells, 3)
    assert np.all(np.diff(isd, axis=1) > 0), "a heavier neighbour slows more"
    assert default_model().k == 3
    assert "ISD % of each cluster" in run("show", "--shipped")


@pytest.mark.slow
def test_shipped_files_are_what_the_commands_make(data_dir: Path, tmp_path: Path) -> None:
    run("fit", "--pairs", data_dir / "v100_pairs.csv", "--out", tmp_path / "kb.json")
    made, shipped = KnowledgeBase.load(tmp_path / "kb.json"), default_kb()
    assert made.cells == shipped.cells
    assert made.interference.coefficients.mean == pytest.approx(shipped.interference.coefficients.mean, abs=1e-6)


def test_the_shipped_prior_tells_jobs_apart_by_telemetry() -> None:
    """Its exponents are an argument, not a fit: where the V100 pairs are silent it must still say who presses."""
    base, model = default_kb(), default_model()
    centres = {name: model.centroids[:, at] for at, name in enumerate(model.features)}
    profiles = ProfileTable(("light", "middle", "heavy"), ("",) * 3, "V100", centres)
    rates = base.predict(profiles).mean
    assert np.all(np.diff(rates, axis=1) < 0), "a heavier neighbour slows more"
    assert rates[0, 0] > 0.9
    assert 0.4 < rates[2, 2] < 0.75, "two that fill the card halve each other"
    exponents = base.interference.coefficients.mean[1:5]
    assert exponents == pytest.approx(Coefficients.prior().mean[1:5], abs=0.05)
    assert np.ptp(base.predict(ProfileTable(("x", "y"), ("",) * 2, "V100", {})).mean) < 1e-9, "nothing known: all alike"


def test_observations_outweigh_the_shipped_prior() -> None:
    base, model = default_kb(), default_model()
    centres = {name: model.centroids[:, at] for at, name in enumerate(model.features)}
    profiles = ProfileTable(("a", "b", "c"), ("",) * 3, "V100", centres)
    seen = PairTable(("c",), ("c",), "V100", np.array([True]), np.array([0.97]), np.array([0.97]))
    assert base.predict(profiles).mean[2, 2] < 0.75
    assert base.predict(profiles, seen).mean[2, 2] > 0.9


def test_cells_are_what_is_known_of_the_tokens_in_them() -> None:
    knowledge = LearnedKnowledge(default_kb().interference)
    busy = np.array([0.1, 0.15, 0.9, 0.95])
    knowledge.profiled(["a", "b", "c", "d"], Telemetry(busy, busy / 2, np.full(4, 0.3)))
    clusters = {"a": 0, "b": 0, "c": 1, "d": 1}
    before = {(c.victim, c.neighbour): c for c in believed_cells(3, clusters, knowledge)}
    assert before[0, 1].rate < before[0, 0].rate
    assert before[0, 0].pairs == 0
    assert np.isnan(before[2, 0].mean), "nobody is in it"
    for _ in range(5):
        knowledge.observe("c", "d", 0.95)
        knowledge.observe("d", "c", 0.95)
    after = {(c.victim, c.neighbour): c for c in believed_cells(3, clusters, knowledge)}
    assert after[1, 1].rate > before[1, 1].rate + 0.1
    assert after[1, 1].pairs == 2
    assert isd_matrix(list(after.values()), 3, evidence=0)[1, 1] > 0


def test_clusters_are_paired_up_as_ps_and_isd_balance_best() -> None:
    assert balanced_partners(default_kb().cells, 3) == (0, 1, 2), "on the V100 light beside heavy is the worst choice"
    log = {(0, 2): 0.05, (2, 0): 0.05, (1, 1): 0.2, (0, 0): 0.2, (2, 2): 1.0}
    cells = [Cell(v, n, log.get((v, n), 0.4), 0.1, 5) for v in range(3) for n in range(3)]
    assert balanced_partners(cells, 3) == (2, 1, 0), "as the paper found it"


def test_fitted_knowledge_keeps_what_it_learned(fitted: Path) -> None:
    base = KnowledgeBase.load(fitted)
    assert base.interference.spread != Spread()
