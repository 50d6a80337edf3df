"""Another Debian's /usr and /etc for one testbed, in a mount namespace of its own.

All else (/proc, /dev, /tmp, /home, the repository, the testbed's directory) stays the machine's, under
the same names. A process that sleeps holds the namespace; commands enter it by that process's pid. The
mounts exist nowhere else, so that they vanish with the last process, however it ends.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

from gpushare_lab.testbed.layout import Layout
from gpushare_lab.testbed.processes import recorded_pid
from slurm_gpushare.protocol.errors import GpushareError

HOLDER = "root"  # the holder's name among the daemons
INSIDE = "/.gpushare-testbed"  # exists only inside
_FROM_SUITE = {"bin", "sbin", "lib", "lib32", "lib64", "libx32", "usr", "etc"}
_ETC_OF_HOST = ("hosts", "hostname", "passwd", "group")


def is_ready(layout: Layout) -> bool:
    """Whether the holder has changed to the new root, which is the last thing it does."""
    pid = recorded_pid(layout.run / f"{HOLDER}.pid")
    return pid is not None and Path(f"/proc/{pid}/root{INSIDE}").exists()


def prepare(layout: Layout, root: Path) -> None:
    """Write the scripts that make the namespace and enter it, and the virtual environment seen inside."""
    _make_venv(layout, root)
    (layout.root / "root").mkdir()
    _script(layout.bin / "make-root", _mount_script(layout, root))
    pid_file = layout.run / f"{HOLDER}.pid"
    _script(
        layout.bin / "enter",
        f"read -r pid _ <{pid_file} || exit 1\n"
        f'[ -e "/proc/$pid/root{INSIDE}" ] || {{ echo "enter: the testbed is down" >&2; exit 1; }}\n'
        'exec nsenter --target "$pid" --mount --root --wdns="$PWD" -- "$@"\n',
    )
    commands = (root / "var/lib/dpkg/info/slurm-client.list").read_text().split()
    for command in (name for name in commands if name.startswith("/usr/bin/")):
        # For programs on the machine's own side: PATH leads them to the right release.
        _script(
            layout.bin / Path(command).name,
            f'[ -e {INSIDE} ] && exec {command} "$@"\nexec {layout.bin}/enter {command} "$@"\n',
        )


def holder_argv(layout: Layout) -> list[str]:
    return ["unshare", "--mount", "--propagation=private", f"{layout.bin}/make-root"]


def enter_argv(layout: Layout) -> list[str]:
    """What to put before a command to run it inside, as root."""
    return [f"{layout.bin}/enter"]


def _mount_script(layout: Layout, root: Path) -> str:
    new = layout.root / "root"
    # Unbindable, or binding the directory that it is in would copy it into itself.
    lines = ["set -e", f"mount -t tmpfs -o mode=755,size=1m testbed {new}", f"mount --make-unbindable {new}"]
    for name in sorted(_FROM_SUITE):
        source = root / name
        if source.is_symlink():
            lines.append(f"ln -s {shlex.quote(os.readlink(source))} {new}/{name}")
        elif source.is_dir():
            lines += [f"mkdir {new}/{name}", f"mount --bind {source} {new}/{name}"]
    lines += [f"mount --bind /etc/{name} {new}/etc/{name}" for name in _ETC_OF_HOST if Path("/etc", name).is_file()]
    lines += [f"mount -o remount,bind,ro {new}/{name}" for name in ("usr", "etc")]
    lines += [f"mount --rbind /usr/local {new}/usr/local"]
    for entry in sorted(Path("/").iterdir()):
        if entry.name in _FROM_SUITE or any(character in entry.name for character in " '\""):
            continue
        if entry.is_symlink():
            lines.append(f"ln -s {shlex.quote(os.readlink(entry))} {new}{entry}")
        elif entry.is_dir():
            lines += [f"mkdir {new}{entry}", f"mount --rbind {entry} {new}{entry}"]
    lines += [
        f"mount --bind {layout.root}/venv {new}{sys.prefix}",
        f"touch {new}{INSIDE}",
        f"exec chroot {new} sleep infinity",
    ]
    return "\n".join(lines) + "\n"


def _make_venv(layout: Layout, root: Path) -> None:
    """A virtual environment around the other Debian's Python, to be seen where ours is.

    Its packages are Debian's; our own package and pynvml are pure Python and come from here.
    """
    if sys.prefix == sys.base_prefix:
        raise GpushareError(
            "testbed: another release's Slurm needs gpushare in a virtual environment", "Run it from the one of 'make'."
        )
    python = os.readlink(root / "usr/bin/python3")  # e.g. python3.13
    venv = layout.root / "venv"
    ours = Path(sys.prefix, "lib", f"python{sys.version_info.major}.{sys.version_info.minor}", "site-packages")
    site = venv / "lib" / python / "site-packages"
    site.mkdir(parents=True)
    (venv / "bin").mkdir()
    for name in ("python", "python3", Path(sys.executable).name):
        if not (venv / "bin" / name).is_symlink():
            (venv / "bin" / name).symlink_to("/usr/bin/python3")
    (venv / "pyvenv.cfg").write_text("home = /usr/bin\ninclude-system-site-packages = true\n")
    script = Path(sys.prefix, "bin", "gpushare")
    if script.exists():
        shutil.copy(script, venv / "bin" / "gpushare")
    for pattern in ("__editable__*slurm_gpushare*", "slurm_gpushare*", "pynvml.py", "nvidia_ml_py*"):
        for found in ours.glob(pattern):
            if found.is_dir():
                shutil.copytree(found, site / found.name)
            else:
                shutil.copy(found, site / found.name)


def _script(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/sh\n{body}")
    path.chmod(0o755)
