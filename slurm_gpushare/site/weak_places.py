"""Who could change a file: by its own owner and mode, or by those of a directory above it."""

from __future__ import annotations

import grp
import os
import pwd
import shlex
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from slurm_gpushare.users import uid_of, user_name


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


@dataclass(frozen=True, slots=True)
class WeakPlace:
    """A file or directory that others could change, and the command that ends it."""

    path: Path
    found: str
    fix: str


def weak_places(path: Path, trusted: Trusted, owner: str = "root") -> Iterator[WeakPlace]:
    """Where anybody else could change `path` or put another in its place. `owner` is who should have it.

    What is not there, or not this user's to see, is passed over.
    """
    real = Path(os.path.realpath(path))
    for place in _way(path):
        with suppress(OSError):
            found = [*_faults(place.stat(), trusted, owner if place in (path, real) else "root")]
            if found := found + list(_link_faults(place, trusted)):
                what = " and ".join(fault for fault, _ in found)
                commands = "; ".join(f"{command} {shlex.quote(str(place))}" for _, command in found)
                yield WeakPlace(place, f"{place} {what}", f"Run: {commands}")


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
