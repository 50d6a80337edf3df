"""The paper's pipeline, on its own data."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from gpushare_lab.cli.characterize import characterize
from gpushare_lab.paper.workloads import METHODS, SENSITIVE, enlarge, read_workloads

from slurm_gpushare.knowledge.clusters import ClusterModel, elbow, fit_clusters
from slurm_gpushare.knowledge.kb import default_model
from slurm_gpushare.protocol.errors import BadInput

FIGURE_4 = [(21, 8), (61, 43), (89, 56)]
BLOBS = np.vstack([np.random.default_rng(0).normal(centre, 2, (20, 2)) for centre in ((10, 10), (50, 40), (90, 60))])


@pytest.mark.slow
def test_the_papers_figures_are_reproduced(data_dir: Path, tmp_path: Path) -> None:
    command = [str(data_dir / "paper_workloads.csv"), "--out", str(tmp_path / "out")]
    output = CliRunner().invoke(characterize, command, catch_exceptions=False).output
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["k"] == 3
    for centroid, (mgup, mgmap) in zip(summary["centroids"], FIGURE_4, strict=True):
        assert centroid["mgup"] == pytest.approx(mgup, abs=8)
        assert centroid["mgmap"] == pytest.approx(mgmap, abs=8)
    assert summary["points"] == 4 * 49
    assert set(summary["ranking"]) == {"MGUP", "MGMAP"}
    assert len(summary["interpolation_scores"]) == 6
    assert "dropped, user-sensitive: ID, Model, Dataset, Epoch, BS" in output
    attributes = {item["attribute"] for item in summary["ranking"]["MGUP"]}
    assert not attributes & set(SENSITIVE)
    model = ClusterModel.from_json(json.loads((tmp_path / "out" / "model.json").read_text()))
    assert model.centroids == pytest.approx(default_model().centroids, abs=0.5), "the shipped model is this one"
    assert summary["third_feature"] == {"name": "mgtsamp", "place": {"MGUP": 2, "MGMAP": 13}, "chosen_on": "MGUP"}
    assert summary["elbow_by_largest_k"] == {str(k): 2 if k < 7 else 3 for k in range(5, 14)}


@pytest.mark.parametrize("method", METHODS)
def test_synthetic_points_are_percentages(data_dir: Path, method: str) -> None:
    points, _ = enlarge(read_workloads(data_dir / "paper_workloads.csv"), method)
    assert len(points) == 3 * 49
    assert points.min() >= 0
    assert points.max() <= 100


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Model,Dataset,BS,MGUP,MGMAP,MaGTSAMP\n", "0 workloads"),
        ("Model,Dataset,BS,MGUP,MGMAP\n" + "m,d,2,1,1\n" * 3, "no column MaGTSAMP"),
        ("Model,Dataset,BS,MGUP,MGMAP,MaGTSAMP\n" + "m,d,2,1,1,x\n" * 3, "MaGTSAMP is 'x'"),
        ("Model,Dataset,BS,MGUP,MGMAP,MaGTSAMP\n" + "m,d,2,101,1,1\n" * 3, "MGUP is a percentage"),
        ("Model,Dataset,BS,MGUP,MGMAP,MaGTSAMP\n" + "m,d,2,1,1,1\n" * 3, "same in every row"),
    ],
)
def test_bad_tables_are_named_and_nothing_is_written(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "w.csv").write_text(text)
    with pytest.raises(BadInput, match=message):
        CliRunner().invoke(
            characterize, [str(tmp_path / "w.csv"), "--out", str(tmp_path / "out")], catch_exceptions=False
        )
    assert not (tmp_path / "out").exists()


def test_elbow_by_hand() -> None:
    assert elbow([100, 50, 10, 8, 6, 5]) == 3
    assert elbow([10, 1]) == 2
    assert elbow([5]) == 1


def test_clusters_are_found_numbered_by_weight_and_assigned() -> None:
    model = fit_clusters(BLOBS, ["x", "y"])
    assert model.k == 3
    assert model.sizes == (20, 20, 20)
    assert model.assign(BLOBS).tolist() == [0] * 20 + [1] * 20 + [2] * 20
    assert model.assign(np.array([[np.nan, 1.0]])).tolist() == [-1]


def test_refit_keeps_numbers() -> None:
    first = fit_clusters(BLOBS, ["x", "y"])
    turned = ClusterModel(
        first.features, first.mean, first.scale, first.centroids[::-1], first.sizes, first.chosen, first.distortions
    )
    again = fit_clusters(BLOBS + 1.0, ["x", "y"], previous=turned)
    assert again.assign(BLOBS[:1]).tolist() == [2]


def test_one_row_one_cluster_and_constant_columns() -> None:
    with pytest.raises(BadInput, match="at least two different"):
        fit_clusters(BLOBS[:1], ["x", "y"])
    with pytest.raises(BadInput, match="at least two different"):
        fit_clusters(np.ones((5, 2)), ["x", "y"])
    with pytest.raises(BadInput, match="k = 9"):
        fit_clusters(BLOBS, ["x", "y"], k=9)
    assert fit_clusters(BLOBS, ["x", "y"], k=1).sizes == (60,)
    padded = np.column_stack([BLOBS, np.full(60, 7.0)])
    assert fit_clusters(padded, ["x", "y", "z"]).k == 3


def test_model_survives_its_file_and_others_are_refused() -> None:
    model = fit_clusters(BLOBS, ["x", "y"])
    assert ClusterModel.from_json(json.loads(json.dumps(model.to_json()))).to_json() == model.to_json()
    with pytest.raises(BadInput, match="format 9"):
        ClusterModel.from_json({"format": 9})
    with pytest.raises(BadInput, match="not a cluster model"):
        ClusterModel.from_json({"format": 1})
