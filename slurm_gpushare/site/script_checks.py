"""Doctor's checks of what Slurm runs of ours: the Lua of hook and filter, prologs, epilogs and the task prolog."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess

from slurm_gpushare.protocol.files import is_there, read_or_empty, resource_dir
from slurm_gpushare.protocol.settings import Config
from slurm_gpushare.protocol.tag import parse_tag
from slurm_gpushare.protocol.tokens import new_token
from slurm_gpushare.site.current_setup import SiteSetup
from slurm_gpushare.site.finding import LINE, WRITE, Check, Finding, check, failed, passed, warned
from slurm_gpushare.site.site_files import lua_script
from slurm_gpushare.slurm.nodes import completing_stops_everybody

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


# A command by its whole path, at the start of a line of a shell script.
_COMMAND = re.compile(r"(?m)^[ \t]*(?:exec[ \t]+|source[ \t]+|\.[ \t]+)?(/[^\s;|&<>\"'$`()]+)")
_PYTHON = re.compile(r"(?m)^export GPUSHARE_PYTHON=(/\S+)")
_SHELL_COMMENT = re.compile(r"(?m)(?:^|(?<=\s))#.*$")


def is_executable(path: Path) -> bool:
    """Whether anybody may run it, as far as this user can tell."""
    try:
        return bool(path.stat().st_mode & 0o111)
    except OSError:
        return True


_KEYS = (
    ("Prolog", "prolog", "no job is profiled", "nodes drain with 'Prolog error'"),
    ("Epilog", "epilog", "samplers end late", "nodes drain with 'Epilog error'"),
    ("TaskProlog", "task-prolog", "plain srun fails inside shared jobs", "every srun fails"),
)


def _unfit(key: str, named: Iterable[Path], ours: Iterable[Path], loss: str) -> Finding | None:
    """The first of the scripts that a key names which is not there, or of ours which nobody may run."""
    for path in named:
        if not is_there(path):
            return failed(f"{key}={path} is missing: {loss}", WRITE)
    inert = next((path for path in ours if not is_executable(path)), None)
    return failed(f"{key}={inert} is not executable: {loss}", f"Run 'chmod 755 {inert}'.") if inert else None


@check("prolog")
def prologs(facts: SiteSetup, _: Config) -> Iterator[Finding]:
    """Prolog, epilog and task prolog call us, and what they run is there; the prolog runs when the job starts."""
    for key, name, loss, without in _KEYS:
        ours = our_scripts(facts, key)
        absent = [called for path in ours for called in called_scripts(path) if not is_there(called)]
        named = [Path(word) for word in facts.scripts(key) if "gpushare" in word and "*" not in word]
        if unfit := _unfit(key, named, ours, without):
            yield replace(unfit, check=name)
        elif not ours:
            where = _in_a_comment(facts, key)
            yield failed(f"{key} does not call us{where}: {loss}", LINE, name)
        elif absent:
            yield failed(f"{key} runs {absent[0]}, which is missing: {loss}", WRITE, name)
        elif idle := [path for path in ours if "gpushare" in path.name and not _COMMAND.search(_as_run(path))]:
            yield failed(f"{idle[0]} runs nothing: {loss}", WRITE, name)
        elif key == "Prolog" and (no_python := [path for path in _pythons(ours) if not is_there(path)]):
            found = f"GPUSHARE_PYTHON={no_python[0]} in the prolog does not exist here: nothing is sampled"
            yield failed(found, "Install slurm-gpushare there, or run 'gpushare configure --write' anew.")
        else:
            yield passed(f"{key} calls us", name)
    if not {"Alloc", "Contain"} & set(facts.words("PrologFlags")):
        yield failed(
            "PrologFlags has no Alloc: the prolog runs at a job's first step, after what it should have measured",
            LINE,
            "prolog-flags",
        )


@check("sampler")
def sampler(facts: SiteSetup, _: Config) -> Iterator[Finding]:
    """On a machine that has the prolog: the sampler's program starts with the Python that the prolog names."""
    for python in filter(is_there, _pythons(our_scripts(facts, "Prolog"))):
        argv = [str(python), "-I", "-c", "import slurm_gpushare.node.sampler, pynvml, psutil"]
        try:
            done = subprocess.run(argv, env={}, cwd="/", capture_output=True, text=True, timeout=60, check=False)
            said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1] if done.returncode else ""
        except (OSError, subprocess.TimeoutExpired) as why:
            said = str(why)
        if said:
            found = f"the sampler does not start with GPUSHARE_PYTHON={python}: {said}: nothing is measured"
            yield failed(found, "Install slurm-gpushare for that Python, or run 'gpushare configure --write'.")
        else:
            yield passed(f"starts with {python}")


def _in_a_comment(facts: SiteSetup, key: str) -> str:
    found = next((path for path in _scripts(facts, key) if "gpushare" in read_or_empty(path)), None)
    return f" ({found} names us in a comment only)" if found else ""


def _scripts(facts: SiteSetup, key: str) -> list[Path]:
    """The files that a key such as Prolog names, as far as they are on this machine."""
    found = []
    for path in filter(Path.is_absolute, map(Path, facts.scripts(key))):
        found += sorted(path.parent.glob(path.name)) if "*" in path.name else [path]
    return [path for path in found if path.is_file()]


def _as_run(script: Path) -> str:
    """A shell script without its comments."""
    return _SHELL_COMMENT.sub("", read_or_empty(script))


def our_scripts(facts: SiteSetup, key: str) -> list[Path]:
    """Those of what a key such as Prolog names that are ours, or run ours."""
    return [path for path in _scripts(facts, key) if "gpushare" in path.name or "gpushare" in _as_run(path)]


def called_scripts(script: Path, depth: int = 3) -> Iterator[Path]:
    """What `script` runs on our behalf, there or not: a site's own script may run ours, which runs the package's."""
    for called in map(Path, _COMMAND.findall(_as_run(script))):
        if "gpushare" not in script.name and "gpushare" not in str(called):
            continue  # the site's own affair
        yield called
        if depth > 1 and "gpushare" in called.name and is_there(called):
            yield from called_scripts(called, depth - 1)


def pythons(script: Path) -> list[Path]:
    """The Python that a script of ours has the sampler run by."""
    return [Path(path) for path in _PYTHON.findall(read_or_empty(script))]


def _pythons(scripts: list[Path]) -> list[Path]:
    """Of these scripts, and of those of ours that they run."""
    every = [*scripts, *(called for path in scripts for called in called_scripts(path))]
    return list(dict.fromkeys(python for path in every for python in pythons(path)))


@check("hold")
def hold_setup(facts: SiteSetup, config: Config) -> Iterator[Finding]:
    """What Slurm's configuration and gpushare.conf say about keeping a card that has just become empty."""
    scripts = [Path(script) for script in facts.scripts("EpilogSlurmctld")]
    ours = [path for path in scripts if "gpushare" in path.name] if facts.is_controller else []
    if unfit := _unfit("EpilogSlurmctld", ours, ours, "slurmctld may not start again"):
        yield unfit
    elif config.epilog_hold_s == 0:
        yield passed("EpilogHold=0: Slurm may start the next job on a whole card before the helper has looked")
    elif completing_stops_everybody(facts.config):
        yield warned(
            "CompleteWait is set: a job in its epilog keeps all others waiting, so no card is held",
            "Add reduce_completing_frag to SchedulerParameters, or remove CompleteWait.",
        )
    elif not any("gpushare" in path.name or "gpushare" in _as_run(path) for path in scripts):
        yield warned(
            "EpilogSlurmctld does not call us: the helper hears too late of a card that becomes empty",
            "Run 'gpushare configure' for the line and the script. The script must be there before slurmctld reads it.",
        )
    else:
        yield passed(f"EpilogSlurmctld calls us; a card is kept for {config.epilog_hold_s:g} s at the most")


PROLOG_CHECKS: tuple[Check, ...] = (prologs, sampler, hold_setup)
