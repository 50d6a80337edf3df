"""The user's consent in a job's comment: ``gpushare:TOKEN,max=10``.

docs/hook.md has the grammar. The submit hook and the client filter read the same one (lua_bridge/gpushare_job.lua),
and a test feeds all three with the same comments.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from slurm_gpushare.protocol.tokens import OPTION, TOKEN

LONGEST = 1024
"""Slurm accepts no longer comment, and no longer text in most fields of a job."""

_OURS = re.compile(r"gpushare(?:[:=]([^,]*)(.*))?", re.ASCII | re.IGNORECASE)
_MAX = re.compile(r"max=(\d{1,3})%?", re.ASCII | re.IGNORECASE)
_REQUEUE = re.compile(r"requeue=(yes|no)", re.ASCII | re.IGNORECASE)
_CPUS = re.compile(r"cpus=auto", re.ASCII | re.IGNORECASE)
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
    options += [part for word in words[ours[0] + 1 :] if OPTION.fullmatch(word) for part in word.split(",")]
    options = [option for option in options if option]
    caps = [cap for option in options if (cap := _MAX.fullmatch(option))]
    answers = [answer for option in options if (answer := _REQUEUE.fullmatch(option))]
    autos = [option for option in options if _CPUS.fullmatch(option)]
    if max(len(caps), len(answers), len(autos)) > 1 or len(caps) + len(answers) + len(autos) < len(options):
        raise UnclearConsent(
            "only the options max=PERCENT, requeue=yes|no and cpus=auto may follow the token, each once"
        )
    requeue = answers[0][1].lower() == "yes" if answers else None
    return Consent(token, int(caps[0][1]) if caps else None, requeue, bool(autos))


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
