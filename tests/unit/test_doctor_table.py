"""What may be wrong at a site, a row each: what is broken, which check says so, and what it says to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from world import NEW, NOW, node

from slurm_gpushare.protocol.files import resource_dir
from slurm_gpushare.protocol.settings import Config, parse_config
from slurm_gpushare.site import script_checks
from slurm_gpushare.site.current_setup import SiteSetup
from slurm_gpushare.site.finding import Finding, Level
from slurm_gpushare.site.script_checks import HOOK_CHECKS, PROLOG_CHECKS, tag_of_a_job
from slurm_gpushare.site.site_files import lua_script
from slurm_gpushare.site.slurm_checks import SLURM_CHECKS
from slurm_gpushare.slurm.accounting import parse_limits
from slurm_gpushare.slurm.nodes import Partition
from slurm_gpushare.slurm.values import parse_gres

MODELS = {"v100": ("n0,n1", 2)}
SLURM = {
    "SelectType": "select/cons_tres", "SelectTypeParameters": "CR_CORE_MEMORY", "GresTypes": "gpu,shard",
    "AccountingStorageTRES": "cpu,mem,gres/gpu,gres/shard", "JobSubmitPlugins": "lua", "CliFilterPlugins": "lua",
    "PrologFlags": "Alloc", "PreemptMode": "OFF", "PreemptType": "preempt/none", "TaskPlugin": "task/cgroup",
    "SlurmUser": "slurm(64030)", "SchedulerParameters": "(null)", "as_of": str(NOW),
}  # fmt: skip


@dataclass
class Site:
    """A site in order, in a directory, of which a row changes one thing."""

    facts: SiteSetup
    config: Config
    etc: Path

    def has(self, **facts: Any) -> None:
        self.facts = replace(self.facts, **facts)

    def ours(self, **settings: Any) -> None:
        self.config = replace(self.config, **settings)

    def slurm(self, **keys: str) -> None:
        self.has(config=dict(self.facts.config) | keys)

    def partition(self, **fields: str) -> None:
        (known,) = self.facts.partitions
        self.has(partitions=(replace(known, fields=known.fields | fields),))

    def second_node(self, **changes: Any) -> None:
        self.has(nodes=(self.facts.nodes[0], replace(self.facts.nodes[1], **changes)))

    def file(self, name: str, text: str) -> None:
        self.has(files=dict(self.facts.files) | {name: text})

    def rewrite(self, name: str, old: str, new: str) -> None:
        path = self.etc / name
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))

    def limit(self, tres: str) -> None:
        self.has(limits=tuple(parse_limits("qos", f"normal|||||||{tres}||")))

    def findings(self) -> list[Finding]:
        checks = (*SLURM_CHECKS, *HOOK_CHECKS, *PROLOG_CHECKS)
        return [item for check in checks for item in check(self.facts, self.config) if item.level is not Level.PASS]


@pytest.fixture
def site(tmp_path: Path) -> Site:
    scripts = {
        "lib/slurm_gpushare/prolog.sh": "#!/bin/sh\n",
        "lib/python": "#!/bin/sh\nexit 0\n",
        "prolog.d/50-gpushare": f"#!/bin/sh\nexport GPUSHARE_PYTHON={tmp_path}/lib/python\n"
        f"{tmp_path}/lib/slurm_gpushare/prolog.sh\nexit 0\n",
        "site_prolog": f"#!/bin/sh\n# the site's own\n{tmp_path}/prolog.d/50-gpushare\n",
        "gpushare_epilog_slurmctld": f"#!/bin/sh\n{tmp_path}/lib/slurm_gpushare/prolog.sh\n",
        "site_submit.lua": "",
    }
    for name, text in scripts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    lua = {name: lua_script(resource_dir("lua_bridge"), name, MODELS) for name in ("job_submit.lua", "cli_filter.lua")}
    (tmp_path / "gpushare_submit.lua").write_text(lua["job_submit.lua"])
    keys = dict.fromkeys(("Prolog", "Epilog", "TaskProlog"), f"{tmp_path}/site_prolog")
    keys["EpilogSlurmctld"] = f"{tmp_path}/gpushare_epilog_slurmctld"
    nodes = tuple(node(name, states=frozenset({"idle"})) for name in ("n0", "n1"))
    partition = Partition("gpu", None, {"TRESBillingWeights": "CPU=1,GRES/gpu=4,GRES/shard=2", "OverSubscribe": "NO"})
    files = {**lua, "cgroup.conf": "ConstrainDevices=yes\n", "gres.conf": "AutoDetect=off\n"}
    facts = SiteSetup(NEW, SLURM | keys, nodes, (partition,), (), tmp_path, files, NOW)
    generated = "GpusPerNode=2\nSlurmVersion=24.11.5\n"
    return Site(facts, parse_config("Partitions=gpu\n", generated=generated), tmp_path)


OWN = "function slurm_job_submit(d) return slurm.SUCCESS end\n{comment}pcall(dofile, '{etc}/gpushare_submit.lua')\n"


def own_lua(site: Site, comment: str = "", after: str = "") -> None:
    site.file("job_submit.lua", OWN.format(comment=comment, etc=site.etc) + after)


@dataclass(frozen=True)
class Row:
    what: str
    broken: Callable[[Site], object]
    check: str
    says: str
    fix: str
    level: Level = Level.FAIL


WARN = Level.WARN
ROWS = (
    # What looks right to who only looks for names.
    Row("the line in job_submit.lua is commented out", lambda s: own_lua(s, comment="-- "),
        "hook", "does not call us: the lines are there, in a comment", "Run 'gpushare configure'"),
    Row("it stands in a block that is", lambda s: s.file("job_submit.lua", "--[[ dofile('/x/gpushare_submit.lua') ]]"),
        "hook", "in a comment", "Run 'gpushare configure'"),
    Row("GPUSHARE_PYTHON does not exist", lambda s: (s.etc / "lib/python").unlink(),
        "prolog", "lib/python in the prolog does not exist here: nothing is sampled", "Install slurm-gpushare"),
    Row("GPUSHARE_PYTHON has no slurm-gpushare", lambda s: s.rewrite("lib/python", "exit 0", "echo No >&2; exit 1"),
        "sampler", "the sampler does not start with GPUSHARE_PYTHON=", "Install slurm-gpushare for that Python"),
    Row("the prolog only mentions us in a comment",
        lambda s: s.rewrite("site_prolog", f"{s.etc}/prolog.d", f"# {s.etc}/prolog.d"),
        "prolog", "site_prolog names us in a comment only): no job is profiled", "Run 'gpushare configure'"),
    Row("the epilog only mentions us in a comment",
        lambda s: s.rewrite("site_prolog", f"{s.etc}/prolog.d", f"true # {s.etc}/prolog.d"),
        "epilog", "names us in a comment only): samplers end late", "Run 'gpushare configure'"),
    Row("our own drop-in runs nothing", lambda s: (
            s.rewrite("prolog.d/50-gpushare", f"{s.etc}/lib/sl", f"# {s.etc}/lib/sl"),
            s.slurm(Prolog=f"{s.etc}/prolog.d/*")),
        "prolog", "50-gpushare runs nothing: no job is profiled", "--write"),
    Row("four shards a card on one node", lambda s: s.second_node(
            gres=parse_gres("gpu:v100_0:1,gpu:v100_1:1,shard:v100_0:4,shard:v100_1:4")),
        "shards", "n1: GPU 0 has 4 shards, gpushare.conf says 2", "Count=4 in gres.conf's shard line"),
    Row("memory by shards, of Slurm 26.11", lambda s: s.has(files={"cgroup.conf": "ConstrainDeviceMemory=yes\n"}),
        "constrain-memory", "holds each sharing job to half of a card's memory", "ConstrainDeviceMemory=no"),
    Row("a shard costs nothing", lambda s: s.partition(TRESBillingWeights="GRES/gpu=4,GRES/shard=0"),
        "billing", "a shard at 0 and a card at 4, which is 2 a shard: sharing is free", "Run 'gpushare configure'"),
    Row("a slurmd died of gres.conf", lambda s: s.second_node(states=frozenset({"down"}), responding=False),
        "nodes", "n1 is down (Slurm gives no reason): none of its cards is shared", "slurmd -G", WARN),
    Row("a node registered with too few shards", lambda s: (
            s.second_node(states=frozenset({"inval"})),
            s.has(reasons={"n1": "gres/shard count reported lower than configured (0 < 4)"})),
        "nodes", "n1 is inval (gres/shard count reported lower", "restart slurmd, and resume"),
    Row("Slurm oversubscribes", lambda s: s.partition(OverSubscribe="FORCE:4"),
        "partitions", "OverSubscribe=FORCE:4: Slurm puts several jobs on the same CPUs", "Set OverSubscribe=NO"),
    Row("Slurm preempts by suspending", lambda s: s.slurm(PreemptMode="GANG,SUSPEND", PreemptType="preempt/qos"),
        "preemption", "a suspended sharer keeps its GPU memory", "Set PreemptMode=REQUEUE"),
    Row("memory is not counted", lambda s: s.slurm(SelectTypeParameters="CR_CORE"),
        "select-plugin", "CR_CORE does not count memory", "Set SelectTypeParameters=CR_Core_Memory", WARN),
    Row("no PrologFlags", lambda s: s.slurm(PrologFlags="(null)"),
        "prolog-flags", "PrologFlags has no Alloc", "Run 'gpushare configure'"),
    Row("defer", lambda s: s.slurm(SchedulerParameters="defer,bf_continue"),
        "scheduler", "SchedulerParameters has defer", "Use the defaults", WARN),
    Row("intervals of minutes", lambda s: s.slurm(SchedulerParameters="sched_interval=300,bf_interval=180"),
        "scheduler", "sched_interval=300, bf_interval=180", "Use the defaults", WARN),
    Row("a site's script writes admin_comment after ours",
        lambda s: own_lua(s, after="local ours = slurm_job_submit\nfunction slurm_job_submit(d, p, u)\n"
                          "  local r = ours(d, p, u)\n  d.admin_comment = 'site'\n  return r\nend\n"),
        "hook", "after the line that runs ours: our tag is overwritten", "Move our lines to the end of the script"),
    # What any reader of the files sees.
    Row("JobSubmitPlugins without lua", lambda s: s.slurm(JobSubmitPlugins="(null)"),
        "hook", "JobSubmitPlugins lacks lua", "Set JobSubmitPlugins=lua"),
    Row("no client filter", lambda s: s.slurm(CliFilterPlugins="(null)"),
        "cli-filter", "no client filter", "Run 'gpushare configure'", WARN),
    Row("shards are not accounted", lambda s: s.slurm(AccountingStorageTRES="gres/gpu"),
        "accounting-tres", "lacks gres/shard", "Run 'gpushare configure'"),
    Row("a limit that sharing slips past", lambda s: s.limit("gres/gpu=2"),
        "limits", "counts gres/gpu and not gres/shard", "sacctmgr line"),
    Row("a limit with more shards than its GPUs have", lambda s: s.limit("gres/gpu=2,gres/shard=5"),
        "limits", "allows 5 shards, 2 GPUs have 4", "sacctmgr line"),
    Row("a prolog that runs what is missing", lambda s: (s.etc / "lib/slurm_gpushare/prolog.sh").unlink(),
        "prolog", "prolog.sh, which is missing: no job is profiled", "--write"),
    Row("a script that nobody may run", lambda s: (s.etc / "site_prolog").chmod(0o644),
        "task-prolog", "is not executable: every srun fails", "chmod 755"),
    Row("a partition that is not there", lambda s: s.ours(partitions=("gone",)),
        "partitions", "there is no partition gone", "Correct Partitions="),
    Row("types that are not by index", lambda s: s.second_node(gres=parse_gres("gpu:v100:2,shard:4")),
        "gpu-types", "n1: GPUs are not typed v100_0, v100_1", "Write one type an index"),
    Row("shards that are lost", lambda s: s.second_node(gres=parse_gres("gpu:v100_0:1,gpu:v100_1:1,shard:v100_0:2")),
        "lost-shards", "GPU 1 has 0 of 2 shards", "restart slurmctld"),
    Row("detection on a shared node", lambda s: s.file("gres.conf", "AutoDetect=nvml\n"),
        "autodetect", "AutoDetect=nvml for n0", "Set AutoDetect=off"),
    Row("another SlurmUser than the real one", lambda s: s.ours(slurm_user="games"),
        "SlurmUser", "SlurmUser is games in our settings, Slurm says slurm", "--write' again"),
    Row("Slurm upgraded", lambda s: s.ours(slurm_version="23.11.1"),
        "SlurmVersion", "SlurmVersion is 23.11.1 in our settings, Slurm says 24.11.5: no job", "--write' again"),
    Row("wider nodes than we were told", lambda s: s.ours(gpus_per_node=1),
        "GpusPerNode", "GpusPerNode is 1 in our settings, Slurm says 2", "--write' again"),
    Row("DefCpuPerGPU that we were not told", lambda s: s.partition(JobDefaults="DefCpuPerGPU=8"),
        "DefCpuPerGpu", "DefCpuPerGpu is nothing in our settings, Slurm says gpu:8", "--write' again"),
    Row("clocks apart", lambda s: s.has(asked_s=NOW + 60),
        "clock", "60 s apart", "Run chrony"),
    Row("select/linear", lambda s: s.slurm(SelectType="select/linear"),
        "select-plugin", "knows no shards", "Set SelectType=select/cons_tres"),
    Row("devices open to all jobs", lambda s: s.file("cgroup.conf", ""),
        "constrain-devices", "reaches other jobs' GPUs", "Set ConstrainDevices=yes", WARN),
)  # fmt: skip


def test_a_site_in_order_has_no_finding(site: Site) -> None:
    assert site.findings() == []
    own_lua(site)
    assert site.findings() == [], "with a job_submit.lua of its own that runs ours last"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.what)
def test_what_is_broken_is_named_with_what_to_do(site: Site, row: Row) -> None:
    row.broken(site)
    found = {item.check: item for item in site.findings()}
    assert row.check in found, found
    said = found[row.check]
    assert row.says in said.found
    assert row.fix in said.fix
    assert said.level is row.level
    assert "\n" not in said.found + said.fix


def test_all_nodes_away_is_a_failure_and_one_that_sleeps_is_none(site: Site) -> None:
    away = [replace(item, states=frozenset({"down"}), responding=False) for item in site.facts.nodes]
    asleep = [replace(item, states=frozenset({"idle", "powered_down"})) for item in site.facts.nodes]
    for nodes, levels in ((away, {Level.FAIL}), (asleep, set[Level]())):
        site.has(nodes=tuple(nodes))
        assert {item.level for item in site.findings()} == levels


class Submitted:
    """A Slurm that takes a held job, and says what its AdminComment is; ``TAG`` stands for a tag of ours."""

    def __init__(self, comment: str, refusal: str = "") -> None:
        self.comment, self.refusal, self.asked = comment, refusal, list[str]()

    def __call__(self, argv: list[str], _: float) -> CompletedProcess[str]:
        self.asked.append(argv[0])
        if argv[0] == "sbatch":
            self.token = next(word.partition(":")[2] for word in argv if word.startswith("--comment="))
            assert "--hold" in argv
            return CompletedProcess(argv, bool(self.refusal), "17;cluster\n", self.refusal)
        assert "17" in argv
        return CompletedProcess(argv, 0, self.comment.replace("TAG", f"GS1:probe;t={self.token}"), "")


@pytest.mark.parametrize(
    ("comment", "refusal", "level", "says"),
    [
        ("TAG", "", Level.PASS, "is tagged"),
        ("site:x TAG", "", Level.PASS, "is tagged"),
        ("(null)", "", Level.FAIL, "without our tag"),
        ("site:x", "", Level.FAIL, "its AdminComment is 'site:x'"),
        ("", "sbatch: error: Invalid account", Level.WARN, "Invalid account"),
    ],
)
def test_a_held_job_says_what_the_running_slurmctld_does(
    site: Site, comment: str, refusal: str, level: Level, says: str
) -> None:
    site.ours(hook_file=site.etc / "lib/python")
    slurm = Submitted(comment, refusal)
    (found,) = tag_of_a_job(site.facts, site.config, (), slurm)
    assert (found.level, found.check) == (level, "tag")
    assert says in found.found
    assert ("scancel" in slurm.asked) != bool(refusal), "no job is left"


def test_before_the_helpers_first_start_no_job_is_tried(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.ours(hook_file=site.etc / "none")
    monkeypatch.setattr(script_checks, "run_here", None)
    assert tag_of_a_job(site.facts, site.config) == []
