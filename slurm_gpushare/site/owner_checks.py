"""Doctor's checks of owners and modes: our settings and directories, and what Slurm runs of ours, are for root and
SlurmUser alone to change."""

from __future__ import annotations

import grp
import os
import pwd
import shlex
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from slurm_gpushare.node.delivery import INCOMING, INCOMING_MODE
from slurm_gpushare.protocol.files import uid_of, user_name
from slurm_gpushare.protocol.settings import Config
from slurm_gpushare.protocol.settings_in_force import last_good_path
from slurm_gpushare.site.current_setup import SiteSetup
from slurm_gpushare.site.finding import Check, Finding, check, failed, warned
from slurm_gpushare.site.script_checks import called_scripts, lua_files, our_scripts, pythons
from slurm_gpushare.slurm.nodes import slurm_user

Level = Callable[[str, str], Finding]
Guarded = tuple[Path, str, str]
"""A path, who should own it, and what others could do who write there."""


def _look(guarded: Iterable[Guarded], trusted: Trusted, seen: set[Path], level: Level) -> Iterator[Finding]:
    """A finding for each weak place, once, however many paths lead through it."""
    for path, owner, loss in guarded:
        for place, found, fix in weak_places(path, trusted, owner):
            if place not in seen:
                seen.add(place)
                yield level(f"{found}: {loss}", fix)


@check("owners", "only root and SlurmUser can change our settings, files and directories")
def file_owners(config: Config) -> Iterator[Finding]:
    """Settings, store, hook's file and directories: nobody else may write there."""
    yield from _look(_guarded(config), Trusted.users(config.slurm_user), set(), failed)


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


@check("script-owners", "only root and SlurmUser can change what Slurm runs of ours")
def script_owners(facts: SiteSetup, config: Config) -> Iterator[Finding]:
    """What Slurm runs of ours: nobody else may change it. Of the package's own files it is a warning: their owner may
    be who installed it."""
    daemons = (slurm_user(facts.config).name, facts.config.get("SlurmdUser", "").partition("(")[0])
    trusted, seen = Trusted.users(config.slurm_user, *filter(None, daemons)), set[Path]()
    scripts = list(_scripts(facts))
    package = [
        (called, "root", loss) for path, _, loss in scripts for called in (*called_scripts(path), *pythons(path))
    ]
    yield from _look(scripts, trusted, seen, failed)
    yield from _look(package, trusted, seen, warned)


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


@check("spool-mode")
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
        found = f"{incoming} has mode {mode:o} in place of {INCOMING_MODE:o}: {loss}"
        yield failed(found, f"Run: chmod {INCOMING_MODE:o} {incoming}")
    uid = uid_of(config.slurm_user)
    if uid is not None and about.st_uid != uid:
        found = f"{incoming} belongs to {user_name(about.st_uid)}: the helper cannot remove what it has taken in"
        yield failed(found, f"Run: chown {config.slurm_user} {incoming}")


@check("helper-directory")
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
            yield failed(found, f"Run: chown {user} {path}")
        if path == config.spool_dir and not about.st_mode & stat.S_IXOTH:
            found = f"{path} is closed to others: users leave no records, and nodes may not either"
            yield failed(found, f"Run: chmod o+x {path}")
        if path == config.public_dir and not about.st_mode & stat.S_IXOTH:
            found = f"{path} is closed to others: users are not told why their jobs wait, nor what sharing costs them"
            yield warned(found, f"Run: chmod o+rx {path}")


@dataclass(frozen=True, slots=True)
class Trusted:
    """Who may change what we go by."""

    uids: frozenset[int]
    gids: frozenset[int]
    """Groups of their own: a file that such a group may write is still theirs."""

    @classmethod
    def users(cls, *users: str) -> Trusted:
        """Root and these, by name or number."""
        uids = {0, *(uid for user in users if (uid := uid_of(user)) is not None)}
        gids = {0}
        for uid in uids:
            with suppress(KeyError):
                gids.add(pwd.getpwuid(uid).pw_gid)
        return cls(frozenset(uids), frozenset(gids))


def weak_places(path: Path, trusted: Trusted, owner: str = "root") -> Iterator[tuple[Path, str, str]]:
    """Where anybody else could change `path` or put another in its place, what is wrong there, and the fix.
    `owner` is who should have it.

    What is not there, or not this user's to see, is passed over.
    """
    real = Path(os.path.realpath(path))
    for place in _way(path):
        with suppress(OSError):
            found = [*_faults(place.stat(), trusted, owner if place in (path, real) else "root")]
            if found := found + list(_link_faults(place, trusted)):
                what = " and ".join(fault for fault, _ in found)
                commands = "; ".join(f"{command} {shlex.quote(str(place))}" for _, command in found)
                yield place, f"{place} {what}", f"Run: {commands}"


def _way(path: Path) -> Iterable[Path]:
    """The path, every link on the way to its file, the file, and all directories above any of these."""
    starts, found = [path, Path(os.path.realpath(path))], dict[Path, None]()
    for start in starts:  # grows by where links lead: each may be in a directory of its own
        for place in (start, *start.parents):
            if place not in found:
                found[place] = None
                with suppress(OSError):  # no link
                    target = os.path.join(os.path.realpath(place.parent), os.readlink(place))
                    starts.append(Path(os.path.normpath(target)))
    return found


def _link_faults(place: Path, trusted: Trusted) -> Iterator[tuple[str, str]]:
    """In a sticky directory whoever owns a link may let it lead elsewhere."""
    about = place.lstat()
    if stat.S_ISLNK(about.st_mode) and about.st_uid not in trusted.uids and place.parent.stat().st_mode & stat.S_ISVTX:
        yield f"is a link of {user_name(about.st_uid)}", "chown -h root"


def _faults(about: os.stat_result, trusted: Trusted, owner: str) -> Iterator[tuple[str, str]]:
    """What is wrong, and the command that mends it."""
    if about.st_uid not in trusted.uids:
        yield f"belongs to {user_name(about.st_uid)}", f"chown {owner}"
    if stat.S_ISDIR(about.st_mode) and about.st_mode & stat.S_ISVTX:
        return  # others may add files, and change none
    if about.st_mode & stat.S_IWOTH:
        yield "can be written by everybody", "chmod go-w"
    elif about.st_mode & stat.S_IWGRP and about.st_gid not in trusted.gids:
        yield f"can be written by group {_group_name(about.st_gid)}", "chmod g-w"


def may_write(about: os.stat_result, user: str) -> bool:
    """Whether the user, by name or number, may write there; taken for granted of one whom nobody knows here."""
    uid = uid_of(user)
    if not uid:
        return True
    if about.st_uid == uid:
        return bool(about.st_mode & stat.S_IWUSR)
    try:
        entry = pwd.getpwuid(uid)
        groups = os.getgrouplist(entry.pw_name, entry.pw_gid)
    except KeyError:
        groups = []
    return bool(about.st_mode & (stat.S_IWGRP if about.st_gid in groups else stat.S_IWOTH))


def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


OWNER_CHECKS: tuple[Check, ...] = (file_owners, incoming_mode, helpers_directories)
