"""Doctor's checks of prolog, epilog, task prolog and EpilogSlurmctld, and of the sampler that they start. What stands
in a comment is no call."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from slurm_gpushare.protocol.files import is_there, read_or_empty
from slurm_gpushare.protocol.settings import Config
from slurm_gpushare.site.current_setup import SiteSetup
from slurm_gpushare.site.finding import LINE, WRITE, Check, Finding, check, failed, passed, warned
from slurm_gpushare.slurm.nodes import completing_stops_everybody

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


@check("prolog")
def prologs(facts: SiteSetup, _: Config) -> Iterator[Finding]:
    """Prolog, epilog and task prolog call us, and what they run is there; the prolog runs when the job starts."""
    for key, name, loss, without in _KEYS:
        ours = our_scripts(facts, key)
        absent = [called for path in ours for called in called_scripts(path) if not is_there(called)]
        named = [Path(word) for word in facts.scripts(key) if "gpushare" in word and "*" not in word]
        if gone := [path for path in named if not is_there(path)]:
            yield failed(f"{key}={gone[0]} is missing: {without}", WRITE, name)
        elif inert := [path for path in ours if not is_executable(path)]:
            yield failed(f"{inert[0]} is not executable: {without}", f"Run 'chmod 755 {inert[0]}'.", name)
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
    if absent := [path for path in ours if not is_there(path)]:
        yield failed(f"EpilogSlurmctld={absent[0]} is missing: slurmctld may not start again without it", WRITE)
        return
    if inert := [path for path in ours if not is_executable(path)]:
        found = f"EpilogSlurmctld={inert[0]} is not executable: slurmctld may not start again"
        yield failed(found, f"Run 'chmod 755 {inert[0]}'.")
        return
    if config.epilog_hold_s == 0:
        yield passed("EpilogHold=0: Slurm may start the next job on a whole card before the helper has looked")
        return
    if completing_stops_everybody(facts.config):
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
