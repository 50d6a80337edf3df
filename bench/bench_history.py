"""A store with a million runs and half a million spans: the helper's start, what it learns beside its ticks, a report.

Runs and spans are written past the store's interface: nobody waits for the 400 days in which they come.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpushare_lab.known_profiles import KnownProfile, enter_profiles

from bench.bench_answers import watch_delays
from bench.bench_report import SACCT
from bench.bench_store import full_record
from bench.large_site import GPUS_PER_NODE, TOKENS, LargeSite, Size, token
from slurm_gpushare.helper.daemon import Daemon
from slurm_gpushare.helper.process import set_up_python
from slurm_gpushare.protocol.history import Span
from slurm_gpushare.protocol.record import encode_record
from slurm_gpushare.protocol.settings import parse_config
from slurm_gpushare.slurm.commands import Slurm
from slurm_gpushare.store import Store
from slurm_gpushare.store.schema import run, run_detail

RUNS, AT_ONCE, EVERY_S, MONTH_S = 1_000_000, 10_000, 34, 30 * 86_400
SIZE = Size(pending=200, gpus=64, pairs=16)
LEARN_FOR_S = 60.0
WANTED = {"first_tick_s": 5.0, "memory_mib": 300.0, "report_s": 5.0}


def main(out: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        where, now_s = Path(name), int(time.time())
        (where / "gpushare.conf").write_text(
            f"Partitions=gpu\nStoreUrl=sqlite:///{where}/store.sqlite\nHookFile={where}/hook.sqlite\n"
            f"SpoolDir={where}/spool\nPublicDir={where}/public\nEpilogHold=0\nKeepDays=1000\n"
        )
        _fill(where, now_s)
        figures = {"runs": RUNS, "spans": RUNS // 2, "store_mib": (where / "store.sqlite").stat().st_size >> 20}
        figures["nothing_learned_yet"] = _in_a_process(where)
        with Store(f"sqlite:///{where}/store.sqlite") as store:
            store.knowledge.put({name: {"last_run": RUNS} for name in ("learner/V100", "conduct")})
        figures |= {"all_learned": _in_a_process(where), "report_of_a_month": _report(where, now_s), "wanted": WANTED}
    print(json.dumps(figures, indent=1))
    (out / "history.json").write_text(json.dumps(figures, indent=1) + "\n")


def _fill(where: Path, now_s: int) -> None:
    """Each two runs shared a card for half of their hour; the last ones ended just now."""
    template = json.loads(encode_record(full_record(1)))
    seen = template["alone"]["stats"]  # what is learned from; a record's whole length would only fill the disk
    template["profile"] = {"alone_s": 3600.0, "shared_s": 0.0, "stats": {}}
    template["alone"] = {"alone_s": 1800.0, "shared_s": 0.0, "stats": seen}
    template["shared"] = {"alone_s": 0.0, "shared_s": 1800.0, "stats": seen}
    with Store.create(f"sqlite:///{where}/store.sqlite") as store:
        known = [KnownProfile(token(n), 1000, "V100", 2000 + n, 16384, n % 3, 600.0 + n) for n in range(TOKENS)]
        enter_profiles(store, known)
        for first in range(1, RUNS, AT_ONCE):
            ends = {job: now_s - EVERY_S * (RUNS - job) for job in range(first, first + AT_ONCE)}
            rows = [
                {"id": job, "state": "kept", "by_node": 1, "author_uid": 0, "run_id": f"{job:032x}", "seq": 120,
                 "token": token(job % TOKENS), "job_id": job, "node": "n0", "gpu_index": job % 4, "gpu_model": "V100",
                 "start_s": end_s - 3600, "end_s": end_s, "alone_s": 1800.0, "shared_s": 1800.0, "settled_seq": job,
                 "final": 1}
                for job, end_s in ends.items()
            ]  # fmt: skip
            bodies = {job: _body(template, job, end_s) for job, end_s in ends.items()}
            details = [{"id": job, "features": "{}", "body": body} for job, body in bodies.items()]
            with store.database.write() as connection:
                connection.execute(run.insert(), rows)
                connection.execute(run_detail.insert(), details)
            spans = [
                Span(job, job + 1, token(job % TOKENS), token((job + 1) % TOKENS), "n0", job % 4, "V100", end_s - 1800,
                     end_s, 0.8, 0.8)
                for job, end_s in ends.items() if job % 2
            ]  # fmt: skip
            store.sharing.begin(spans)


def _body(template: Mapping[str, Any], job: int, end_s: int) -> str:
    own = {"job_id": job, "run_id": f"{job:032x}", "start_s": end_s - 3600.0, "end_s": float(end_s)}
    return json.dumps({**template, **own, "neighbours": [[job + 1 if job % 2 else job - 1, 1800.0]]})


def _in_a_process(where: Path) -> dict[str, float]:
    """The helper with that store, in a process of its own: its memory is its own then."""
    done = subprocess.run([sys.executable, "-m", "bench.bench_history", str(where)], check=True, stdout=subprocess.PIPE)
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def helper(where: Path) -> dict[str, float]:
    """Run the helper until it has learned all there is, or for `LEARN_FOR_S`."""
    begun_s, late_s = time.monotonic(), list[float]()
    config = parse_config(f"GpusPerNode={GPUS_PER_NODE}\nStateDir={where}\n" + (where / "gpushare.conf").read_text())
    (where / "spool").mkdir(exist_ok=True)
    set_up_python()
    with Store(config.store_url) as store:
        daemon = Daemon(config, Slurm(LargeSite(SIZE, where).run), store)
        watch_delays(daemon, late_s)
        first_s: list[float] = []

        def watch() -> None:
            while time.monotonic() < begun_s + LEARN_FOR_S and (not daemon._ticks or daemon._to_learn):
                time.sleep(0.05)
                if daemon._ticks and not first_s:
                    first_s.append(time.monotonic() - begun_s)
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=watch, daemon=True).start()
        daemon.run()
        used = resource.getrusage(resource.RUSAGE_SELF)
        return {
            "first_tick_s": round(first_s[0], 2), "memory_mib": used.ru_maxrss >> 10,
            "runs_learned": int((store.knowledge.get("learner/V100") or {}).get("last_run", 0)),
            "seconds": round(time.monotonic() - begun_s), "ticks": daemon._ticks,
            "between_two_looks_ms_most": round(1000 * max(late_s)),
        }  # fmt: skip


def _report(where: Path, now_s: int) -> dict[str, float]:
    jobs = MONTH_S // EVERY_S
    (where / "bin").mkdir()
    (where / "bin" / "sacct").write_text(SACCT.format(now=now_s, first=RUNS - jobs + 1, jobs=jobs, every=EVERY_S))
    (where / "bin" / "sacct").chmod(0o755)
    env = os.environ | {"PATH": f"{where}/bin:{os.environ['PATH']}", "GPUSHARE_CONF": f"{where}/gpushare.conf"}
    begun_s = time.monotonic()
    command = [sys.executable, "-m", "slurm_gpushare", "report", "-S", "now-30days"]
    with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL) as process:
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert not process.returncode
    return {"jobs": jobs, "report_s": round(time.monotonic() - begun_s, 1), "memory_mib": used.ru_maxrss >> 10}


if __name__ == "__main__":
    print(json.dumps(helper(Path(sys.argv[1]))))
