"""Several GPU models share at once, each for itself: what was measured on one is not used on another."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from lua_hook import INTERPRETERS, KNOWN, LuaHook, literal, make_hook
from world import ALICE, NOW, SETTINGS, Flat, Site, card, occupant, pending, places, record, token

from slurm_gpushare.cli.kb import kb
from slurm_gpushare.cli.kb_clusters import clusters as model
from slurm_gpushare.helper.cluster_assignment import assign_new
from slurm_gpushare.helper.learner import Learner, SiteKnowledge
from slurm_gpushare.helper.plan import plan
from slurm_gpushare.helper.snapshot import How, NodeRoom, PendingJob, Snapshot, Workload
from slurm_gpushare.helper.why_left import why_left
from slurm_gpushare.knowledge.rates import Knowledge, KnowledgeByModel
from slurm_gpushare.protocol.errors import ConfigError
from slurm_gpushare.protocol.settings import parse_config
from slurm_gpushare.protocol.tag import parse_tag
from slurm_gpushare.protocol.tokens import OwnedToken
from slurm_gpushare.store.hookfile import HookFile
from slurm_gpushare.store.sharing import Observation
from slurm_gpushare.store.workloads import models_of, own_names

A, B = token(1), token(2)
NODES = {name: NodeRoom(name, 32, 100_000) for name in ("v", "a")}
SHORT = Workload("gs-p", cluster=0, mem_used_mib=4000, limit_s=600, expected_s=300.0)


class TwoModels(KnowledgeByModel):
    """On a V100 nobody is slowed, on an A100 everybody stands still."""

    def on(self, gpu_model: str) -> Knowledge:
        return {"V100": Flat(0.95), "A100": Flat(0.05)}[gpu_model]


def look(*gpus: object, jobs: list[PendingJob]) -> Snapshot:
    return Snapshot(NOW, tuple(gpus), NODES, tuple(jobs), mean_duration_s={1: 2000.0})  # type: ignore[arg-type]


V_RESIDENT = card(occupant("v1"), node="v", model="V100")
A_RESIDENT = card(occupant("a1"), node="a", model="A100", mem_total_mib=40_000)


def test_a_guest_joins_only_on_a_model_on_which_it_was_measured() -> None:
    only_a = pending(measured={"A100": SHORT})
    everywhere = pending(measured={"A100": SHORT, "V100": SHORT})
    fast = Flat(0.95)
    assert places(plan(look(V_RESIDENT, A_RESIDENT, jobs=[only_a]), fast, SETTINGS)) == {"p": ("a", 0, How.BESIDE)}
    assert places(plan(look(V_RESIDENT, jobs=[only_a]), fast, SETTINGS)) == {}
    assert len(plan(look(V_RESIDENT, A_RESIDENT, jobs=[everywhere]), fast, SETTINGS).placements) == 1


def test_each_model_is_planned_by_its_own_knowledge() -> None:
    everywhere = pending(measured={"A100": SHORT, "V100": SHORT})
    scene = look(A_RESIDENT, V_RESIDENT, jobs=[everywhere])
    assert places(plan(scene, TwoModels(), SETTINGS)) == {"p": ("v", 0, How.BESIDE)}


def test_what_a_job_needs_is_taken_from_the_model_of_the_card() -> None:
    large = replace(SHORT, mem_used_mib=15_000)
    job = pending(measured={"V100": large, "A100": SHORT})
    assert places(plan(look(V_RESIDENT, jobs=[job]), Flat(0.95), SETTINGS)) == {}
    assert places(plan(look(A_RESIDENT, jobs=[job]), Flat(0.95), SETTINGS)) == {"p": ("a", 0, How.BESIDE)}


def test_on_a_model_that_is_new_to_it_a_job_has_the_card_alone_and_is_measured() -> None:
    first, second = pending("p", measured={"V100": SHORT}), pending("q", measured={"A100": SHORT})
    empty = card(node="a", model="A100", mem_total_mib=40_000)
    got = plan(look(empty, jobs=[first, second]), Flat(0.95), SETTINGS)
    assert places(got) == {"p": ("a", 0, How.UNSHARED)}


def test_a_job_whose_type_the_hook_chose_stays_on_that_model() -> None:
    job = pending(measured={"V100": SHORT, "A100": SHORT}, gpu_model="V100", gpu_index=0)
    empty = [card(node="a", model="A100"), card(node="v", model="V100")]
    assert places(plan(look(*empty, jobs=[job]), Flat(0.95), SETTINGS)) == {"p": ("v", 0, How.ALONE)}


def test_a_job_that_was_not_measured_on_the_open_cards_model_has_nobody_to_join() -> None:
    scene = look(V_RESIDENT, jobs=[pending(measured={"A100": SHORT})])
    got = plan(scene, Flat(0.95), SETTINGS)
    assert [reason.code for reason in why_left(scene, Flat(0.95), SETTINGS, got.left).values()] == ["no-partner"]


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(f"sqlite:///{tmp_path / 'store.sqlite'}", tmp_path / "spool")


def measure(site: Site, job: int, name: str, gpu_model: str, util: float) -> None:
    site.tags[job] = OwnedToken(name, ALICE)
    site.take(record(job, util=util, mem_pct=util / 2, gpu_model=gpu_model))


def test_a_model_has_two_names() -> None:
    assert own_names(["v100", "a100_80g"], ["V100"]) == {"v100": "V100", "a100_80g": "A100"}
    assert own_names(["volta"], ["V100"]) == {"volta": "V100"}, "a site with one model may call it what it likes"
    assert own_names(["v100"], ["A100"]) == {"v100": "V100"}, "records of nodes that do not share change nothing"
    assert own_names(["volta"], ["V100", "A100"]) == {"volta": "VOLTA"}


def test_the_hooks_file_says_on_which_models_a_workload_was_measured(site: Site, tmp_path: Path) -> None:
    measure(site, 1, A, "V100", 95.0)
    measure(site, 2, B, "A100", 10.0)
    SiteKnowledge(site.store, ["v100", "a100"]).catch_up()
    file = HookFile(tmp_path / "hook.sqlite", ["v100", "a100"])
    file.sync(site.store, NOW)

    def known() -> dict[str, str]:
        with closing(sqlite3.connect(file.path)) as opened:
            return dict(opened.execute("SELECT token, clusters FROM workload"))

    assert known() == {A: "v100=2/1/4410", B: "a100=0/1/4410"}
    measure(site, 3, A, "A100", 50.0)
    SiteKnowledge(site.store, ["v100", "a100"]).catch_up()
    file.sync(site.store, NOW)
    assert known() == {A: "a100=1/1/4410,v100=2/1/4410", B: "a100=0/1/4410"}
    only_v = HookFile(tmp_path / "v.sqlite", ["v100"])
    only_v.sync(site.store, NOW)
    with closing(sqlite3.connect(only_v.path)) as opened:
        assert dict(opened.execute("SELECT token, clusters FROM workload")) == {A: "v100=2/1/4410"}


def test_what_was_observed_on_one_model_changes_nothing_on_another(site: Site) -> None:
    for job, gpu_model in enumerate(("V100", "V100", "A100", "A100"), start=1):
        measure(site, job, (A, B)[job % 2], gpu_model, 60.0)
    knowledge = SiteKnowledge(site.store, ["v100", "a100"])
    knowledge.catch_up()
    before = {name: knowledge.on(name).rates([A], [B]).mean[0, 0] for name in ("V100", "A100")}
    site.store.observations.add([Observation(f"x{n}", "A100", A, B, 0.2, 1.0, NOW + n) for n in range(20)])
    assert knowledge.catch_up() == 20
    assert knowledge.on("V100").rates([A], [B]).mean[0, 0] == before["V100"]
    assert knowledge.on("A100").rates([A], [B]).mean[0, 0] < before["A100"] - 0.1


def test_commands_say_which_model_they_speak_of(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure(site, 1, A, "V100", 95.0)
    measure(site, 2, B, "A100", 10.0)
    conf = tmp_path / "gpushare.conf"
    conf.write_text(f"StoreUrl=sqlite:///{tmp_path / 'store.sqlite'}\nGpuModel=v100,a100\n")
    monkeypatch.setenv("GPUSHARE_CONF", str(conf))
    run = CliRunner().invoke
    assign_new(site.store)
    assert [Learner(site.store, name).catch_up() for name in ("V100", "A100")] == [0, 0]
    shown = run(kb, ["show"], catch_exceptions=False).output
    assert "V100, this site: 0 observations of 1 tokens" in shown
    assert "A100, this site: 0 observations of 1 tokens" in shown
    found = json.loads(run(kb, ["show", "--json"], catch_exceptions=False).output)["models"]
    assert [document["site"]["gpu_model"] for document in found] == ["V100", "A100"]
    only = json.loads(run(kb, ["show", "--json", "--gpu-model", "a100"], catch_exceptions=False).output)
    assert only["site"]["gpu_model"] == "A100"
    lines = run(model, ["show"], catch_exceptions=False).output.splitlines()
    assert [line.split(":")[0] for line in lines if ": model " in line] == ["V100", "A100"]
    assert models_of(site.store.database, ["v100", "a100"]) == {"v100": "V100", "a100": "A100"}


def test_gpushare_conf_names_several_models_each_once() -> None:
    assert parse_config("GpuModel=v100, a100").gpu_models == ("v100", "a100")
    for wrong in ("", ",", "v100,v100", "tesla v100"):
        with pytest.raises(ConfigError):
            parse_config(f"GpuModel={wrong}")


@pytest.fixture(params=INTERPRETERS)
def hook(request: pytest.FixtureRequest, tmp_path: Path) -> LuaHook:
    made = make_hook(request.param, tmp_path)
    made.configure(GpuModel="v100,a100", GpusPerNode="4")
    return made


SITE = 'run.site.models = {v100 = "gpu[0-1]", a100 = "gpu[2-3]"}; run.site.gpus = {v100 = 4, a100 = 2}\n'


def kind(hook: LuaHook, models: str, **desc: str | int) -> str:
    """What the job becomes: shared on a cluster, or measured."""
    hook.hook_file.unlink(missing_ok=True)
    hook.write_hook_file(models=models)
    desc = {"comment": f"gpushare:{KNOWN}", "tres_per_node": "gres/gpu:1", **desc}
    (answer,) = hook.answers(f"{SITE}run.submit({literal(desc)}, {{}})")
    assert (answer.code, answer.logged) == (0, [])
    tag = parse_tag(answer.fields["admin_comment"])
    assert tag is not None
    return "probe" if tag.probe else f"{tag.cluster}:{tag.original}"


def test_a_job_that_names_a_model_shares_only_if_it_was_measured_there(hook: LuaHook) -> None:
    for asked in ({"tres_per_node": "gres/gpu:a100:1"}, {"features": "a100"}, {"features": "fast&a100"}):
        where = {"partition": "gpu,gpu2", **asked}
        assert kind(hook, "v100=2", **where) == "probe"
        assert kind(hook, "a100=1,v100=2", **where) == "1:gpu:1"
    assert kind(hook, "v100=2", tres_per_node="gres/gpu:v100:1") == "2:gpu:1"


def test_a_job_that_may_have_any_model_shares_where_it_was_measured(hook: LuaHook) -> None:
    for models in ("v100=2", "a100=2"):
        assert kind(hook, models, partition="gpu,gpu2") == "2:gpu:1"
        assert kind(hook, models, partition="gpu,gpu2", features="v100|a100") == "2:gpu:1"


def test_a_partition_may_have_one_of_the_models_only(hook: LuaHook) -> None:
    assert kind(hook, "v100=2", partition="gpu") == "2:gpu:1"
    assert kind(hook, "v100=2", partition="gpu2") == "probe"
    assert kind(hook, "a100=1", partition="gpu2") == "1:gpu:1"


def test_on_22_05_the_type_is_one_that_the_models_nodes_have(hook: LuaHook) -> None:
    hook.configure(GpuModel="v100,a100", GpusPerNode="4", SlurmVersion="22.05.8")
    desc = literal({"comment": f"gpushare:{KNOWN}", "tres_per_node": "gres:gpu:1", "partition": "gpu2"})
    hook.hook_file.unlink()
    hook.write_hook_file(models="a100=1,v100=2")
    answers = hook.answers(SITE + f"for _ = 1, 4 do run.submit({desc}, {{}}) end")
    assert {answer.fields["tres_per_node"] for answer in answers} == {"gres:shard:a100_0:2", "gres:shard:a100_1:2"}
