"""A report over 100,000 jobs: time and memory of the whole command, against 10 s and 300 MB.

sacct is a stand-in that prints as many rows in the delimiter it is asked for; everything after it is real.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from slurm_gpushare.protocol.history import Span
from slurm_gpushare.store.store import Store

JOBS = 100_000
LIMIT_S, LIMIT_MB = 10.0, 300.0

SACCT = """#!/usr/bin/env python3
import os, sys
mark = os.environ["SLURM_TIME_FORMAT"].removesuffix("%s")
options = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
columns = [column.partition("%")[0] for column in options["--format"].split(",")]
delimiter = options["--delimiter"]
now = {now}
for i in range({first}, {first} + {jobs}):
    start = now - {every} * ({first} + {jobs} - i)
    values = dict(
        JobIDRaw=i, JobID=i, Cluster="c", UID=1000 + i % 50, User=f"user{{i % 50}}", Account="acc", Partition="gpu",
        State="COMPLETED", Submit=f"{{mark}}{{start - 300}}",
        Eligible=f"{{mark}}{{start - 300}}", Start=f"{{mark}}{{start}}", End=f"{{mark}}{{start + 3000}}",
        ElapsedRaw=3000, TimelimitRaw=120, NCPUS=4, NodeList=f"gpu{{i % 100}}", ReqTRES="cpu=4,gres/gpu=1",
        AllocTRES="cpu=4,mem=1000M,node=1,billing=4,gres/shard=1",
        AdminComment=f"GS1:c={{i % 3}};t=gs-{{i:020d}};o=gpu:1",
    )
    sys.stdout.write("".join(f"{{values.get(column, '')}}{{delimiter}}" for column in columns) + "\\n")
"""


def _fill(url: str, now: int) -> None:
    with Store.create(url) as store:
        for first in range(1, JOBS, 20_000):
            store.sharing.begin(
                [
                    Span(i, i + 1, f"gs-{i}", f"gs-{i + 1}", f"gpu{i % 100}", i % 4, "V100", now - 600000 + 6 * i + 10,
                         now - 600000 + 6 * i + 2000, 0.8, 0.7, 0.75, 0.65)
                    for i in range(first, first + 20_000, 2)
                ]
            )  # fmt: skip


def main(out: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        top, now = Path(folder), int(time.time())
        (top / "bin").mkdir()
        (top / "bin" / "sacct").write_text(SACCT.format(now=now, first=1, jobs=JOBS, every=6))
        (top / "bin" / "sacct").chmod(0o755)
        (top / "gpushare.conf").write_text(f"Partitions=gpu\nStoreUrl=sqlite:///{top}/store.sqlite\n")
        _fill(f"sqlite:///{top}/store.sqlite", now)
        env = os.environ | {"PATH": f"{top}/bin:{os.environ['PATH']}", "GPUSHARE_CONF": f"{top}/gpushare.conf"}
        command = [sys.executable, "-m", "slurm_gpushare", "report", "--html", f"{top}/report.html"]
        began = time.perf_counter()
        subprocess.run(command, env=env, check=True, capture_output=True)
        wall_s = time.perf_counter() - began
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s, peak_mb = usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1000
        page_kb = (top / "report.html").stat().st_size / 1000
    print(f"{JOBS} jobs, {JOBS // 2} spans, page of {page_kb:.0f} kB")
    print(f"{wall_s:.1f} s, {cpu_s:.1f} s of it CPU (limit {LIMIT_S:g}); {peak_mb:.0f} MB (limit {LIMIT_MB:g})")
    figures = {"jobs": JOBS, "wall_s": wall_s, "cpu_s": cpu_s, "peak_mb": peak_mb, "page_kb": page_kb}
    (out / "report.json").write_text(json.dumps(figures, indent=2) + "\n")
