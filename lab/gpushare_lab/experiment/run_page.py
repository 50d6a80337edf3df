"""The report's page of what ran on a testbed."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

from gpushare_lab.testbed.testbed import Testbed


def write_run_page(testbed: Testbed, since_s: float, path: Path, until_s: float | None = None) -> Path:
    """Write the page of what accounting and the store know of the time since then."""
    since, until = (time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(at_s)) for at_s in (since_s, until_s))
    report = [sys.executable, "-m", "slurm_gpushare", "report", "-S", since, "--html", "page.html"]
    report += ["-E", until] if until_s is not None else []
    (testbed.layout.home / "page.html").unlink(missing_ok=True)
    testbed.run(report, cwd=testbed.layout.home, timeout_s=300)  # the page names its command, without our path
    shutil.copyfile(testbed.layout.home / "page.html", path)
    return path
