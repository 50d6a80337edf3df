"""Doctor's checks of owners and modes: our settings and directories, and what Slurm runs of ours, are for root and
SlurmUser alone to change."""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from slurm_gpushare.config import Config
from slurm_gpushare.last_good import last_good_path
from slurm_gpushare.site.current_setup import SiteSetup
from slurm_gpushare.site.finding import Finding, failed, passed, warned
from slurm_gpushare.site.script_checks import called_scripts, lua_files, our_scripts, pythons
from slurm_gpushare.site.weak_places import Trusted, may_write, weak_places
from slurm_gpushare.slurm.configuration import slurm_user
from slurm_gpushare.telemetry.spool import INCOMING, INCOMING_MODE
from slurm_gpushare.users import uid_of, user_name

Level = Callable[[str, str, str], Finding]
Guarded = tuple[Path, str, str]
"""A path, who should own it, and what others could do who write there."""


def _look(check: str, guarded: Iterable[Guarded], trusted: Trusted, seen: set[Path], level: Level) -> Iterator[Finding]:
    """A finding for each weak place, once, however many paths lead through it."""
    for path, owner, loss in guarded:
        for weak in weak_places(path, trusted, owner):
            if weak.path not in seen:
                seen.add(weak.path)
                yield level(check, f"{weak.found}: {loss}", weak.fix)


def file_owners(config: Config) -> Iterator[Finding]:
    """Settings, store, hook's file and directories: nobody else may write there."""
    found = list(_look("owners", _guarded(config), Trusted.users(config.slurm_user), set(), failed))
    yield from found or [passed("owners", "only root and SlurmUser can change our settings, files and directories")]


def _guarded(config: Config) -> Iterator[Guarded]:
    user = config.slurm_user
    settings = "who writes there changes this site's settings"
    if config.source is not None:
        yield config.source, "root", settings
    yield last_good_path(), user, settings
    if (named := config.url_file or config.store_file) is not None:
        yield named, user, "who writes there changes what is known of every workload"
    yield config.hook_file, user, "who writes there tells the hook whose a token is"
    yield config.spool_dir, user, "who writes there takes records away, or has nodes hold cards"
    yield config.public_dir, user, "who writes there tells users what is not so"
    yield config.state_dir, user, "who writes there stops the helper or a node's samplers"


def script_owners(facts: SiteSetup, config: Config) -> Iterator[Finding]:
    """What Slurm runs of ours: nobody else may change it. Of the package's own files it is a warning: their owner may
    be who installed it."""
    daemons = (slurm_user(facts.config).name, facts.config.get("SlurmdUser", "").partition("(")[0])
    trusted, seen = Trusted.users(config.slurm_user, *filter(None, daemons)), set[Path]()
    scripts = list(_scripts(facts))
    package = [
        (called, "root", loss) for path, _, loss in scripts for called in (*called_scripts(path), *pythons(path))
    ]
    found = [
        *_look("script-owners", scripts, trusted, seen, failed),
        *_look("script-owners", package, trusted, seen, warned),
    ]
    yield from found or [passed("script-owners", "only root and SlurmUser can change what Slurm runs of ours")]


def _scripts(facts: SiteSetup) -> Iterator[Guarded]:
    for name, where in (("job_submit.lua", "in slurmctld"), ("cli_filter.lua", "in everybody's sbatch and srun")):
        if facts.is_controller or name != "job_submit.lua":
            for path in lua_files(facts, name):
                yield path, "root", f"who writes there has code run {where}"
    for key, where in (
        ("Prolog", "as root on the nodes"),
        ("Epilog", "as root on the nodes"),
        ("TaskProlog", "as everybody on the nodes"),
        ("EpilogSlurmctld", "as SlurmUser on the controller"),
    ):
        for path in our_scripts(facts, key):
            yield path, "root", f"who writes there has code run {where}"


def incoming_mode(config: Config) -> Iterator[Finding]:
    """Anyone may leave a record; nobody else may list, read or remove it, and the helper must be able to."""
    incoming = config.spool_dir / INCOMING
    try:
        about = incoming.stat()
    except OSError:
        return  # `spool` says it
    mode = stat.S_IMODE(about.st_mode)
    if mode != INCOMING_MODE:
        loss = (
            "users can remove each other's records" if mode & 0o022 and not mode & stat.S_ISVTX
            else "users can list each other's records" if mode & 0o044
            else "users cannot leave records of their own"
        )  # fmt: skip
        fix = f"Run: chmod {INCOMING_MODE:o} {incoming}"
        yield failed("spool-mode", f"{incoming} has mode {mode:o} in place of {INCOMING_MODE:o}: {loss}", fix)
    uid = uid_of(config.slurm_user)
    if uid is not None and about.st_uid != uid:
        yield failed(
            "spool-mode",
            f"{incoming} belongs to {user_name(about.st_uid)}: the helper cannot remove what it has taken in",
            f"Run: chown {config.slurm_user} {incoming}",
        )


def helpers_directories(config: Config) -> Iterator[Finding]:
    """On the controller: the helper can write where it must, nodes reach the spool, and users what is published."""
    user = config.slurm_user
    kept = (config.hook_file, config.store_file)
    parents = [file.parent for file in kept if file is not None]
    for path in dict.fromkeys((config.state_dir, config.spool_dir, config.public_dir, *parents)):
        try:
            about = path.stat()
        except OSError:
            continue  # not there yet, or not this user's to see
        if not may_write(about, user):
            found = f"{path} is not for {user} to write, who runs the helper"
            yield failed("helper-directory", found, f"Run: chown {user} {path}")
        if path == config.spool_dir and not about.st_mode & stat.S_IXOTH:
            found = f"{path} is closed to others: users leave no records, and nodes may not either"
            yield failed("helper-directory", found, f"Run: chmod o+x {path}")
        if path == config.public_dir and not about.st_mode & stat.S_IXOTH:
            found = f"{path} is closed to others: users are not told why their jobs wait, nor what sharing costs them"
            yield warned("helper-directory", found, f"Run: chmod o+rx {path}")
