"""Doctor's checks of the scripts that Slurm runs: those in Lua, without which nobody's ``gpu:MODEL`` is understood, and
the prologs."""

from __future__ import annotations

import re
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from slurm_gpushare.protocol.files import resource_dir
from slurm_gpushare.protocol.settings import Config
from slurm_gpushare.site.current_setup import SiteSetup
from slurm_gpushare.site.finding import Finding, failed, passed, warned
from slurm_gpushare.site.site_files import lua_script
from slurm_gpushare.site.units import HOMES, TEMPORARY, UnitSite
from slurm_gpushare.slurm.configuration import slurm_user

Check = Callable[[SiteSetup, Config], Iterable[Finding]]

_WRITE = "Run 'gpushare configure --write'."
# A command by its whole path, at the start of a line of a shell script.
_COMMAND = re.compile(r"(?m)^[ \t]*(?:exec[ \t]+|source[ \t]+|\.[ \t]+)?(/[^\s;|&<>\"'$`()]+)")
_PYTHON = re.compile(r"(?m)^export GPUSHARE_PYTHON=(/\S+)")
_DOFILE = re.compile(r"""dofile\s*[(,]\s*["']([^"']+)["']""")


def read_or_empty(path: Path) -> str:
    """A file's text; empty where there is none to read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def hook(facts: SiteSetup, config: Config) -> Iterator[Finding]:
    """job_submit: the plugin, our script, and LuaSQL for its Lua. Only slurmctld reads the script."""
    if "lua" not in {word.removeprefix("job_submit/") for word in facts.words("JobSubmitPlugins")}:
        yield failed(
            "hook",
            f"JobSubmitPlugins lacks lua: no job is tagged, and requests for gpu:{config.gpu_models[0]} fail",
            "Set JobSubmitPlugins=lua.",
        )
    elif facts.is_controller:
        yield from _script("hook", facts, config, "job_submit.lua", "slurmctld does not start without it")
    yield from _lua_sqlite(facts)


def cli_filter(facts: SiteSetup, config: Config) -> Iterator[Finding]:
    if "lua" in {word.removeprefix("cli_filter/") for word in facts.words("CliFilterPlugins")}:
        yield from _script("cli-filter", facts, config, "cli_filter.lua", "sbatch, srun and salloc fail without it")
    else:
        yield warned(
            "cli-filter",
            "no client filter: srun with --gpus=1 fails inside shared jobs, "
            f"with gpu:{config.gpu_models[0]} everywhere, and --comment=gpushare:NAME is not turned into a token",
            "Run 'gpushare configure' for the line.",
        )


def _script(check: str, facts: SiteSetup, config: Config, name: str, loss: str) -> Iterator[Finding]:
    """That the script is there, whole, of this release, and knows the nodes that share."""
    own = facts.files.get(name)
    if own is None:
        yield failed(check, f"{facts.etc / name} is missing or cannot be read: {loss}", _WRITE)
        return
    called = _called_lua(own)
    if absent := [path for path in called if not path.is_file()]:
        yield failed(check, f"{facts.etc / name} runs {absent[0]}, which is missing", _WRITE)
        return
    texts = [own, *(read_or_empty(path) for path in called)]
    if not any("gpushare" in text for text in texts):
        yield failed(check, f"{facts.etc / name} does not call us", "Run 'gpushare configure' for the lines.")
        return
    models = facts.models_of_nodes(config.partitions, config.gpu_models)
    whole = lua_script(resource_dir("lua_bridge"), name, models)
    if whole in texts:
        yield passed(check, f"{name} is this release's, for these nodes")
    elif any(text and whole.startswith(text.rstrip()) for text in texts):
        yield failed(check, f"{name} is cut off: {loss}", _WRITE)
    else:
        yield warned(check, f"{name} was written by another release, or for other nodes or another GPU model", _WRITE)


def _lua_sqlite(facts: SiteSetup) -> Iterator[Finding]:
    plugin = Path(facts.config.get("PluginDir", "").split(":")[0]) / "job_submit_lua.so"
    if not plugin.is_file():
        return  # not the controller
    version = re.search(rb"liblua-?(5\.\d)", plugin.read_bytes())
    if version is None:
        return
    number = version[1].decode()
    places = [
        path
        for root in ("/usr/lib", "/usr/lib64", "/usr/local/lib")
        for path in Path(root).glob(f"**/lua/{number}/luasql/sqlite3.so")
    ]
    if places:
        yield passed("luasql", f"LuaSQL for Lua {number}, which slurmctld's plugin uses")
    else:
        yield failed(
            "luasql",
            f"slurmctld's Lua {number} has no luasql.sqlite3: every job goes untagged",
            "Install lua-sql-sqlite3 (Debian) or luasql for that Lua.",
        )


def prologs(facts: SiteSetup, _: Config) -> Iterator[Finding]:
    """Prolog, epilog and task prolog call us, and what they run is there."""
    for key, check, loss in (
        ("Prolog", "prolog", "no job is profiled"),
        ("Epilog", "epilog", "samplers end late"),
        ("TaskProlog", "task-prolog", "plain srun fails inside shared jobs"),
    ):
        ours = our_scripts(facts, key)
        absent = [called for path in ours for called in called_scripts(path) if not is_there(called)]
        named = [Path(name) for name in facts.scripts(key) if "gpushare" in name and "*" not in name]
        if gone := [path for path in named if not is_there(path)]:
            yield failed(check, f"{key}={gone[0]} is missing: {_WITHOUT[key]}", _WRITE)
        elif inert := [path for path in ours if not is_executable(path)]:
            yield failed(check, f"{inert[0]} is not executable: {_WITHOUT[key]}", f"Run 'chmod 755 {inert[0]}'.")
        elif not ours:
            yield failed(check, f"{key} does not call us: {loss}", "Run 'gpushare configure' for the line.")
        elif absent:
            yield failed(check, f"{key} runs {absent[0]}, which is missing: {loss}", _WRITE)
        else:
            yield passed(check, f"{key} calls us")


_WITHOUT = {
    "Prolog": "nodes drain with 'Prolog error'",
    "Epilog": "nodes drain with 'Epilog error'",
    "TaskProlog": "every srun fails",
}


def is_executable(path: Path) -> bool:
    """Whether anybody may run it, as far as this user can tell."""
    try:
        return bool(path.stat().st_mode & 0o111)
    except OSError:
        return True


def _glob(pattern: str) -> list[Path]:
    path = Path(pattern)
    if not path.is_absolute():
        return []
    return sorted(path.parent.glob(path.name)) if "*" in path.name else [path]


def _is_ours(script: Path) -> bool:
    return "gpushare" in script.name or "gpushare" in read_or_empty(script)


def our_scripts(facts: SiteSetup, key: str) -> list[Path]:
    """Those of what a key such as Prolog names that are ours, or run ours."""
    scripts = [path for pattern in facts.scripts(key) for path in _glob(pattern) if path.is_file()]
    return [path for path in scripts if _is_ours(path)]


def called_scripts(script: Path, depth: int = 3) -> Iterator[Path]:
    """What `script` runs on our behalf, there or not: a site's own script may run ours, which runs the package's."""
    for called in map(Path, _COMMAND.findall(read_or_empty(script))):
        if "gpushare" not in script.name and "gpushare" not in str(called):
            continue  # the site's own affair
        yield called
        if depth > 1 and "gpushare" in called.name and is_there(called):
            yield from called_scripts(called, depth - 1)


def pythons(script: Path) -> list[Path]:
    """The Python that a script of ours has the sampler run by."""
    return [Path(path) for path in _PYTHON.findall(read_or_empty(script))]


def lua_files(facts: SiteSetup, name: str) -> list[Path]:
    """A Lua script beside slurm.conf, and those of ours that it runs."""
    own = facts.files.get(name)
    return [] if own is None else [facts.etc / name, *_called_lua(own)]


def _called_lua(text: str) -> list[Path]:
    return [Path(path) for path in _DOFILE.findall(text) if "gpushare" in path]


def is_there(path: Path) -> bool:
    """Whether a file exists, as far as this user can tell."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


SCRIPT_CHECKS: tuple[Check, ...] = (hook, cli_filter, prologs)


# Doctor's check of the systemd units that are installed: do they fit the settings, which may have changed since?


FOLDERS = tuple(
    Path(name)
    for name in (
        "/etc/systemd/system",
        "/run/systemd/system",
        "/usr/local/lib/systemd/system",
        "/usr/lib/systemd/system",
    )
)
"""Where systemd looks for a unit, the first counts. Drop-ins are read from all."""
_FIX = (
    "Run 'gpushare configure --write', copy its systemd/gpushare-* to /etc/systemd/system, then: "
    "systemctl daemon-reload. Restart the helper."
)
_YES = frozenset({"yes", "true", "on", "1"})

Directives = Mapping[str, Sequence[str]]


def installed_units(facts: SiteSetup, config: Config) -> Iterator[Finding]:
    """On the controller: the helper's units let it write and see what gpushare.conf names."""
    if not facts.is_controller:
        return
    found = {name: said for name in _NEEDS if (said := _read(name)) is not None}
    for name, said in found.items():
        command = next(iter(" ".join(said.get("ExecStart", [])[-1:]).split()), "").lstrip("@-:+!")
        site = UnitSite(Path(command or "/"), slurm_user(facts.config).name, config, facts.etc)
        if faults := list(_faults(said, site, [path for need in _NEEDS[name] for path in getattr(site, need)])):
            yield warned("units", f"{name} {', '.join(faults)}", _FIX)
            return  # the others are of the same time
    if found:
        yield passed("units", "the helper's units fit these settings")


_NEEDS = {
    "gpushare-backfill.service": ("state", "store", "spool"),
    "gpushare-watchdog.service": ("store", "spool"),
    "gpushare-metrics.service": ("store",),
}


def _faults(said: Directives, site: UnitSite, needed: Sequence[Path]) -> Iterator[str]:
    if not site.command.exists():
        yield f"starts {site.command}, which is not there"
    if (user := _last(said, "User")) != site.user:
        yield f"runs as {user or 'root'}, and SlurmUser is {site.user}"
    if _last(said, "ProtectSystem") == "strict":
        allowed = list(_writable(said))
        for path in needed:
            if not any(path.is_relative_to(place) for place in allowed):
                yield f"does not let it write {path}"
    if _last(said, "ProtectHome") in _YES | {"tmpfs"} and site.needs(*HOMES):
        yield "hides home directories, and something that it needs is in one"
    if _last(said, "PrivateTmp") in _YES and site.needs(*TEMPORARY):
        yield "hides /tmp, and something that it needs is there"
    set_here = [word.partition("=")[0] for word in _words(said, "Environment")]
    if site.environment and "EnvironmentFile" not in said and not {"SLURM_CONF", "GPUSHARE_CONF"} & set(set_here):
        yield f"does not say that slurm.conf is in {site.etc}"


def _writable(said: Directives) -> Iterator[Path]:
    yield from (Path(word.lstrip("-+")) for word in _words(said, "ReadWritePaths"))
    for key, parent in (("RuntimeDirectory", "/run"), ("StateDirectory", "/var/lib")):
        yield from (Path(parent, word) for word in _words(said, key))


def _last(said: Directives, key: str) -> str:
    return said[key][-1] if said.get(key) else ""


def _words(said: Directives, key: str) -> Iterator[str]:
    for value in said.get(key, ()):
        with suppress(ValueError):  # a quote without an end
            yield from (word.replace("%%", "%") for word in shlex.split(value))


def _read(name: str) -> Directives | None:
    """The unit's settings with its drop-ins; None if it is not installed, or masked by a link to /dev/null."""
    unit = next((folder / name for folder in FOLDERS if (folder / name).exists()), None)
    if unit is None or not unit.is_file():
        return None
    drop_ins = {path.name: path for folder in reversed(FOLDERS) for path in (folder / f"{name}.d").glob("*.conf")}
    found: dict[str, list[str]] = defaultdict(list)
    for path in (unit, *(drop_ins[name] for name in sorted(drop_ins))):
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""  # a link to nowhere
        for line in text.splitlines():
            key, equals, value = (part.strip() for part in line.partition("="))
            if equals and not key.startswith(("#", ";", "[")):
                found[key] = [*found[key], value] if value else []  # an empty one takes back those before
    return dict(found)
