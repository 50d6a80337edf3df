"""What a job carries of ours: its owner's consent in the comment, and our tag.

The tag is in AdminComment, e.g. ``GS1:c=2;t=gs-k3v9...;o=gpu:1;l=1``.

The hook (Lua) writes it, the helper rewrites it, sacct keeps it, and ``gpushare release`` undoes us from
it alone. It is one word, appended to whatever else the comment holds. Users cannot set AdminComment, so
a tag is never forged. `LETTERS` is the list of its fields; the hook's is made from it (scripts/make_reference.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from slurm_gpushare.protocol.tokens import OPTION, TOKEN, has_wrong_letter

PREFIX = "GS1:"

_TAG = re.compile(r"(?:^|(?<=\s))GS1:(\S*)")


@dataclass(frozen=True, slots=True)
class Paused:
    """A pause of ours: since when (unix time), and how."""

    since_s: int
    by_signal: bool = False
    """Stopped by a signal: its clock runs on and its CPUs stay its own. Else suspended: neither."""

    def __str__(self) -> str:
        return f"{self.since_s}{'s' if self.by_signal else ''}"


def _integer(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() else None


def _signed(text: str) -> int | None:
    return None if _integer(text.removeprefix("-")) is None else int(text)


def _paused(text: str) -> Paused | None:
    since_s = _integer(text.removesuffix("s"))
    return None if since_s is None else Paused(since_s, text.endswith("s"))


def _written(letter: str, parse: Callable[[str], Any], default: Any = None) -> Any:
    """A field of the tag: how it is written, and how its text is read."""
    return field(default=default, metadata={"letter": letter, "parse": parse})


@dataclass(frozen=True, slots=True)
class Tag:
    """What we know of a job that took part in sharing."""

    probe: bool = False
    """The token was unknown at submission: the job runs on a whole GPU and is profiled."""
    cluster: int | None = _written("c", _integer)
    token: str | None = _written("t", str)
    original: str | None = _written("o", str)
    """The request to restore, without Slurm's ``gres/`` prefix: ``gpu:1``; before 23.11 ``shard:v100_0:2``.
    Of a gang what it asks of each of its cards."""
    gang: int | None = _written("k", _integer)
    """GPUs of a job that asked for all of a node's; None: it asked for one."""
    nodes: str | None = _written("w", str)
    """The user's own node list (-w), if any, to restore with it."""
    lease: bool = _written("l", "1".__eq__, False)
    """begin_time is ours, and nobody has ended it yet."""
    max_isd_pct: int | None = _written("m", _integer)
    """The slow-down that the user accepts, where less than the site's promise (``gpushare:TOKEN,max=10``)."""
    placed: str | None = _written("g", str)
    """Where the helper put it: ``node:index``; of a gang its node and the first of its cards."""
    nice: int | None = _written("n", _signed)
    """The user's own nice value, while ours is in its place."""
    successor: bool = _written("h", "1".__eq__, False)
    """Placed beside a job that ends soon, to have the card after it: a resident's promise, not a guest's."""
    given_min: int = _written("x", _integer, 0)
    """Minutes that we added to its time limit, for time that sharing cost it."""
    paused: Paused | None = _written("p", _paused)
    """While it is paused by us. A job that is suspended without this was suspended by somebody else."""
    paused_before_s: int = _written("q", _integer, 0)
    """How long it was paused by us before, in all."""
    stopped_before_s: int = _written("s", _integer, 0)
    """Of that, how long it was stopped by a signal, while its clock ran on."""
    requeue: bool = _written("r", "1".__eq__, False)
    """Its owner lets us requeue it: ``--requeue`` or ``requeue=yes``, in the owner's own words."""
    extra: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Fields of later releases, kept as they are."""

    def paused_s(self, now_s: float) -> float:
        """How long we have paused it, in all."""
        return self.paused_before_s + (max(now_s - self.paused.since_s, 0.0) if self.paused else 0.0)

    def stopped_s(self, now_s: float) -> float:
        """Of that, how long its clock ran on, since it was stopped by a signal."""
        now = max(now_s - self.paused.since_s, 0.0) if self.paused and self.paused.by_signal else 0.0
        return self.stopped_before_s + now

    def suspended_s(self, now_s: float) -> float:
        """Of that, how long it was suspended: Slurm leaves this time out of its elapsed time."""
        return self.paused_s(now_s) - self.stopped_s(now_s)

    def __str__(self) -> str:
        values = ((letter, getattr(self, f.name), f.default) for letter, f in _FIELDS.items())
        parts = [f"{letter}={1 if value is True else value}" for letter, value, default in values if value != default]
        parts += [f"{name}={value}" for name, value in self.extra.items()]
        return PREFIX + ";".join((["probe"] if self.probe else []) + parts)


_FIELDS = {found.metadata["letter"]: found for found in fields(Tag) if found.metadata}
LETTERS = {found.name: letter for letter, found in _FIELDS.items()}


@lru_cache(maxsize=8192)
def parse_tag(admin_comment: str) -> Tag | None:
    """The tag in an AdminComment, or None. Whatever is not understood is kept, never raised on."""
    found = _TAG.search(admin_comment)
    if found is None:
        return None
    words = found.group(1).split(";")
    values: dict[str, Any] = {"probe": "probe" in words}
    extra: dict[str, str] = {}
    for letter, equals, text in (word.partition("=") for word in words):
        if letter not in _FIELDS:
            extra |= {letter: text} if equals else {}
            continue
        known = _FIELDS[letter]
        if equals and (value := known.metadata["parse"](text)) is not None:
            values[known.name] = value
    return Tag(**values, extra=MappingProxyType(extra))


def with_tag(admin_comment: str, tag: Tag) -> str:
    """`admin_comment` with its tag replaced, or with the tag appended where it has none."""
    if _TAG.search(admin_comment):
        return _TAG.sub(lambda _: str(tag), admin_comment, count=1)
    return f"{admin_comment} {tag}".lstrip()


def without_tag(admin_comment: str) -> str:
    """`admin_comment` with nothing of ours in it."""
    return " ".join(_TAG.sub("", admin_comment).split())


# The user's consent in a job's comment: ``gpushare:TOKEN,max=10``. docs/hook.md has the grammar. The submit hook
# and the client filter read the same one (lua_bridge/gpushare_job.lua), and a test feeds all three with the
# same comments.


LONGEST = 1024
"""Slurm accepts no longer comment, and no longer text in most fields of a job."""

_OURS = re.compile(r"gpushare(?:[:=]([^,]*)(.*))?", re.ASCII | re.IGNORECASE)
_OPTION = re.compile(
    r"max=(?P<max>\d{1,3})%?|requeue=(?P<requeue>yes|no)|cpus=(?P<cpus>auto)", re.ASCII | re.IGNORECASE
)
_BLANK = " \t\n\v\f\r"


@dataclass(frozen=True, slots=True)
class Consent:
    """What a comment says of sharing."""

    token: str
    max_isd_pct: int | None = None
    """The slow-down that the user accepts at most."""
    requeue: bool | None = None
    """Whether the user lets us requeue the job where sharing goes wrong; None: not said."""
    cpus_auto: bool = False
    """Whether the job is to ask for as many CPUs as its workload's measured curve says."""


class UnclearConsent(ValueError):
    """The comment speaks of us, but not so that anybody could follow it."""


def parse_consent(comment: str) -> Consent | None:
    """What the comment says; None if it says nothing of us."""
    words = _words(comment)
    ours = [index for index, word in enumerate(words) if _OURS.fullmatch(word)]
    if not ours:
        return None
    if len(comment.encode("utf-8", "surrogateescape")) > LONGEST:
        raise UnclearConsent(f"its comment is longer than {LONGEST} characters")
    if len(ours) > 1:
        raise UnclearConsent("its comment says gpushare twice")
    found = _OURS.fullmatch(words[ours[0]])
    assert found is not None
    token, options = found[1] or "", (found[2] or "").split(",")
    if TOKEN.fullmatch(token) is None:
        raise UnclearConsent("that is not a workload token")
    if has_wrong_letter(token):
        raise UnclearConsent("its token has a wrong letter")
    options += [part for word in words[ours[0] + 1 :] if OPTION.fullmatch(word) for part in word.split(",")]
    said = [_OPTION.fullmatch(option) for option in options if option]
    given = {option.lastgroup: option[option.lastgroup or 0].lower() for option in said if option}
    if len(given) < len(said):
        raise UnclearConsent(
            "only the options max=PERCENT, requeue=yes|no and cpus=auto may follow the token, each once"
        )
    requeue = given["requeue"] == "yes" if "requeue" in given else None
    return Consent(token, int(given["max"]) if "max" in given else None, requeue, "cpus" in given)


def clear_consent(comment: str) -> Consent | None:
    """The consent in a comment; None if there is none, or if it is not clear."""
    try:
        return parse_consent(comment)
    except UnclearConsent:
        return None


def without_consent(comment: str) -> str:
    """The comment without our word and its options: what a user who opts out leaves there."""
    kept, ours = [], False
    for word in _words(comment):
        if _OURS.fullmatch(word):
            ours = True
        elif not (ours and OPTION.fullmatch(word)):
            kept.append(word)
    return " ".join(kept)


def _words(comment: str) -> list[str]:
    return [word for word in re.split(f"[{_BLANK}]+", comment) if word]
