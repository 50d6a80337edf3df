"""Files that are written whole or not at all: a draft beside the file, then a rename over it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
