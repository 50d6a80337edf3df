"""What somebody tries who has read all of the documentation: floods, replays, odd requests, files in the way."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gpushare_lab.experiment.submitting import show, wait_for
from gpushare_lab.known_profiles import KnownProfile, enter_profiles
from gpushare_lab.testbed.testbed import Testbed
from helper_kit import TOKENS, Site
from hook_testbed import USER, home_of, owned_directory, sbatch
from telemetry_bed import (
    final_records,
    log,
    samplers,
    spooled_files,
    start,
    start_measured,
    until,
    workload,
)

from slurm_gpushare.protocol.record import RecordKind

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
            f"{'another token is refused' if not kept or TOKENS[1] in kept else kept}")  # fmt: skip


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


@pytest.mark.parametrize("command", ["report --html", "assess --html", "db backup"])
def test_nothing_is_written_through_somebody_elses_link(site: Site, verdict: Verdict, command: str) -> None:
    folder = owned_directory(site.testbed.layout.home / "of-games")
    target = site.testbed.layout.home / "of-the-administrator"
    as_user(site, f"ln -s {target} {folder}/out")
    site.testbed.run(["gpushare", *command.split(), str(folder / "out")], check=False)
    verdict(f"a link where an administrator has '{command}' write, to another file", "it is not written",
            "it is written" if target.exists() else "it is not written")  # fmt: skip


HOSTILE_STORES = {
    "a pipe": "mkfifo {path}",
    "a link to another's file": "ln -s {store} {path}",
    "a terabyte of nothing": "truncate -s 1T {path}",
    "a store with a trigger": "{python} -c \"import sqlite3; sqlite3.connect('{path}').executescript('create table "
    "job(id); create table counter(name, value); create trigger t after insert on job begin delete from job; end')\"",
}


@pytest.mark.parametrize("what", HOSTILE_STORES)
def test_no_file_of_a_users_takes_the_stores_place(site: Site, verdict: Verdict, what: str) -> None:
    path = owned_directory(site.testbed.layout.home / "of-games") / "copy"
    store = site.store.database.path
    code, _ = as_user(site, HOSTILE_STORES[what].format(path=path, store=store, python=sys.executable))
    assert code == 0
    argv = ["gpushare", "db", "restore", str(path)]
    done = site.testbed.run(argv, user=site.testbed.slurm_user, check=False, timeout_s=120)
    check = site.testbed.run(["gpushare", "db", "check"], user=site.testbed.slurm_user, check=False)
    verdict(f"{what} given to an administrator to restore the store from", "refused, the store is as it was",
            f"{'refused' if done.returncode else 'restored'}, "
            f"{'the store is as it was' if check.returncode == 0 else check.stdout[-200:]}")  # fmt: skip


def test_what_users_write_is_in_no_page_and_no_table(site: Site, verdict: Verdict) -> None:
    """Formulas for who opens a table in a spreadsheet, and scripts for who opens a page."""
    names = ("=HYPERLINK(1)", "<script>alert(1)</script>", "@SUM(1+1)*cmd|' /C calc'!A0")
    for name in names:
        argv = ["sbatch", "--gpus=1", "--mem=100", f"--job-name={name}", f"--wckey={name}", "--output=/dev/null",
                f"--comment=gpushare:{TOKENS[1]} {name}"]  # fmt: skip
        site.testbed.run(argv, user=USER, input="#!/bin/sh\ntrue\n", cwd=home_of(site.testbed))
    site.tick()
    page = owned_directory(site.testbed.layout.home / "pages", "root") / "page.html"
    asked = (["report", "--csv"], ["jobs", "-a"], ["status"], ["report", "--json"])
    told = [site.testbed.run(["gpushare", *words], check=False).stdout for words in asked]
    with site.environment():  # the testbed's own Debian may have no Jinja2
        subprocess.run([sys.executable, "-m", "slurm_gpushare", "report", "--html", str(page)], check=True)
    told.append(page.read_text())
    found = [name for name in names if any(name in text for text in told)]
    verdict("formulas and scripts as names and comments of jobs", "nowhere in tables and pages",
            f"{found or 'nowhere'} in tables and pages")  # fmt: skip


def test_many_tokens_of_one_user_hold_nobody_up(site: Site, verdict: Verdict) -> None:
    """As many as one can bring with a job each; a profile for each of them."""
    many = [f"gs-{number:020d}".translate(str.maketrans("0189", "abcd")) for number in range(50_000)]
    enter_profiles(site.store, [KnownProfile(token, GAMES, "V100", 2000, 16384, 1, 600.0) for token in many])
    began = time.monotonic()
    site.beat()
    site.testbed.wait_for_hook()
    other = sbatch(site.testbed, "--gpus=1", "--mem=100", token=TOKENS[0], user="root")
    answered_s = time.monotonic() - began
    site.tick()
    took_s = time.monotonic() - began - answered_s
    tag = other.tag(site.testbed)
    verdict("50,000 tokens of one user", "another's job is tagged, ticks",
            f"another's job is {'tagged' if tag and tag.token else 'not tagged'}, "
            f"{'ticks' if took_s < 60 else f'a tick takes {took_s:.0f} s'}")  # fmt: skip
    print(f"publishing and sbatch {answered_s:.1f} s, a tick {took_s:.1f} s")


@pytest.mark.usefixtures("raw_shards")
def test_a_nodes_sealed_record_serves_nobody_else(site: Site, verdict: Verdict) -> None:
    """Copied from a backup of the spool, say: munge calls it a replay, or expired, and it is the node's still."""
    testbed, user = site.testbed, site.testbed.slurm_user
    job = start_measured(testbed, workload(40, 20, 2048, work_s=3), f"--comment=gpushare:{TOKENS[1]}")
    until(lambda: spooled_files(testbed, RecordKind.INTERIM))
    copies = [path.read_bytes() for path in spooled_files(testbed, RecordKind.INTERIM)]
    wait_for(testbed, job, ["COMPLETED"])
    final_records(testbed)
    copies += [path.read_bytes() for path in spooled_files(testbed, RecordKind.FINAL)]

    def known() -> tuple[object, ...]:
        testbed.run(["gpushare", "ingest"], user=user, check=False)
        runs = [(run.id, run.job_id, run.token, run.end_s) for run in site.store.runs.after(0)]
        return runs, site.store.profiles.get(TOKENS[1])

    until(lambda: known()[0])
    before = known()
    for number, copy in enumerate(copies):
        for name in (f"gpu1-{job + 1}-{number}-f.rec", f"gpu0-{job}-{number}-i.rec"):
            path = site.config.spool_dir / "incoming" / name
            path.write_bytes(copy)
            os.chown(path, GAMES, GAMES)
    after = known()
    left = list((site.config.spool_dir / "incoming").glob("*.rec"))
    verdict(
        "a node's sealed records sent again, under the names of another node and job, and late",
        "nothing changes, nothing is left there",
        f"{'nothing' if after == before else 'something'} changes, {left or 'nothing'} is left there",
    )


FILLS = """
import os, time
handle = os.open("{incoming}/keeps.rec", os.O_WRONLY | os.O_CREAT)
os.unlink("{incoming}/keeps.rec")
try:
    while os.write(handle, bytes(4096)):
        pass
except OSError:
    print("full", flush=True)
    time.sleep(600)
"""


@pytest.mark.usefixtures("raw_shards")
@pytest.mark.parametrize(("mounted", "when"), [("spool/incoming", "at once"), ("spool", "when there is room again")])
def test_a_full_spool_of_a_users_making_costs_no_record(site: Site, verdict: Verdict, mounted: str, when: str) -> None:
    """A file that is deleted and kept open, which the helper can neither see nor remove. First as the guide has it."""
    testbed, top = site.testbed, site.testbed.layout.gpushare / mounted
    spool, incoming = site.config.spool_dir, site.config.spool_dir / "incoming"
    ticks = testbed.run(["gpushare", "backfill", "--once"], user=testbed.slurm_user, check=False)
    assert ticks.returncode == 0, ticks.stderr
    testbed.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(top)])
    try:
        for path, mode in ((spool, "711"), (incoming, "1733"), (spool / "nodes", "700")):
            testbed.run(["sh", "-c", f"mkdir -p {path} && chown {testbed.slurm_user} {path} && chmod {mode} {path}"])
        argv, env = testbed.command([sys.executable, "-c", FILLS.format(incoming=incoming)], user=USER)
        with subprocess.Popen(argv, env=env, cwd="/", stdout=subprocess.PIPE) as filler:
            assert filler.stdout is not None
            assert filler.stdout.readline() == b"full\n"
            job = start(testbed, workload(work_s=1))
            wait_for(testbed, job, ["COMPLETED"])
            came = lambda: f"gpu0-{job}-" in testbed.run(["ls", f"{spool}/nodes"]).stdout  # noqa: E731
            if when == "at once":
                until(came)
            else:
                until(lambda: "No space left" in log(testbed))
            kept = "at once" if came() else "not at once"
            filler.kill()
        until(came)
        kept = kept if kept == "at once" else "when there is room again"
    finally:
        testbed.run(["umount", "-l", str(top)])
    verdict(f"filling the file system of {mounted} with a file that was deleted and is kept open",
            f"the node's record is there {when}", f"the node's record is there {kept}")  # fmt: skip


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
