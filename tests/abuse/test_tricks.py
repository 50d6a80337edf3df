"""What somebody tries who has read all of the documentation: floods, replays, odd requests, files in the way."""

from __future__ import annotations

import os
import pwd
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gpushare_lab.experiment.submitting import show
from gpushare_lab.testbed.testbed import Testbed
from helper_kit import TOKENS, Site
from hook_testbed import USER, home_of, sbatch
from telemetry_bed import samplers, start, until

pytestmark = pytest.mark.full

Verdict = Callable[[str, str, str], None]
GAMES = pwd.getpwnam(USER).pw_uid
MOST_LINES = 400
"""Of the helper's log, for whatever one user does within some seconds."""


@pytest.fixture
def site(testbed: Testbed) -> Iterator[Site]:
    site = Site(testbed, owners={1: GAMES})
    yield site
    site.store.close()


def as_user(site: Site, script: str, timeout_s: float = 120) -> tuple[int, str]:
    argv = ["sh", "-c", script]
    done = site.testbed.run(argv, user=USER, check=False, cwd=home_of(site.testbed), timeout_s=timeout_s)
    return done.returncode, done.stdout


def test_a_thousand_short_jobs_fill_no_log(site: Site, verdict: Verdict) -> None:
    log = site.testbed.dir / "log" / "backfill.log"
    with site.process():
        size = log.stat().st_size
        argv = ["sbatch", "--gpus=1", "--mem=100", "--array=0-499", f"--comment=gpushare:{TOKENS[1]}", "--parsable",
                "--output=/dev/null"]  # fmt: skip
        flood = site.testbed.run(argv, user=USER, input="#!/bin/sh\ntrue\n", cwd=home_of(site.testbed)).stdout.strip()
        plain = ["sbatch", "--mem=1", "--array=0-199", "--parsable", "--output=/dev/null"]
        other = site.testbed.run(plain, user=USER, input="#!/bin/sh\ntrue\n", cwd=home_of(site.testbed)).stdout.strip()
        time.sleep(20)
        alive = site.alive()
        lines = log.read_bytes()[size:].count(b"\n")
        site.testbed.run(["scancel", flood, other])
    verdict("700 jobs of no time at once, 500 of them with a token", "the helper lives, few lines of log",
            f"the helper {'lives' if alive else 'is dead'}, "
            f"{'few' if lines <= MOST_LINES else lines} lines of log")  # fmt: skip


def test_changes_of_a_job_in_a_loop_keep_nobody_from_ticking(site: Site, verdict: Verdict) -> None:
    job = sbatch(site.testbed, "--gpus=1", "--begin=now+1hour", token=TOKENS[1]).job_id
    loop = "while :; do for c in gpushare: gpushare:gs-x x; do echo update JobId={job} Comment=$c; done; done"
    argv, env = site.testbed.command(["sh", "-c", loop.format(job=job) + " | timeout 15 scontrol >/dev/null 2>&1"],
                                     user=USER)  # fmt: skip
    with subprocess.Popen(argv, env=env, cwd="/", stdout=subprocess.DEVNULL) as process:
        began = time.monotonic()
        for _ in range(3):
            site.tick()
        took_s = time.monotonic() - began
        process.kill()
    kept = show(site.testbed, job).get("AdminComment")
    verdict("the comment of a job with a token changed without a pause", "ticks, another token is refused",
            f"{'ticks' if took_s < 60 else f'a tick takes {took_s:.0f} s'}, "
            f"{'another token is refused' if kept is None or TOKENS[1] in kept else kept}")  # fmt: skip


def test_jobs_of_several_parts_and_jobs_that_wait_for_others(site: Site, verdict: Verdict) -> None:
    word = f"--comment=gpushare:{TOKENS[1]}"
    argv = ["sbatch", "--parsable", "--begin=now+1hour", word, "--gpus=1", ":", word, "--gpus=1"]
    done = site.testbed.run(argv, user=USER, input="#!/bin/sh\ntrue\n", check=False, cwd=home_of(site.testbed))
    first = int(done.stdout.split(";")[0])
    parts = [show(site.testbed, job).get("AdminComment", "") for job in (first, first + 1)]
    before = sbatch(site.testbed, "--gpus=1", "--begin=now+1hour", token=TOKENS[1]).job_id
    after = sbatch(site.testbed, "--gpus=1", f"--dependency=afterok:{before}", token=TOKENS[1]).job_id
    site.tick()
    waits = site.jobs()[str(after)]
    placed = waits.tag is not None and waits.tag.placed is not None
    verdict("a heterogeneous job with tokens, and a job that waits for another",
            "no part is tagged, who waits is not placed",
            f"{'no part is tagged' if not any('GS1' in part for part in parts) else parts}, "
            f"who waits is {'placed' if placed else 'not placed'}")  # fmt: skip


def test_files_of_ours_cannot_be_opened_or_locked(site: Site, verdict: Verdict) -> None:
    site.beat()
    names = [site.config.hook_file, site.config.spool_dir / "nodes", site.config.state_dir / "ended"]
    code, _ = as_user(site, " || ".join(f"flock -n {name} true || cat {name} >/dev/null" for name in names))
    verdict("opening or locking hook.sqlite, the nodes' spool, the pipe of ended jobs", "refused",
            "refused" if code else "opened")  # fmt: skip


@pytest.mark.parametrize("gres", ["gpu:1g.5gb:1", "gpu:a100_mig_3g.20gb:1", "mps:50", "mig:1", "gpu:v100_0:1,mps:10"])
def test_names_of_parts_of_cards_in_a_request_are_left_to_slurm(site: Site, verdict: Verdict, gres: str) -> None:
    argv = ["sbatch", "--parsable", "--hold", f"--comment=gpushare:{TOKENS[1]}", f"--gres={gres}"]
    done = site.testbed.run(argv, user=USER, input="#!/bin/sh\ntrue\n", check=False, cwd=home_of(site.testbed))
    shares = bool(done.stdout.strip()) and "shard" in str(show(site.testbed, int(done.stdout)))
    verdict(f"a request for {gres} with a token", "left alone", "shares" if shares else "left alone")


def test_a_page_is_not_written_through_somebody_elses_link(site: Site, verdict: Verdict) -> None:
    folder = site.testbed.layout.home
    target = folder / "of-the-administrator"
    as_user(site, f"ln -s {target} {folder}/page.html")
    site.testbed.run(["gpushare", "report", "--html", str(folder / "page.html")], check=False)
    verdict("a link where an administrator writes a page, so that another file is written", "the file is not written",
            "the file is not written" if not target.exists() else "it is written")  # fmt: skip


@pytest.mark.usefixtures("raw_shards")
def test_a_job_of_many_processes_costs_its_sampler_little(testbed: Testbed, verdict: Verdict) -> None:
    job = start(testbed, "for i in $(seq 1000); do sleep 600 & done; wait", "--mem=100")
    until(lambda: samplers(testbed))
    (pid,) = samplers(testbed)
    time.sleep(15)
    words = lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # noqa: E731
    spent = lambda: (int(words()[11]) + int(words()[12])) / os.sysconf("SC_CLK_TCK")  # noqa: E731
    began_s, before_s = time.monotonic(), spent()
    time.sleep(15)
    share = (spent() - before_s) / (time.monotonic() - began_s)
    testbed.run(["scancel", str(job)])
    verdict("1,000 sleeping children in a job, for root's sampler to look at", "at most 3 % of a core",
            "at most 3 % of a core" if share <= 0.03 else f"{100 * share:.1f} % of a core")  # fmt: skip
