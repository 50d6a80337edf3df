"""Our tag in a job's AdminComment, e.g. ``GS1:c=2;t=gs-k3v9...;o=gpu:1;l=1``.

The hook (Lua) writes it, the helper rewrites it, sacct keeps it, and ``gpushare release`` undoes us from
it alone. It is one word, appended to whatever else the comment holds. Users cannot set AdminComment, so
a tag is never forged.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from slurm_gpushare.tokens import TOKEN as TOKEN

PREFIX = "GS1:"

_TAG = re.compile(r"(?:^|(?<=\s))GS1:(\S*)")
_KNOWN = ("c", "t", "o", "w", "l", "m", "g", "n", "h")


@dataclass(frozen=True, slots=True)
class Tag:
    """What we know of a job that took part in sharing."""

    probe: bool = False
    """The token was unknown at submission: the job runs on a whole GPU and is profiled."""
    cluster: int | None = None
    token: str | None = None
    original: str | None = None
    """The request to restore, without Slurm's ``gres/`` prefix: ``gpu:1``; before 23.11 ``shard:v100_0:2``."""
    nodes: str | None = None
    """The user's own node list (-w), if any, to restore with it."""
    lease: bool = False
    """begin_time is ours, and nobody has ended it yet."""
    max_isd_pct: int | None = None
    """The slow-down that the user accepts, where less than the site's promise (``gpushare:TOKEN,max=10``)."""
    placed: str | None = None
    """Where the helper put it: ``node:index``."""
    nice: int | None = None
    """The user's own nice value, while ours is in its place."""
    heir: bool = False
    """Placed beside a job that ends soon, to have the card after it: a resident's promise, not a guest's."""
    extra: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Fields of later releases, kept as they are."""

    def __str__(self) -> str:
        parts = ["probe"] if self.probe else []
        values = (
            ("c", self.cluster),
            ("t", self.token),
            ("o", self.original),
            ("w", self.nodes),
            ("l", 1 if self.lease else None),
            ("m", self.max_isd_pct),
            ("g", self.placed),
            ("n", self.nice),
            ("h", 1 if self.heir else None),
            *self.extra.items(),
        )
        parts += [f"{name}={value}" for name, value in values if value is not None]
        return PREFIX + ";".join(parts)


def _integer(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdecimal() else None


def _signed(text: str | None) -> int | None:
    digits = (text or "").removeprefix("-")
    return int(text or "") if digits.isascii() and digits.isdecimal() else None


def parse_tag(admin_comment: str) -> Tag | None:
    """The tag in an AdminComment, or None. Whatever is not understood is kept, never raised on."""
    found = _TAG.search(admin_comment)
    if found is None:
        return None
    words = found.group(1).split(";")
    values = dict(word.split("=", 1) for word in words if "=" in word)
    return Tag(
        probe="probe" in words,
        cluster=_integer(values.get("c")),
        token=values.get("t"),
        original=values.get("o"),
        nodes=values.get("w"),
        lease=values.get("l") == "1",
        max_isd_pct=_integer(values.get("m")),
        placed=values.get("g"),
        nice=_signed(values.get("n")),
        heir=values.get("h") == "1",
        extra=MappingProxyType({name: value for name, value in values.items() if name not in _KNOWN}),
    )


def with_tag(admin_comment: str, tag: Tag) -> str:
    """`admin_comment` with its tag replaced, or with the tag appended where it has none."""
    if _TAG.search(admin_comment):
        return _TAG.sub(lambda _: str(tag), admin_comment, count=1)
    return f"{admin_comment} {tag}".lstrip()


def lease_ended(tag: Tag) -> Tag:
    """The tag once ``StartTime=now`` has been written: that happens once in a job's life."""
    return replace(tag, lease=False)
