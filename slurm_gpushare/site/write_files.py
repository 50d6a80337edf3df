"""Writing configure's files: what would change, the earlier version kept, and all of it put back again."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from slurm_gpushare.protocol.errors import BadInput, GpushareError
from slurm_gpushare.protocol.files import replace_text, replacing
from slurm_gpushare.site.configure import FileKind, Piece

BACKUP = "gpushare-backup"
_MANIFEST = "written.json"


@dataclass(frozen=True, slots=True)
class Write:
    """One file that does not say yet what it should."""

    name: str  # below the target directory
    before: str | None  # None: it does not exist
    after: str
    mode: int

    def diff(self) -> str:
        """What changes in a file that exists; a new file is named, not printed."""
        if self.before is None:
            return ""
        lines = difflib.unified_diff(self.before.splitlines(True), self.after.splitlines(True), self.name, self.name)
        return "".join(lines)


@dataclass(frozen=True, slots=True)
class _Written:
    """What was done to a file: enough to undo it, and to see whether somebody changed it since."""

    name: str
    sha256: str  # as we left it
    mode: int | None  # of the earlier version; None: there was none


def writes(pieces: Iterable[Piece], target: Path) -> list[Write]:
    """The files under `target` that must change. Lines for a site's own file go beside it, as NAME.gpushare."""
    found = []
    for piece in pieces:
        name = piece.name if piece.kind is FileKind.FILE else f"{piece.name}.gpushare"
        path = target / name
        before = path.read_text(encoding="utf-8") if path.exists() else None
        mode = 0o755 if piece.executable else 0o644
        if before is not None:  # a site may have closed a file that holds a password
            mode = stat.S_IMODE(path.stat().st_mode)
        if before != piece.text:
            found.append(Write(name, before, piece.text, mode))
    return found


def write(changes: Iterable[Write], target: Path) -> None:
    """Write them all. What each file was before our first change is kept under ``gpushare-backup``."""
    try:
        backup = target / BACKUP
        backup.mkdir(parents=True, exist_ok=True, mode=0o700)
        backup.chmod(0o700)
        known = {entry.name: entry for entry in _read_manifest(target)}
        for change in changes:
            path = target / change.name
            if change.name not in known and change.before is not None:
                kept = backup / change.name
                kept.parent.mkdir(parents=True, exist_ok=True)
                with replacing(kept, 0o600) as draft:
                    draft.write_bytes(path.read_bytes())
            earlier_mode = None if change.before is None else change.mode
            if change.name in known:
                earlier_mode = known[change.name].mode
            known[change.name] = _Written(change.name, _sha256(change.after.encode()), earlier_mode)
            # The manifest first: a file that it names and that is not written yet is simply left alone by undo.
            text = json.dumps([asdict(entry) for entry in known.values()], indent=1) + "\n"
            replace_text(backup / _MANIFEST, text, 0o600)
            _make_directory(path.parent)
            with replacing(path, change.mode) as draft:
                draft.write_text(change.after, encoding="utf-8")
                if change.before is not None:
                    _own_as(draft, path)
    except OSError as why:
        raise GpushareError(f"{why.filename or target}: cannot be written: {why.strerror}") from why


def undo(target: Path) -> Iterator[str]:
    """Put every file back as it was before our first change; says what it did with each."""
    entries = _read_manifest(target)
    if not entries:
        raise BadInput(f"{target / BACKUP}: nothing to undo", "Give the directory that --write was given.")
    left = []
    try:
        for entry in entries:
            path, kept = target / entry.name, target / BACKUP / entry.name
            current = _sha256(path.read_bytes()) if path.exists() else None
            if current == entry.sha256:
                yield _restore(path, kept, entry)
            elif current == (_sha256(kept.read_bytes()) if entry.mode is not None else None):
                yield f"{entry.name}: is as it was"
            else:
                left.append(entry)
                earlier = f"; the earlier one is {kept}" if entry.mode is not None else ""
                yield f"{entry.name}: changed by somebody since, left alone{earlier}"
        _forget(target, left)
    except OSError as why:
        raise GpushareError(f"{why.filename or target}: cannot be put back: {why.strerror}") from why


def _restore(path: Path, kept: Path, entry: _Written) -> str:
    if entry.mode is None:
        path.unlink()
        _remove_empty(path.parent)
        return f"{entry.name}: removed"
    with replacing(path, entry.mode) as draft:
        draft.write_bytes(kept.read_bytes())
        _own_as(draft, path)
    return f"{entry.name}: put back"


def _forget(target: Path, left: list[_Written]) -> None:
    """Drop the backups that are no longer needed, and their directory with the last."""
    backup = target / BACKUP
    keep = {backup / entry.name for entry in left}
    for path in sorted(backup.rglob("*"), reverse=True):
        if path.is_file() and path not in keep and path.name != _MANIFEST:
            path.unlink()
        elif path.is_dir():
            _remove_empty(path)
    if left:
        replace_text(backup / _MANIFEST, json.dumps([asdict(entry) for entry in left], indent=1) + "\n", 0o600)
    else:
        (backup / _MANIFEST).unlink()
        _remove_empty(backup)


def _make_directory(path: Path) -> None:
    """With its parents, for all to enter, whatever the umask."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        folder.chmod(0o755)


def _remove_empty(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _own_as(path: Path, example: Path) -> None:
    owner = example.stat()
    if (path.stat().st_uid, path.stat().st_gid) != (owner.st_uid, owner.st_gid):
        os.chown(path, owner.st_uid, owner.st_gid)


def _read_manifest(target: Path) -> list[_Written]:
    try:
        return [_Written(**entry) for entry in json.loads((target / BACKUP / _MANIFEST).read_text(encoding="utf-8"))]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError) as why:
        raise GpushareError(f"{target / BACKUP / _MANIFEST}: cannot be read: {why}") from why


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
