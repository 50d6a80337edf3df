"""Which files one job passes between sbatch and the report: those with a function that was executed.

sudo .venv/bin/python scripts/way.py [--list]

A throw-away Slurm with one emulated card; two workloads run once to be measured, then side by side; then their owner
asks for the report. Every Python process that uses this environment meanwhile notes the files of the functions that
are called (not the modules that are merely read in). Of Lua all modules count that the hook and the client's filter
load, of shell all scripts that a site's slurm.conf names with what they source.
"""

from __future__ import annotations

import re
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpushare_lab.experiment.helper_process import HelperProcess
from gpushare_lab.experiment.submitting import submit, wait_for
from gpushare_lab.testbed.layout import Shape
from gpushare_lab.testbed.testbed import Testbed

ROOT = Path(__file__).resolve().parents[1]
NOTE_CALLS = """
import os, sys, threading
OPTIMIZED = 0x1  # a function's code has it, a class's body has not
def _noted(seen=set(), top={top!r}, out={out!r}):
    def called(frame, event, _):
        code = frame.f_code
        name = code.co_filename
        if event != "call" or name in seen or not name.startswith(top):
            return
        if code.co_flags & OPTIMIZED and code.co_name[0] != "<":
            seen.add(name)
            try:
                file = os.open(os.path.join(out, name[len(top):].replace("/", "%")), os.O_CREAT | os.O_WRONLY, 0o666)
                os.close(file)
            except OSError:
                seen.discard(name)
    return called
sys.setprofile(_noted())
threading.setprofile(_noted())
"""


@contextmanager
def noting(out: Path) -> Iterator[None]:
    """Every Python of this environment notes the files of the product in which a function is called."""
    hook = Path(sysconfig.get_paths()["purelib"]) / "gpushare_way.py"
    line = hook.with_suffix(".pth")
    hook.write_text(NOTE_CALLS.format(top=f"{ROOT}/slurm_gpushare/", out=str(out)))
    line.write_text("import gpushare_way\n")
    try:
        yield
    finally:
        line.unlink()
        hook.unlink()


def lua_modules() -> set[str]:
    """What the hook's and the filter's snippet load, directly and through each other."""
    seen: set[str] = set()
    todo = ["job_submit", "cli_filter"]
    while todo:
        name = todo.pop()
        path = ROOT / "lua_bridge" / f"{name}.lua"
        if name not in seen and path.is_file():
            seen.add(name)
            todo += re.findall(r"\bload\(\"(\w+)\"\)", path.read_text())
    return {f"lua_bridge/{name}.lua" for name in seen}


def scripts() -> set[str]:
    return {f"prolog/{path.name}" for path in (ROOT / "prolog").iterdir() if path.suffix != ".py" and path.is_file()}


def one_life(testbed: Testbed) -> None:
    """Two workloads, each once alone and once beside the other, and their owner's questions."""
    gpushare = f"{sys.executable} -m slurm_gpushare"
    job = f"{sys.executable} -m gpushare_lab.job.workload --epochs 2 --gpu-util 35 --mem-access 15 --work-s"
    tokens = [testbed.run([*gpushare.split(), "token", name]).stdout.strip() for name in ("one", "two")]
    with HelperProcess(testbed, "gpushare"):
        for seconds in (12, 40):
            options = ("--gres=gpu:1", "--mem=100", "--time=5", "--output=/dev/null")
            ids = [submit(testbed, f"{job} {seconds}", f"--comment=gpushare:{token}", *options) for token in tokens]
            wait_for(testbed, ids, timeout_s=300)
        testbed.run([*gpushare.split(), "job", str(ids[0])])
        testbed.run([*gpushare.split(), "report", "-S", "now-1hour", "--html", f"{testbed.dir}/way.html"])


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="gs-way-", dir="/tmp") as top:
        Path(top).chmod(0o755)
        out = Path(top) / "called"
        out.mkdir()
        out.chmod(0o1777)
        testbed = Testbed(Path(top) / "bed").up(Shape(nodes=1, gpus=1, shards=2))
        try:
            with noting(out):
                one_life(testbed)
        finally:
            testbed.down(purge=True)
        python = {f"slurm_gpushare/{path.name.replace('%', '/')}" for path in out.iterdir()}
    found = sorted(python | lua_modules() | scripts())
    if "--list" in sys.argv[1:]:
        print("\n".join(found))
    lines = sum((ROOT / name).read_bytes().count(b"\n") for name in found)
    print(f"one job passes {len(found)} files with {lines} lines: {len(python)} of Python, the rest Lua and shell")


if __name__ == "__main__":
    main()
