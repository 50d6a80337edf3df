"""The site's files as configure writes them: gpushare.conf with our lines changed in place, the Lua scripts made whole,
the earlier version of each kept, and all of it put back again."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from slurm_gpushare.protocol.errors import BadInput, GpushareError
from slurm_gpushare.protocol.files import replace_text, replacing


class FileKind(StrEnum):
    """What to do with a piece."""

    MERGE = "merge"  # lines to work into a file that the site keeps itself
    FILE = "file"  # a whole file, ours
    RUN = "run"  # commands to type


@dataclass(frozen=True, slots=True)
class Piece:
    """Something to write: `name` is relative to slurm.conf's directory, or a systemd unit."""

    name: str
    kind: FileKind
    text: str
    executable: bool = False
    source: Path | None = None
    """The package's own file that this is made from."""


_LINE = re.compile(r"^(\s*)([A-Za-z]\w*)(\s*=\s*)([^#\n]*?)(\s*(?:#.*)?)$")


@dataclass(frozen=True, slots=True)
class Setting:
    """A key that configure works out, and why it is there."""

    key: str
    value: str
    why: str = ""

    def __str__(self) -> str:
        return f"# {self.why}\n{self.key}={self.value}\n" if self.why else f"{self.key}={self.value}\n"


def read_settings(text: str) -> dict[str, str]:
    """Values by key in lower case; of a key that is there twice, which `parse_config` refuses, the last."""
    found = (_LINE.match(line) for line in text.splitlines())
    return {match[2].lower(): match[4].strip() for match in found if match}


def merge_settings(current: str | None, wanted: Iterable[Setting]) -> str:
    """`current` with the wanted values in their lines, and lines at the end for those that it lacks."""
    if current is None:
        return "\n".join(str(setting) for setting in wanted)
    lines = current.splitlines()
    missing = []
    for setting in wanted:
        places = [i for i, line in enumerate(lines) if (m := _LINE.match(line)) and m[2].lower() == setting.key.lower()]
        for i in places:
            indent, key, equals, _, rest = _LINE.findall(lines[i])[0]
            lines[i] = f"{indent}{key}{equals}{setting.value}{rest}"
        if not places:
            missing.append(setting)
    text = "\n".join(lines) + "\n" if lines else ""
    return text + "".join(f"\n{setting}" for setting in missing)


def without_settings(text: str, names: Iterable[str]) -> str:
    """`text` without the lines of these keys, and without the comments just above them."""
    lowered, kept = {name.lower() for name in names}, list[str]()
    for line in text.splitlines():
        match = _LINE.match(line)
        if match and match[2].lower() in lowered:
            while kept and kept[-1].startswith("#"):
                kept.pop()
        else:
            kept.append(line)
    return "".join(f"{line}\n" for line in kept)


_BOTH = ("gpushare_protocol", "gpushare_job", "gpushare_request")
SCRIPTS = {"job_submit.lua": (*_BOTH, "gpushare_gpus", "gpushare_site", "gpushare_share"), "cli_filter.lua": _BOTH}
"""Slurm's scripts, and the modules that each of them holds."""


def lua_script(directory: Path, name: str, models: Mapping[str, tuple[str, int]]) -> str:
    """The script `name` of the Lua `directory` as one file; `models` are the GPU models with one type an index: of each
    its nodes, as Slurm writes them, and how many GPUs all of them have.

    It must not depend on other files of ours: with one type an index ``gpu:v100`` is a name that only these scripts
    understand, and without them every such job of every user would fail.
    """
    text = (directory / name).read_text(encoding="utf-8")
    given = _table({model: _quoted(nodes) for model, (nodes, _) in models.items()})
    gpus = _table({model: str(count) for model, (_, count) in models.items()})
    bodies = {module: (directory / f"{module}.lua").read_text(encoding="utf-8") for module in SCRIPTS[name]}
    modules = "".join(f"\nmodules.{module} = function(...)\n{body}end\n" for module, body in bodies.items())
    text = _replaced(text, "site", f"local site = {{ models = {given}, gpus = {gpus} }}\n")
    return _replaced(text, "modules", f"local modules = {{}}\n{modules}")


def _table(values: Mapping[str, str]) -> str:
    return "{ " + ", ".join(f"[{_quoted(name)}] = {value}" for name, value in sorted(values.items())) + " }"


def _replaced(text: str, mark: str, wanted: str) -> str:
    found = re.search(rf"(?m)^.*--@{mark}\n", text)
    assert found is not None, mark
    return text[: found.start()] + wanted + text[found.end() :]


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


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
        """What changes in the file."""
        before = (self.before or "").splitlines(True)
        return "".join(difflib.unified_diff(before, self.after.splitlines(True), self.name, self.name))


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
            path, earlier = target / change.name, known.get(change.name)
            mode = earlier.mode if earlier else None if change.before is None else change.mode
            if earlier is None and change.before is not None:
                kept = backup / change.name
                kept.parent.mkdir(parents=True, exist_ok=True)
                with replacing(kept, 0o600) as draft:
                    draft.write_bytes(path.read_bytes())
            known[change.name] = _Written(change.name, _sha256(change.after.encode()), mode)
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
        if not any(path.parent.iterdir()):
            path.parent.rmdir()
        return f"{entry.name}: removed"
    with replacing(path, entry.mode) as draft:
        draft.write_bytes(kept.read_bytes())
        _own_as(draft, path)
    return f"{entry.name}: put back"


def _forget(target: Path, left: list[_Written]) -> None:
    """The manifest names those that are left; with the last of them all backups go."""
    backup = target / BACKUP
    if left:
        replace_text(backup / _MANIFEST, json.dumps([asdict(entry) for entry in left], indent=1) + "\n", 0o600)
    else:
        shutil.rmtree(backup)


def _make_directory(path: Path) -> None:
    """With its parents, for all to enter, whatever the umask."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        folder.chmod(0o755)


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
