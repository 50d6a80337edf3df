"""What the helper tells users: one file for all, and for each owner one that nobody else can open.

``jobs.json`` holds what squeue shows anyway plus numbers, or only sums where Slurm's PrivateData hides jobs. An owner's
file is a munge credential that munged opens for that uid alone, on whatever file system it lies. Both are replaced by
rename, in a directory that only SlurmUser writes. Nothing here needs the database library.
"""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from slurm_gpushare.node.delivery import seal
from slurm_gpushare.node.figures import RunFigures
from slurm_gpushare.protocol.errors import GpushareError
from slurm_gpushare.protocol.files import hand_over, make_open_dir, replacing
from slurm_gpushare.protocol.history import Decision, Span
from slurm_gpushare.store.credential import opener

VERSION = 1
PUBLIC = "jobs.json"
OWNERS = "owners"
MOST_BYTES = 64 * 2**20
_T = TypeVar("_T")


class NotPublished(GpushareError):
    """Nothing can be read; `what` says why, for a note beside ``---``."""


class NoJobYet(NotPublished):
    """The helper publishes, and has never met a job of this user's with a token."""


@dataclass(frozen=True, slots=True)
class PublicJob:
    """A job that takes part, as everybody may see it. None is unknown."""

    key: str
    raw_id: int
    card: str | None = None
    beside: int | None = None
    """The neighbour, by SLURM_JOB_ID."""
    expected_isd_pct: float | None = None
    measured_isd_pct: float | None = None
    reason: str | None = None
    """Why it waits: a code of `coschedule.planning.reasons`, with its numbers."""
    need: float | None = None
    have: float | None = None
    wait_s: float | None = None
    paused: bool = False
    blind: bool = False
    """Its card tells nothing of single jobs, so that nobody keeps its promise."""
    given_back_s: int = 0
    """Added to its time limit for what its neighbours cost it."""


@dataclass(frozen=True, slots=True)
class Published:
    """The file for all."""

    at_s: float
    private: bool
    """Jobs are hidden from each other: only sums are here."""
    sums: Mapping[str, float]
    jobs: tuple[PublicJob, ...] = ()
    knowledge: str = ""
    """The knowledge bases that the helper runs on, by GPU model."""
    host: str = ""
    """Where the helper that is in charge runs; an older release did not say."""
    stale_s: float = 180.0
    """From this age on it says nothing of now: a helper that lives would have published again. An older release did
    not say when that is."""


@dataclass(frozen=True, slots=True)
class TokenFigures:
    """What is known of one of the owner's workloads."""

    token: str
    runs: int = 0
    """That its profile was made of; 0: not measured yet."""
    cluster: int | None = None
    duration_s: float | None = None
    mem_used_mib: int | None = None
    gpu_model: str | None = None
    last_used_s: int | None = None
    preallocated: bool = False
    """Whether it looks as if its framework took the card's memory in advance, whatever it needs."""
    jobs: tuple[int, ...] = ()
    """Jobs of which a node has reported a run, by SLURM_JOB_ID; requeued and cancelled ones too."""


@dataclass(frozen=True, slots=True)
class OwnFigures:
    """All that is known of one user's jobs, for that user."""

    at_s: float
    since_s: float
    """Jobs that ended before are not in it."""
    live: tuple[PublicJob, ...] = ()
    spans: tuple[Span, ...] = ()
    decisions: tuple[Decision, ...] = ()
    runs: Mapping[int, RunFigures] = field(default_factory=dict)
    """By SLURM_JOB_ID."""
    tokens: tuple[TokenFigures, ...] = ()


def write_public(directory: Path, published: Published) -> None:
    """Replace the file for all."""
    _replace(directory / PUBLIC, _dump({"format": "gpushare-public"}, published))


def read_public(directory: Path) -> Published:
    """The file for all."""
    path = directory / PUBLIC
    return _load(Published, path, _read(path), {"jobs": lambda items: _several(PublicJob, items)})


def own_text(figures: OwnFigures) -> str:
    """An owner's figures as they are sealed."""
    return base64.b64encode(zlib.compress(_dump({}, figures).encode())).decode("ascii")


def write_own(directory: Path, uid: int, text: str, munge_socket: Path | None) -> None:
    """Replace the file of one owner."""
    make_open_dir(directory / OWNERS, mode=0o711)  # nobody may list who takes part
    _replace(directory / OWNERS / str(uid), seal(text, munge_socket, reader_uid=uid))


def read_own(directory: Path, uid: int, munge_socket: Path | None) -> OwnFigures:
    """The figures of `uid`. Only a process of that user can read them."""
    path = directory / OWNERS / str(uid)
    if ((directory / OWNERS).is_dir() or (directory / PUBLIC).exists()) and not path.exists():
        raise NoJobYet("the helper knows no job of yours with a token")
    sealed = opener(munge_socket)(_read(path))
    if sealed.uid not in {0, directory.stat().st_uid}:
        raise NotPublished(f"{path}: was not written by the helper")
    try:
        packed = zlib.decompressobj()
        text = packed.decompress(base64.b64decode(sealed.payload, validate=True), MOST_BYTES)
    except (zlib.error, binascii.Error) as why:
        raise NotPublished(f"{path}: not readable: {why}") from why
    return _load(OwnFigures, path, text, _OWN)


def _dump(head: Mapping[str, Any], told: Published | OwnFigures) -> str:
    """The JSON of a file: all of its own fields, and of what it lists those that say something."""
    body = {**head, "version": VERSION, **{name: getattr(told, name) for name in told.__slots__}}
    return json.dumps(body, separators=(",", ":"), allow_nan=False, default=_present)


def _present(item: Any) -> dict[str, Any]:
    """Its fields that say something; the reader fills in the rest."""
    if isinstance(item, Mapping):
        return dict(item)
    values = ((name, getattr(item, name)) for name in item.__dataclass_fields__)
    return {name: value for name, value in values if value is not None and value is not False and value != ""}


def _load(kind: type[_T], path: Path, text: bytes, fields: Mapping[str, Callable[[Any], Any]]) -> _T:
    """What `_dump` wrote; `fields` make what is no number or word again. A later release may say more."""
    try:
        body = json.loads(text)
    except ValueError as why:
        raise NotPublished("what the helper published is not readable") from why
    if not isinstance(body, dict) or body.get("version") != VERSION:
        raise NotPublished("what the helper published is of another release")
    try:
        return _one(
            kind, body | {name: make(body[name]) for name, make in {**_TIMES, **fields}.items() if name in body}
        )
    except (AttributeError, KeyError, TypeError, ValueError) as why:
        raise NotPublished(f"{path}: not readable: {type(why).__name__}") from why


def _one(kind: type[_T], item: Mapping[str, Any]) -> _T:
    return kind(**{name: item[name] for name in kind.__dataclass_fields__ if name in item})  # type: ignore[attr-defined]


def _several(kind: type[_T], items: Iterable[Mapping[str, Any]]) -> tuple[_T, ...]:
    return tuple(_one(kind, item) for item in items)


# A user must not learn the tokens of neighbours, so spans are published without tokens.
_BLANK: dict[str, Any] = {"resident_token": "", "guest_token": "", "resident_job": 0, "guest_job": 0}
_TIMES: dict[str, Callable[[Any], Any]] = {"at_s": float, "since_s": float, "stale_s": float}
_OWN: dict[str, Callable[[Any], Any]] = {
    "live": lambda items: _several(PublicJob, items),
    "spans": lambda items: _several(Span, (_BLANK | item for item in items)),
    "decisions": lambda items: _several(Decision, items),
    "runs": lambda items: {int(job): _one(RunFigures, item) for job, item in items.items()},
    "tokens": lambda items: _several(TokenFigures, ({**item, "jobs": tuple(item.get("jobs", ()))} for item in items)),
}


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise NotPublished(f"the helper has published nothing yet ({path})") from None
    except OSError as why:
        raise NotPublished(f"{path}: {why.strerror}") from why


def _replace(path: Path, text: str) -> None:
    with replacing(path) as draft:
        draft.write_text(text, encoding="ascii")
        hand_over(draft)
