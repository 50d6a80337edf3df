"""Clusters and rates learned from the store."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from store_helpers import ALICE, Site, record, token

from slurm_gpushare.cli.kb import kb
from slurm_gpushare.cli.model import model
from slurm_gpushare.coschedule.learn import Learner, assign_new, in_force, refit
from slurm_gpushare.errors import BadInput
from slurm_gpushare.knowledge.default import default_kb
from slurm_gpushare.knowledge.learning import FlatPrior
from slurm_gpushare.knowledge.prior import CellPrior
from slurm_gpushare.store.sharing import Observation
from slurm_gpushare.store.tags import JobTag
from slurm_gpushare.telemetry.record import Neighbour

A, B = token(1), token(2)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(f"sqlite:///{tmp_path / 'store.sqlite'}", tmp_path / "spool")


def profiled(site: Site, tokens: dict[str, float]) -> None:
    """One run alone of each token, at the utilisation given; memory and accesses follow it."""
    for job, (name, util) in enumerate(tokens.items(), start=1):
        site.tags[job] = JobTag(name, ALICE)
        site.take(record(job, util=util, mem_pct=util / 2))


def cluster(site: Site, name: str) -> int | None:
    found = site.store.profiles.get(name)
    assert found is not None
    return found.cluster


def test_new_profiles_get_a_cluster_of_the_shipped_model(site: Site) -> None:
    profiled(site, {A: 10.0, B: 95.0})
    assert {item.token: item.cluster for item in assign_new(site.store)} == {A: 0, B: 2}
    assert (cluster(site, A), cluster(site, B)) == (0, 2)
    assert assign_new(site.store) == []


def test_refit_tags_all_and_keeps_numbers(site: Site) -> None:
    profiled(site, {token(n): 5.0 + 9.0 * (n % 11) for n in range(1, 34)})
    assign_new(site.store)
    light = cluster(site, token(11))
    with pytest.raises(BadInput, match="33 complete profiles of V100, 50 are needed"):
        refit(site.store, "V100", enough=50)
    fitted = refit(site.store, "V100", k=3)
    assert in_force(site.store, "V100").version == fitted.version
    assert {profile.model_version for profile in site.store.profiles.all()} == {fitted.version}
    assert cluster(site, token(11)) == light == 0
    assert cluster(site, token(10)) == 2


def test_cells_are_believed_until_something_is_seen(site: Site) -> None:
    profiled(site, {A: 10.0, B: 95.0})
    learner = Learner(site.store)
    learner.catch_up()
    heavy_neighbour = learner.knowledge.rates([A], [B]).mean[0, 0]
    light_neighbour = learner.knowledge.rates([B], [A]).mean[0, 0]
    assert heavy_neighbour < 0.5 < 0.8 < light_neighbour
    stranger = learner.knowledge.rates(["gs-unknown"], ["gs-other"]).mean[0, 0]
    assert heavy_neighbour < stranger < light_neighbour
    site.store.observations.add([Observation(f"x{n}", "V100", A, B, 0.9, 1.0, 1) for n in range(30)])
    assert learner.catch_up() == 30
    assert learner.catch_up() == 0
    assert learner.knowledge.rates([A], [B]).mean[0, 0] == pytest.approx(0.9, abs=0.05)


def test_elapsed_time_beside_one_neighbour_is_an_observation(site: Site) -> None:
    profiled(site, {A: 50.0, B: 60.0})  # 600 s alone
    site.tags[3] = JobTag(A, ALICE)
    site.take(record(3, shared=True, seconds=1000.0, neighbours=(Neighbour(2, 1000.0),)))
    Learner(site.store).catch_up()
    (seen,) = site.store.observations.after(0)
    assert (seen.victim, seen.neighbour) == (A, B)
    assert seen.rate == pytest.approx(0.6)
    assert 0 < seen.weight < 1
    assert seen.source.startswith("elapsed:")
    Learner(site.store).catch_up()
    assert len(site.store.observations.after(0)) == 1


@pytest.mark.parametrize(("seconds", "neighbours"), [(300.0, 1), (1000.0, 2), (1000.0, 0)])
def test_stopped_or_crowded_runs_tell_nothing(site: Site, seconds: float, neighbours: int) -> None:
    profiled(site, {A: 50.0, B: 60.0})
    site.tags[3] = JobTag(A, ALICE)
    beside = tuple(Neighbour(2 + n, seconds) for n in range(neighbours))
    site.take(record(3, shared=True, seconds=seconds, neighbours=beside))
    Learner(site.store).catch_up()
    assert site.store.observations.after(0) == []


def test_dry_run_leaves_the_store_alone(site: Site) -> None:
    profiled(site, {A: 50.0})
    Learner(site.store, writes=False).catch_up()
    assert cluster(site, A) is None


def test_shipped_spreads_are_narrower_within_cells() -> None:
    spread = CellPrior(default_kb()).spread
    assert 0.05 < spread.pair < 0.2
    assert spread.pressure < FlatPrior().spread.pressure, "clusters explain part of what aggressors do"


def test_commands_use_the_store(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conf = tmp_path / "gpushare.conf"
    conf.write_text(f"StoreUrl=sqlite:///{tmp_path / 'store.sqlite'}\n")
    monkeypatch.setenv("GPUSHARE_CONF", str(conf))
    (tmp_path / "pairs.csv").write_text(
        f"profile_a,profile_b,gpu_model,feasible,rate_a,rate_b\n{A},{B},V100,1,0.5,0.9\n{A},{A},V100,0,,\n"
    )
    profiled(site, {A: 10.0, B: 95.0})
    run = CliRunner().invoke
    assert "2 observations taken in" in run(kb, ["import", str(tmp_path / "pairs.csv")]).output
    assert "0 observations taken in, 2 known" in run(kb, ["import", str(tmp_path / "pairs.csv")]).output
    learned = json.loads(run(kb, ["learn", "--json"], catch_exceptions=False).output)
    assert learned["observations"] == 2
    assert [item["token"] for item in learned["tokens"]] == [A, B]
    assert "shipped" in run(model, ["show"]).output
    assert isinstance(run(model, ["fit"]).exception, BadInput)
    (tmp_path / "pairs.csv").write_text("profile_a,profile_b,gpu_model,rate_a,rate_b\nresnet,bert,V100,0.5,0.9\n")
    assert isinstance(run(kb, ["import", str(tmp_path / "pairs.csv")]).exception, BadInput)


def test_assign_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text(
        "profile,gpu_model,mgup,mgmap,mgtsamp\na,V100,5,5,1\nb,V100,95,60,60\nc,V100,5,,1\n"
    )
    result = CliRunner().invoke(model, ["assign", "--profiles", str(tmp_path / "p.csv")], catch_exceptions=False)
    assert [line.split() for line in result.output.splitlines()[1:]] == [["a", "0"], ["b", "2"], ["c", "---"]]
    (tmp_path / "p.csv").write_text("profile,gpu_model,mgup\na,V100,5\n")
    assert isinstance(CliRunner().invoke(model, ["assign", "--profiles", str(tmp_path / "p.csv")]).exception, BadInput)


def test_cluster_numbers_outside_the_base_get_its_mean() -> None:
    prior = CellPrior(default_kb())
    prior.cluster_of = {"a": 7, "b": None}
    assert np.ptp(prior.log_slowdown(["a", "b"], ["a", "b"])) == 0.0
