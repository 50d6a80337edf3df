"""A user's tokens: names that stay in the user's home, random ids that travel.

The user's file has one workload a line, ``TOKEN NAME``, mode 600. The client-side filter (Lua) reads it too.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from slurm_gpushare.protocol.errors import BadInput, GpushareError
from slurm_gpushare.protocol.files import replace_text

TOKEN_LENGTHS = (16, 32)
"""Random characters of base 32: 80 bits and up."""
LETTERS_32 = "abcdefghijklmnopqrstuvwxyz234567"
TOKEN = re.compile(rf"gs(?:-|2-[a-z2-7]{{2}})[a-z2-7]{{{TOKEN_LENGTHS[0]},{TOKEN_LENGTHS[1]}}}", re.ASCII)
"""``gs-`` tokens are from earlier releases; those that begin with ``gs2-`` end with two check characters."""
OPTIONS = ("max", "requeue", "cpus")
OPTION = re.compile(rf"(?:{'|'.join(OPTIONS)})(?:[=:].*)?", re.ASCII | re.IGNORECASE)
"""A word of a comment that is an option of ours, well written or not. It ends a name."""

_RANDOM_CHARS = 17  # 85 bits; with check characters as long as a token of earlier releases
_MAX_NAME = 200
_RESERVED = {"list", "rm"}  # words of the command line


@dataclass(frozen=True, slots=True)
class NamedToken:
    """One line of the file."""

    token: str
    name: str


class OwnedToken(NamedTuple):
    """Whose a job is, and with which token it ran."""

    token: str | None
    """None: the job took no part in sharing."""
    uid: int


def new_token() -> str:
    """A random token: it says nothing about whose or what it is."""
    letters = "".join(secrets.choice(LETTERS_32) for _ in range(_RANDOM_CHARS))
    return f"gs2-{letters}{check_characters(letters)}"


def check_characters(letters: str) -> str:
    """Two that tell one wrong letter, or two that changed places (lua_bridge/gpushare_job.lua has the same sum)."""
    total = sum(place * LETTERS_32.index(letter) for place, letter in enumerate(letters, 1)) % 1021
    return LETTERS_32[total // 32] + LETTERS_32[total % 32]


def has_wrong_letter(token: str) -> bool:
    """Whether a text that looks like a token was mistyped, as far as its check characters tell."""
    return token.startswith("gs2-") and check_characters(token[4:-2]) != token[-2:]


def token_path(environ: Mapping[str, str] = os.environ) -> Path:
    """``$XDG_CONFIG_HOME/gpushare/tokens``, by default under ~/.config."""
    base = environ.get("XDG_CONFIG_HOME", "")
    if os.path.isabs(base):  # the XDG specification: a relative path counts as unset
        return Path(base) / "gpushare" / "tokens"
    try:
        home = Path(environ["HOME"]) if environ.get("HOME") else Path.home()
    except RuntimeError:
        raise BadInput("token: this user has no home directory", "Set HOME.") from None
    return home / ".config" / "gpushare" / "tokens"


class TokenFile:
    """The tokens of one user. Writers take turns by a lock; readers see the old file or the new one."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or token_path()

    def all(self) -> list[NamedToken]:
        """Every token, in the order in which they were made."""
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return []
        except (OSError, UnicodeDecodeError) as why:
            raise GpushareError(f"{self.path}: cannot be read: {_reason(why)}") from why
        return [self._line(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]

    def find(self, name: str) -> str | None:
        """The token of `name`, or None."""
        return next((item.token for item in self.all() if item.name == name), None)

    def get_or_make(self, name: str) -> str:
        """The token of `name`, made on first use."""
        name = check_name(name)
        if token := self.find(name):
            return token
        with self._locked():
            if token := self.find(name):  # another process may have been faster
                return token
            token = new_token()
            self._write([*self.all(), NamedToken(token, name)])
        return token

    def remove(self, name: str) -> str:
        """Forget `name`; returns the token that it had."""
        name = name.strip()
        if (token := self.find(name)) is None:
            raise BadInput(f"token: no token is called '{name}'", "See 'gpushare token list'.")
        with self._locked():
            self._write([item for item in self.all() if item.name != name])
        return token

    def _line(self, number: int, line: str) -> NamedToken:
        token, _, name = line.partition(" ")
        if not TOKEN.fullmatch(token) or has_wrong_letter(token) or not name.strip():
            raise GpushareError(f"{self.path}:{number}: not 'TOKEN NAME'", "Correct or remove the line.")
        return NamedToken(token, name.strip())

    def _write(self, items: list[NamedToken]) -> None:
        text = "".join(f"{item.token} {item.name}\n" for item in items)
        try:
            replace_text(self.path, text, 0o600, sync=True)
        except OSError as why:
            raise GpushareError(f"{self.path}: cannot be written: {_reason(why)}") from why

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """The lock is on a file of its own: the token file itself is replaced by every writer."""
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle = os.open(self.path.with_name("tokens.lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as why:
            raise GpushareError(f"{self.path}: cannot be written: {_reason(why)}") from why
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX)  # lockf, since it also holds on NFS homes
            yield
        finally:
            os.close(handle)


def check_name(name: str) -> str:
    """`name` without surrounding blanks, if it can stand in the file and in ``--comment=gpushare:NAME``."""
    name = name.strip()
    if not name or len(name) > _MAX_NAME:
        raise BadInput(f"token: a name has 1 to {_MAX_NAME} characters")
    if not name.isprintable() or "," in name:
        raise BadInput("token: a name holds no comma and no control character")
    if name in _RESERVED:
        raise BadInput(f"token: '{name}' is a word of this command", "Choose another name.")
    if TOKEN.fullmatch(name):
        raise BadInput("token: that is a token already, not a name", "Use it as it is: --comment=gpushare:TOKEN.")
    if option := next((word for word in name.split()[1:] if OPTION.fullmatch(word)), None):
        raise BadInput(f"token: '{option}' in a job's comment is an option, not part of a name", "Choose another name.")
    return name


def _reason(why: Exception) -> str:
    return why.strerror if isinstance(why, OSError) and why.strerror else str(why)
