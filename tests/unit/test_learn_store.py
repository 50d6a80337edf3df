"""Clusters and rates learned from the store."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from world import ALICE, NOW, Site, command_record, record, token

from slurm_gpushare.cli.kb import kb
from slurm_gpushare.cli.kb_clusters import clusters as model
from slurm_gpushare.helper.cluster_assignment import assign_new, in_force, refit
from slurm_gpushare.helper.learner import Learner
from slurm_gpushare.knowledge.kb import default_kb
from slurm_gpushare.protocol.errors import BadInput
from slurm_gpushare.protocol.history import Span
from slurm_gpushare.protocol.record import Neighbour, Period, Stat
from slurm_gpushare.protocol.tokens import OwnedToken
from slurm_gpushare.store.refine import by_nodes
from slurm_gpushare.store.sharing import Observation
from slurm_gpushare.store.stored_jobs import EVER

A, B = token(1), token(2)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(f"sqlite:///{tmp_path / 'store.sqlite'}", tmp_path / "spool")


def profiled(site: Site, tokens: dict[str, float]) -> None:
    """One run alone of each token, at the utilisation given; memory and accesses follow it."""
    for job, (name, util) in enumerate(tokens.items(), start=1):
        site.tags[job] = OwnedToken(name, ALICE)
        made = record(job, util=util, mem_pct=util / 2)
        stats = {**made.profile.stats, "proc_sm_pct": Stat(60, util, util, util, util, 1.0)}
        site.take(replace(made, profile=replace(made.profile, stats=stats)))


def cluster(site: Site, name: str) -> int | None:
    found = site.store.profiles.get(name)
    assert found is not None
    return found.cluster


def test_new_profiles_get_a_cluster_of_the_shipped_model(site: Site) -> None:
    profiled(site, {A: 10.0, B: 95.0})
    assert {item.token: item.cluster for item in assign_new(site.store)[1]} == {A: 0, B: 2}
    assert (cluster(site, A), cluster(site, B)) == (0, 2)
    assert assign_new(site.store) == ([], [])


def test_refit_tags_all_and_keeps_numbers(site: Site) -> None:
    profiled(site, {token(n): 5.0 + 9.0 * (n % 11) for n in range(1, 34)})
    assign_new(site.store)
    light = cluster(site, token(11))
    with pytest.raises(BadInput, match="33 complete profiles of V100, 50 are needed"):
        refit(site.store, "V100", enough=50)
    fitted = refit(site.store, "V100", k=3)
    assert in_force(site.store, "V100").version == fitted.version
    assert not site.store.profiles.unassigned()
    assert {profile.cluster for profile in site.store.profiles.all()} == {0, 1, 2}
    assert cluster(site, token(11)) == light == 0
    assert cluster(site, token(10)) == 2


def test_what_clusters_are_is_said_by_nodes_alone(site: Site) -> None:
    """Users' own records have moved every profile a little: the model is as it would be without them."""
    tokens = {token(n): 5.0 + 9.0 * (n % 11) for n in range(1, 34)}
    profiled(site, tokens)
    before = {profile.token: profile.features["mgup"] for profile in site.store.profiles.all()}
    for job, name in enumerate(tokens, start=101):
        site.tags[job] = OwnedToken(None, ALICE)
        site.take(command_record(job, name, util=tokens[name] + 4.0, mem_pct=tokens[name] / 2), uid=ALICE)
    after = {profile.token: profile.features["mgup"] for profile in site.store.profiles.all()}
    assert sum(after[name] > before[name] for name in tokens) > 20
    nodes = by_nodes(site.store.database, list(site.store.profiles.all()))
    assert {profile.token: profile.features["mgup"] for profile in nodes} == before
    model = refit(site.store, "V100", k=3).model
    mgup = model.features.index("mgup")
    weights = np.array(model.sizes) / sum(model.sizes)
    assert weights @ model.centroids[:, mgup] == pytest.approx(np.mean(list(before.values())), abs=0.01)


def test_telemetry_is_believed_until_something_is_seen(site: Site) -> None:
    profiled(site, {A: 10.0, B: 95.0})
    learner = Learner(site.store)
    learner.catch_up()
    heavy_neighbour = learner.knowledge.rates([B], [B]).mean[0, 0]
    light_neighbour = learner.knowledge.rates([B], [A]).mean[0, 0]
    assert heavy_neighbour < 0.7 < 0.85 < light_neighbour
    stranger = learner.knowledge.rates(["gs-unknown"], ["gs-other"]).mean[0, 0]
    assert heavy_neighbour < stranger < light_neighbour
    site.store.observations.add([Observation(f"x{n}", "V100", A, B, 0.9, 1.0, 1) for n in range(30)])
    assert learner.catch_up() == 30
    assert learner.catch_up() == 0
    assert learner.knowledge.rates([A], [B]).mean[0, 0] == pytest.approx(0.9, abs=0.05)


def test_elapsed_time_beside_one_neighbour_is_an_observation(site: Site) -> None:
    profiled(site, {A: 50.0, B: 60.0})  # 600 s alone
    site.tags[3] = OwnedToken(A, ALICE)
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
    site.tags[3] = OwnedToken(A, ALICE)
    beside = tuple(Neighbour(2 + n, seconds) for n in range(neighbours))
    site.take(record(3, shared=True, seconds=seconds, neighbours=beside))
    Learner(site.store).catch_up()
    assert site.store.observations.after(0) == []


def test_dry_run_leaves_the_store_alone(site: Site) -> None:
    profiled(site, {A: 50.0})
    Learner(site.store, writes=False).catch_up()
    assert cluster(site, A) is None


def test_a_base_that_was_put_in_force_is_what_the_helper_starts_from(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conf = tmp_path / "gpushare.conf"
    conf.write_text(f"StoreUrl=sqlite:///{tmp_path / 'store.sqlite'}\n")
    monkeypatch.setenv("GPUSHARE_CONF", str(conf))
    shares = {f"secret{n}": 15.0 + 8.0 * n for n in range(10)}
    (tmp_path / "p.csv").write_text(
        "profile,gpu_model,gpu_util_mean_pct,mem_access_mean_pct\n"
        + "".join(f"{name},V100,{util},{util / 2}\n" for name, util in shares.items())
    )
    rows = [
        f"{a},{b},V100,{np.exp(-2e-4 * shares[a] * shares[b]):.4f},{np.exp(-2e-4 * shares[a] * shares[b]):.4f}\n"
        for a in shares
        for b in shares
        if a < b
    ]
    (tmp_path / "q.csv").write_text("profile_a,profile_b,gpu_model,rate_a,rate_b\n" + "".join(rows))
    run = CliRunner().invoke
    files = ["--profiles", str(tmp_path / "p.csv"), "--pairs", str(tmp_path / "q.csv")]
    run(kb, ["fit", *files, "--out", str(tmp_path / "kb.json")], catch_exceptions=False)
    profiled(site, {A: 50.0, B: 95.0})
    shipped, own = Learner(site.store), "45 feasible pairs of q.csv"
    shipped.catch_up()
    assert own in run(kb, ["use", str(tmp_path / "kb.json")], catch_exceptions=False).output
    learner = Learner(site.store)
    learner.catch_up()
    assert own in learner.base.title
    assert learner.knowledge.rates([A], [B]).mean[0, 0] < shipped.knowledge.rates([A], [B]).mean[0, 0] - 0.1
    assert "secret" not in (tmp_path / "store.sqlite").read_bytes().decode("latin-1"), "names stay in the file"
    shown = run(kb, ["show"], catch_exceptions=False).output
    assert "this site: 0 observations of 2 tokens" in shown
    assert own in shown
    assert json.loads(run(kb, ["show", "--json"], catch_exceptions=False).output)["site"]["gpu_model"] == "V100"
    assert own not in Learner(site.store, "P100").base.title, "it is the V100's"
    assert "328 feasible pairs" in run(kb, ["use", "--shipped"], catch_exceptions=False).output
    assert Learner(site.store).base is default_kb()


def shared_run(site: Site, job: int, name: str, beside: tuple[Neighbour, ...], sm_pct: float, n: int = 8) -> None:
    """A run that shared all of the time, at an activity of its own of `sm_pct`."""
    site.tags[job] = OwnedToken(name, ALICE)
    seconds = sum(item.seconds for item in beside)
    made = record(job, shared=True, seconds=seconds, neighbours=beside)
    stats = {"proc_sm_pct": Stat(n, sm_pct, sm_pct, sm_pct, sm_pct, 2.0)}
    site.take(replace(made, shared=Period(shared_s=seconds, stats=stats)))


def span(resident: int, guest: int, tokens: tuple[str, str]) -> Span:
    return Span(resident, guest, *tokens, "n0", 0, "V100", NOW - 62)


def test_the_final_records_of_both_jobs_teach_after_a_few_seconds(site: Site) -> None:
    """4 s together are 8 samples; no interim record was ever written, and the other job still runs."""
    profiled(site, {A: 50.0, B: 60.0})
    site.store.sharing.begin([span(3, 4, (A, B))])
    learner = Learner(site.store)
    learner.catch_up()
    shared_run(site, 3, A, (Neighbour(4, 4.0),), 0.7 * 50.0)
    learner.catch_up()
    (seen,) = site.store.observations.after(0)
    assert (seen.victim, seen.neighbour, seen.rate) == (A, B, pytest.approx(0.7))
    assert 0.1 < seen.weight < 1
    shared_run(site, 4, B, (Neighbour(3, 4.0),), 0.9 * 60.0)
    learner.catch_up()
    assert [item.rate for item in site.store.observations.after(seen.id)] == [pytest.approx(0.9)]
    (told,) = site.store.sharing.of_jobs({3: EVER})
    assert (told.resident_rate_seen, told.guest_rate_seen) == (pytest.approx(0.7), pytest.approx(0.9))


def test_a_pairing_that_no_tick_saw_teaches_when_the_other_job_has_ended(site: Site) -> None:
    """Only the other's own run tells its token."""
    profiled(site, {A: 50.0, B: 60.0})
    learner = Learner(site.store)
    shared_run(site, 3, A, (Neighbour(4, 4.0),), 0.7 * 50.0)
    learner.catch_up()
    assert site.store.observations.after(0) == []
    shared_run(site, 4, B, (Neighbour(3, 4.0),), 0.9 * 60.0)
    learner.catch_up()
    seen = {item.victim: item.rate for item in site.store.observations.after(0)}
    assert seen == {A: pytest.approx(0.7), B: pytest.approx(0.9)}


def test_runs_that_were_learned_from_are_not_read_again_after_a_restart(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    profiled(site, {A: 50.0, B: 60.0})
    shared_run(site, 3, A, (Neighbour(2, 4.0),), 0.7 * 50.0)
    first = Learner(site.store)
    first.catch_up()
    monkeypatch.setattr(site.store.runs, "record", lambda run_id: pytest.fail(f"run {run_id} was read again"))
    again = Learner(site.store)
    again.catch_up()
    assert again.knowledge.rates([A], [B]).mean == pytest.approx(first.knowledge.rates([A], [B]).mean, abs=0.02)


def test_of_several_neighbours_those_not_yet_measured_are_told_apart(site: Site) -> None:
    profiled(site, {A: 50.0, B: 60.0, token(3): 60.0})
    site.store.sharing.begin([span(5, 6, (A, B)), span(5, 7, (A, token(3)))])
    measured = next(item for item in site.store.sharing.of_jobs({6: EVER}))
    site.store.sharing.seen({measured.id: 0.9}, {})
    shared_run(site, 5, A, (Neighbour(6, 10.0), Neighbour(7, 10.0)), 0.75 * 50.0, n=40)
    Learner(site.store).catch_up()
    (seen,) = site.store.observations.after(0)
    assert (seen.neighbour, seen.rate) == (token(3), pytest.approx(0.6)), "0.9 and 0.6 are 0.75 on average"


def test_a_whole_run_tells_what_it_lost_whichever_part_of_its_epochs_was_shared(site: Site) -> None:
    """Epochs begin quietly: it was alone in a quiet part, and the loud one that was shared seemed to lose nothing."""
    profiled(site, {A: 50.0, B: 60.0})
    site.store.sharing.begin([span(5, 6, (A, B))])
    site.tags[5] = OwnedToken(A, ALICE)
    made = record(5, shared=True, seconds=100.0, neighbours=(Neighbour(6, 60.0),))
    alone, shared = Stat(40, 45.0, 38.0, 10.0, 45.0, 12.0), Stat(60, 50.0, 48.0, 40.0, 50.0, 2.0)
    site.take(replace(made, alone=Period(alone_s=40.0, stats={"proc_sm_pct": alone}),
                      shared=Period(shared_s=60.0, stats={"proc_sm_pct": shared})))  # fmt: skip
    Learner(site.store).catch_up()
    (told,) = site.store.sharing.of_jobs({5: EVER})
    work_s = (40.0 * 38.0 + 60.0 * 48.0) / 50.0
    assert 60.0 * (1.0 - (told.resident_rate_seen or 0.0)) == pytest.approx(100.0 - work_s, abs=1.5)


def test_a_requeued_job_is_judged_by_the_spans_of_its_own_run(site: Site) -> None:
    profiled(site, {A: 50.0, B: 60.0})
    at_s = int(record(5).start_s)
    runs = [replace(span(5, 6, (A, B)), start_s=begun_s) for begun_s in (at_s, at_s + 1000)]
    site.store.sharing.begin(runs)
    site.store.sharing.end({site.store.sharing.of_jobs({5: EVER})[0].id: at_s + 100})
    shared_run(site, 5, A, (Neighbour(6, 600.0),), 0.8 * 50.0, n=40)
    Learner(site.store).catch_up()
    assert [told.resident_rate_seen for told in site.store.sharing.of_jobs({5: EVER})] == [
        pytest.approx(0.8, abs=0.01),
        None,
    ]


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
    learner = Learner(site.store)
    assert learner.catch_up() == 2
    assert list(learner.knowledge.evidence()) == [(A, B), (B, A)]
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


def test_a_long_past_is_learned_from_in_pieces_and_each_run_once(site: Site) -> None:
    """Also if the helper ends in the middle of what was settled together."""
    profiled(site, {A: 50.0, B: 60.0})
    for job in range(3, 33):
        site.tags[job] = OwnedToken(A, ALICE)
        site.take(record(job, shared=True, seconds=1000.0, neighbours=(Neighbour(2, 1000.0),)))
    at_once, seen, pieces = Learner(site.store), 0, 0
    at_once.catch_up(for_s=0.0)
    assert at_once.behind
    learner = Learner(site.store)
    while pieces == 0 or learner.behind:
        learner = Learner(site.store) if pieces == 3 else learner
        learner.catch_up(for_s=0.01)
        found = len(site.store.observations.after(0))
        assert found >= seen
        seen, pieces = found, pieces + 1
    assert seen == 30
    assert Learner(site.store).catch_up() == 30


def test_runs_are_read_some_at_a_time_and_never_parted_from_those_settled_with_them(site: Site) -> None:
    profiled(site, {A: 50.0, B: 60.0})
    with site.store.database.write() as connection:
        connection.exec_driver_sql("UPDATE run SET settled_seq = 7")
    for job in range(3, 13):
        site.tags[job] = OwnedToken(A, ALICE)
        site.take(record(job))
    first = list(site.store.runs.after(0, most=1))
    assert len(first) > 2
    last, found = first[-1].settled_seq, [run.id for run in first]
    while some := list(site.store.runs.after(last, most=3)):
        found += [run.id for run in some]
        last = some[-1].settled_seq
    assert found == [run.id for run in site.store.runs.after(0)]
