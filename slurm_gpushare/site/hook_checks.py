"""Doctor's checks of the hook in slurmctld and of the filter in everybody's sbatch and srun: their scripts in Lua, and
what the running slurmctld makes of a job with our word."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from subprocess import CompletedProcess

from slurm_gpushare.protocol.files import is_there, read_or_empty, resource_dir
from slurm_gpushare.protocol.settings import Config
from slurm_gpushare.protocol.tag import parse_tag
from slurm_gpushare.protocol.tokens import new_token
from slurm_gpushare.site.current_setup import SiteSetup
from slurm_gpushare.site.finding import LINE, WRITE, Check, Finding, check, failed, passed, warned
from slurm_gpushare.site.site_files import lua_script

_DOFILE = re.compile(r"""dofile\s*[(,]\s*["']([^"']+)["']""")
_LUA_TEXT_OR_COMMENT = re.compile(
    r"""("(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')|--\[(=*)\[.*?\]\2\]|--[^\n]*""", re.DOTALL
)
_TAKES_BACK = re.compile(r"admin_comment\s*=[^=]|function\s+slurm_job_submit\b|slurm_job_submit\s*=[^=]")
TRIAL_NAME = "gpushare-trial"
_AROUND = ("SLURM_", "SBATCH_", "SALLOC_", "SRUN_")


def without_comments(lua: str) -> str:
    """A Lua script as it is run."""
    return _LUA_TEXT_OR_COMMENT.sub(lambda found: found[1] or " ", lua)


@check("hook")
def hook(facts: SiteSetup, config: Config) -> Iterator[Finding]:
    """job_submit: the plugin, our script, and LuaSQL for its Lua. Only slurmctld reads the script."""
    if "lua" not in {word.removeprefix("job_submit/") for word in facts.words("JobSubmitPlugins")}:
        found = f"JobSubmitPlugins lacks lua: no job is tagged, and requests for gpu:{config.gpu_models[0]} fail"
        yield failed(found, "Set JobSubmitPlugins=lua.")
    elif facts.is_controller:
        yield from _lua_faults(facts, config, "job_submit.lua", "slurmctld does not start without it")
        own = without_comments(facts.files.get("job_submit.lua", ""))
        calls = list(_DOFILE.finditer(own))
        ours = [call.end() for call in calls if "gpushare" in call[1]]
        if ours and (later := _TAKES_BACK.search(own, ours[-1])):
            yield failed(
                f"{facts.etc / 'job_submit.lua'} has '{later[0].strip()}' after the line that runs ours: our tag is "
                "overwritten, or never written",
                "Move our lines to the end of the script: its functions then have the first word, and ours the last.",
            )
    yield from _lua_sqlite(facts)


@check("cli-filter")
def cli_filter(facts: SiteSetup, config: Config) -> Iterator[Finding]:
    """The client filter, in everybody's sbatch and srun."""
    if "lua" in {word.removeprefix("cli_filter/") for word in facts.words("CliFilterPlugins")}:
        yield from _lua_faults(facts, config, "cli_filter.lua", "sbatch, srun and salloc fail without it")
    else:
        yield warned(
            "no client filter: srun with --gpus=1 fails inside shared jobs, "
            f"with gpu:{config.gpu_models[0]} everywhere, and --comment=gpushare:NAME is not turned into a token",
            LINE,
        )


def _lua_faults(facts: SiteSetup, config: Config, name: str, loss: str) -> Iterator[Finding]:
    """That the script is there, runs ours, is whole, of this release, and knows the nodes that share."""
    own = facts.files.get(name)
    if own is None:
        yield failed(f"{facts.etc / name} is missing or cannot be read: {loss}", WRITE)
        return
    called = _called_lua(own)
    if absent := [path for path in called if not path.is_file()]:
        yield failed(f"{facts.etc / name} runs {absent[0]}, which is missing", WRITE)
        return
    texts = [own, *map(read_or_empty, called)]
    whole = lua_script(resource_dir("lua_bridge"), name, facts.models_of_nodes(config.partitions, config.gpu_models))
    if whole in texts:
        yield passed(f"{name} is this release's, for these nodes")
    elif not any("gpushare" in without_comments(text) for text in texts):
        but = ": the lines are there, in a comment" if "gpushare" in own else ""
        yield failed(f"{facts.etc / name} does not call us{but}", LINE)
    elif any(text and whole.startswith(text.rstrip()) for text in texts):
        yield failed(f"{name} is cut off: {loss}", WRITE)
    else:
        yield warned(f"{name} was written by another release, or for other nodes or another GPU model", WRITE)


def lua_files(facts: SiteSetup, name: str) -> list[Path]:
    """A Lua script beside slurm.conf, and those of ours that it runs."""
    own = facts.files.get(name)
    return [] if own is None else [facts.etc / name, *_called_lua(own)]


def _called_lua(text: str) -> list[Path]:
    return [Path(path) for path in _DOFILE.findall(without_comments(text)) if "gpushare" in path]


def _lua_sqlite(facts: SiteSetup) -> Iterator[Finding]:
    plugin = Path(facts.config.get("PluginDir", "").split(":")[0]) / "job_submit_lua.so"
    version = re.search(rb"liblua-?(5\.\d)", plugin.read_bytes()) if plugin.is_file() else None
    if version is None:
        return  # not the controller
    number = version[1].decode()
    roots = map(Path, ("/usr/lib", "/usr/lib64", "/usr/local/lib"))
    if any(path for root in roots for path in root.glob(f"**/lua/{number}/luasql/sqlite3.so")):
        yield passed(f"LuaSQL for Lua {number}, which slurmctld's plugin uses", "luasql")
    else:
        found = f"slurmctld's Lua {number} has no luasql.sqlite3: every job goes untagged"
        yield failed(found, "Install lua-sql-sqlite3 (Debian) or luasql for that Lua.", "luasql")


Run = Callable[[Sequence[str], float], CompletedProcess[str]]
"""Runs a command as some user, within a time in seconds; code 124 where that was too short."""


def last_line(answer: CompletedProcess[str]) -> str:
    """Of its words on stderr."""
    return (answer.stderr.strip().splitlines() or [""])[-1].strip()


def run_here(argv: Sequence[str], timeout_s: float) -> CompletedProcess[str]:
    """As the user who runs us, without what an outer job has set."""
    env = {name: value for name, value in os.environ.items() if name == "SLURM_CONF" or not name.startswith(_AROUND)}
    try:
        return subprocess.run(
            list(argv), stdin=subprocess.DEVNULL, capture_output=True, text=True, env=env, timeout=timeout_s
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return CompletedProcess(argv, 124, "", "")
    except OSError as why:
        return CompletedProcess(argv, 127, "", f"{argv[0]}: {why.strerror}")


@check("tag")
def tag_of_a_job(facts: SiteSetup, config: Config, extra: Sequence[str] = (), run: Run = run_here) -> Iterator[Finding]:
    """A job with our word, held and cancelled at once: what the running slurmctld makes of it, and not what files say.

    Nothing is tried where the answer is known: no helper has ever run, or sharing is off.
    """
    partition = facts.partition(next(iter(config.partitions), ""))
    if partition is None or config.policy == "off" or not is_there(config.hook_file):
        return
    token = new_token()
    where = extra or [f"--partition={partition.name}"]
    submitted = run(
        ["sbatch", "--parsable", "--hold", f"--comment=gpushare:{token}", "--gres=gpu:1", "--time=1",
         f"--job-name={TRIAL_NAME}", "--output=/dev/null", *where, "--wrap=true"], 30.0,
    )  # fmt: skip
    if submitted.returncode:
        found = f"no job could be submitted to see whether it is tagged: {last_line(submitted)}"
        yield warned(found, "Run doctor as a user who may submit jobs there.")
        return
    job = re.split(r"[;\n]", submitted.stdout)[0]
    said = run(["squeue", "-h", "-j", job, "-O", "admin_comment:0"], 30.0).stdout.strip()
    run(["scancel", job], 30.0)
    tag = parse_tag(said)
    if tag is not None and tag.token == token:
        yield passed("a job with our word is tagged by the running slurmctld")
    else:
        instead = f"its AdminComment is '{said[:40]}'" if said not in {"", "(null)"} else last_line(submitted)
        yield failed(
            f"a job with our word came through the running slurmctld without our tag: {instead or 'nobody says why'}",
            "job_submit.lua must run ours, and nothing after it may write admin_comment; see slurmctld's log for "
            "'gpushare'. A slurmctld that started with a broken script goes on with the one before.",
        )


HOOK_CHECKS: tuple[Check, ...] = (hook, cli_filter)
