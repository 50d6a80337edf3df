"""Files: written whole or not at all (a draft beside the file, then a rename over it), their owners, and CSV."""

from __future__ import annotations

import csv
import math
import os
import pwd
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryFile

from slurm_gpushare.protocol.errors import BadInput, GpushareError


@contextmanager
def replacing(path: Path, mode: int = 0o644, *, sync: bool = False) -> Iterator[Path]:
    """An empty draft for the caller to fill. It takes the place of `path` when the block ends well, else it is removed.

    With `sync` the contents are on disk before the rename, so that a crash leaves the old file or the new one.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.draft")
    os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode))
    try:
        draft.chmod(mode)  # whatever the umask
        yield draft
        if sync:
            with draft.open("rb") as file:
                os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def replace_text(path: Path, text: str, mode: int = 0o644, *, sync: bool = False) -> None:
    """Make `text` the contents of `path`."""
    with replacing(path, mode, sync=sync) as draft:
        draft.write_text(text, encoding="utf-8")


def overwrite_line(path: Path, text: str) -> None:
    """Write one line in place, in one call, so that a reader never sees half of it; blank what a longer line left.

    In place, since a client of NFS asks the server again when it opens a file that it knows, while a new name may stay
    hidden from it for half a minute.
    """
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        line = f"{text}\n".encode("ascii")
        os.pwrite(handle, line.ljust(os.fstat(handle).st_size, b"\n"), 0)
    finally:
        os.close(handle)


def read_or_empty(path: Path) -> str:
    """A file's text; empty where there is none to read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def is_there(path: Path) -> bool:
    """Whether a file exists, as far as this user can tell."""
    try:
        path.stat()
    except OSError as why:
        return not isinstance(why, FileNotFoundError | NotADirectoryError)
    return True


# Files that root makes for SlurmUser: an administrator's command must not lock the helper out of its own files.


def hand_over(path: Path) -> None:
    """Give what root has just made to the owner of the directory it is in; for anybody else it is theirs already."""
    if os.geteuid() == 0:
        owner = path.parent.stat()
        os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)


def make_open_dir(path: Path, mode: int = 0o755) -> None:
    """A directory that its owner writes and everybody may enter, whatever the umask; one that is there stays as it is.

    Everybody may list it too, unless `mode` says otherwise.
    """
    if not path.is_dir():
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(mode)
        hand_over(path)


# Where the files live that are not Python: Lua, SQL, prolog scripts, units, man pages.


def resource_dir(name: str) -> Path:
    """The directory of ``lua_bridge``, ``prolog``, ``share`` or ``sql``, in a checkout or an installed wheel.

    Daemons outside Python read these files, so they must be real paths; wheels are always
    unpacked on installation, which makes them so.
    """
    return Path(str(files(f"slurm_gpushare.{name}")))


# Users' names and numbers, as this machine knows them.


@cache
def user_name(uid: int) -> str:
    """The user's name, or the number where this machine does not know it."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def uid_of(user: str) -> int | None:
    """The uid of a name, or the number itself; None where there is no such user."""
    if user.isdecimal():
        return int(user)
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        return None


# CSV files as people hand them to us: a header, then rows that have all of its columns, or one clear line of refusal.
# Without numpy: emulated jobs read their pairs here too, dozens at once on a small machine.


@dataclass(frozen=True, slots=True)
class Row:
    """One row, and where it stands."""

    path: Path
    line: int
    cells: Mapping[str, str]

    def get(self, column: str) -> str:
        """The cell without surrounding blanks; empty where the file has no such column."""
        return self.cells.get(column, "").strip()

    def text(self, column: str) -> str:
        """A cell that must not be empty."""
        if value := self.get(column):
            return value
        raise self.error(f"{column} is empty")

    def number(self, column: str, low: float = -math.inf, high: float = math.inf) -> float:
        """A finite number within bounds; NaN where the cell is empty or the column absent."""
        text = self.get(column)
        if not text:
            return math.nan
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise self.error(f"{column} is '{text}', not a number", "Leave the cell empty when it is not known.")
        if not low <= value <= high:
            bounds = f"between {low:g} and {high:g}" if math.isfinite(high) else f"at least {low:g}"
            raise self.error(f"{column} is {text}, but must be {bounds}")
        return value

    def error(self, what: str, hint: str = "") -> BadInput:
        return BadInput(f"{self.path}:{self.line}: {what}", hint)


def read_rows(path: Path, required: Sequence[str]) -> list[Row]:
    """All rows of a file whose header has at least the `required` columns."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            return _read(path, csv.DictReader(stream, skipinitialspace=True), required)
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise BadInput(f"{path}: not a CSV file in UTF-8: {error}") from error


def _read(path: Path, reader: csv.DictReader[str], required: Sequence[str]) -> list[Row]:
    header = [name.strip() for name in reader.fieldnames or ()]
    if not header:
        raise BadInput(f"{path}: empty file", f"It needs a header with {', '.join(required)}.")
    if len(set(header)) < len(header):
        raise BadInput(f"{path}:1: a column is named twice", "Column names must differ.")
    if missing := [name for name in required if name not in header]:
        raise BadInput(f"{path}:1: no column {', '.join(missing)}", f"It has: {', '.join(header)}.")
    reader.fieldnames = header
    rows = []
    for cells in reader:
        if None in cells or None in cells.values():
            raise BadInput(f"{path}:{reader.line_num}: not {len(header)} cells", "The header says how many.")
        rows.append(Row(path, reader.line_num, cells))
    return rows


# Files that commands write: can they be, and may they replace what is there?


def check_page(path: Path, force: bool) -> None:
    """Before anything is asked of Slurm: can the page be written where it is wanted?"""
    try:
        there = path.exists()
    except OSError as why:
        raise GpushareError(f"{path}: cannot be written: {why.strerror}") from why
    if there and not force:
        raise BadInput(f"{path}: exists already", "Name another file, or add --force.")
    if not path.parent.is_dir():
        why_not: str | None = "there is no such directory"
    elif there and not path.is_file():  # a terminal, a pipe
        why_not = None if os.access(path, os.W_OK) else "Permission denied"
    else:
        why_not = why_not_writable(path.resolve().parent)
    if why_not:
        raise GpushareError(f"{path}: cannot be written: {why_not}", "Name another file.")


def write_page(path: Path, text: str) -> None:
    """Write the page, for its owner alone: it names users and their jobs. Who may read it is for the owner to say."""
    try:
        if path.is_file() or not path.exists():
            # A link of somebody else's may lead anywhere: it is replaced, not followed.
            ours = not path.is_symlink() or path.lstat().st_uid == os.geteuid()
            replace_text(path.resolve() if ours else path, text, 0o600)
        else:
            path.write_text(text, encoding="utf-8")  # a terminal, a pipe
    except OSError as why:
        raise GpushareError(f"{path}: cannot be written: {why.strerror}") from why


def check_directory(option: str, path: Path | None) -> None:
    """Before a long run: is there a directory for the file that is written at its end?"""
    if path is None:
        return
    if not path.parent.is_dir():
        raise BadInput(f"{option} {path}: no directory {path.parent}", "Make it first.")
    if why := why_not_writable(path.parent):
        raise BadInput(f"{option} {path}: cannot be written: {why}", "Name another file.")


def why_not_writable(directory: Path) -> str | None:
    """Why no file can be made there. One is made to see: of root, permissions say nothing (NFS, read-only mounts)."""
    try:
        with TemporaryFile(dir=directory):
            return None
    except OSError as why:
        return why.strerror or str(why)


Stamps = tuple[tuple[int, int, int] | None, ...]


def stamps(paths: Iterable[Path]) -> Stamps:
    """What changes when the files do; None for one that is not there or not ours to see."""
    found: list[tuple[int, int, int] | None] = []
    for path in paths:
        try:
            about = path.stat()
            found.append((about.st_mtime_ns, about.st_size, about.st_ino))
        except OSError:
            found.append(None)
    return tuple(found)
