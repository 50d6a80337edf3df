"""Files that root makes for SlurmUser: an administrator's command must not lock the helper out of its own files."""

from __future__ import annotations

import os
from pathlib import Path


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
