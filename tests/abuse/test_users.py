"""What an ordinary user with a login may try against the helper, the spool, the nodes and other people's profiles."""

from __future__ import annotations

import json
import os
import pwd
import secrets
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gpushare_lab.experiment.submitting import show, wait_for
from gpushare_lab.known_profiles import KnownProfile, enter_profiles
from gpushare_lab.testbed.testbed import Testbed
from helper_kit import TOKENS, Site
from hook_testbed import USER, home_of, sbatch
from telemetry_bed import configure, node_dir, samplers, spooled, start, until, workload

from slurm_gpushare.protocol.record import RecordKind
from slurm_gpushare.slurm import commands
from slurm_gpushare.slurm.accounting import AccountingQuery
from slurm_gpushare.slurm.commands import connect
from slurm_gpushare.store.spool import ENTRIES_A_LOOK, FILES_A_USER, KEPT_REJECTED

Verdict = Callable[[str, str, str], None]
GAMES = pwd.getpwnam(USER).pw_uid
MINE = "gs-" + "m" * 19 + "7"  # none of TOKENS


@pytest.fixture
def site(testbed: Testbed) -> Iterator[Site]:
    site = Site(testbed)
    yield site
    site.store.close()


def as_user(testbed: Testbed, script: str, user: str = USER) -> subprocess.CompletedProcess[str]:
    return testbed.run(["sh", "-c", script], user=user, check=False, cwd=home_of(testbed, user))


def python_as_user(testbed: Testbed, script: str) -> subprocess.CompletedProcess[str]:
    return testbed.run([sys.executable, "-c", script], user=USER, check=False, cwd=home_of(testbed), timeout_s=900)


def ticks(site: Site) -> str:
    """Whether a helper, as SlurmUser, gets through a tick."""
    argv = [sys.executable, "-m", "slurm_gpushare", "backfill", "--once"]
    done = site.testbed.run(argv, user=site.testbed.slurm_user, check=False, timeout_s=600)
    return "ticks" if done.returncode == 0 else f"fails: {done.stderr[-200:]}"


def test_the_question_to_squeue_cannot_be_read(site: Site, verdict: Verdict) -> None:
    """Whoever knows the delimiter can write a comment that looks like a row of somebody else's job."""
    seen: set[str] = set()
    stop, here = threading.Event(), os.fsencode(site.testbed.dir)

    def spy() -> None:
        while not stop.is_set():
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    words = path.read_bytes().split(b"\0")
                    ours = here in path.with_name("environ").read_bytes()
                except OSError:
                    continue
                if ours and any(word.endswith(b"squeue") for word in words[:2]):
                    seen.add(" ".join(word.decode(errors="replace") for word in words))

    watcher = threading.Thread(target=spy)
    watcher.start()
    try:
        deadline = time.monotonic() + 60
        while not any("--noheader" in line for line in seen) and time.monotonic() < deadline:
            site.jobs()
    finally:
        stop.set()
        watcher.join()
    told = [line for line in seen if "~" in line or "ormat" in line]
    found = "squeue is seen" if seen else "nothing is seen"
    verdict("reading squeue's delimiter in /proc/PID/cmdline", "squeue is seen, its format is not",
            f"{found}, its format is {'seen' if told else 'not'}")  # fmt: skip


def test_who_knows_saccts_delimiter_forges_no_row(
    site: Site, verdict: Verdict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is on sacct's command line. The word that begins a row is in its environment."""
    victim = sbatch(site.testbed, "--gpus=1", "--hold", user="nobody", token="").job_id
    known, words = "~known~", iter(range(1000))
    monkeypatch.setattr(commands, "new_delimiter", lambda: known if next(words) % 2 == 0 else secrets.token_hex(12))
    forged = f"x{known}\n~1700000000{known}{victim}{known}gpushare:{MINE}"
    spoken = sbatch(site.testbed, "--gpus=1", "--hold", f"--comment={forged}", "--job-name=x", token="").job_id
    site.testbed.run(["scancel", str(victim), str(spoken)])  # accounting gets comments when jobs end
    jobs = [str(victim), str(spoken)]
    told = ["sacct", "-X", "-n", "-P", "-j", str(spoken), "-o", "Comment"]
    until(lambda: known in site.testbed.run(told).stdout)
    ended = ["sacct", "-X", "-n", "-P", "-j", str(victim), "-o", "State"]
    until(lambda: "CANCELLED" in site.testbed.run(ended).stdout)  # of one job accounting may hear before the other
    with site.environment():
        slurm = connect()
        comments, accounted = slurm.accounted_comments(jobs), slurm.accounting(AccountingQuery(jobs=jobs))
    seen = "no token" if comments.get(victim) == "" else f"{comments}"
    whole = "both jobs" if {job.raw_id for job in accounted} == {victim, spoken} else f"{accounted}"
    verdict("a comment with sacct's delimiter that looks like another job's row", "no token, both jobs are read",
            f"{seen}, {whole} are read")  # fmt: skip


HOSTILE = (
    f"echo x > {'x' * 251}.rec",
    "mkdir d.rec && touch d.rec/inside",
    "mkdir e.rec && rmdir e.rec && echo x > e.rec",
    "ln -s /etc/shadow l.rec; mkfifo p.rec; truncate -s 1T s.rec; ln -s loop.rec loop.rec",
    "echo x > \"$(printf 'a\\033[2J\\nb').rec\"",
)


def test_no_entry_of_the_spool_stops_the_helper(site: Site, verdict: Verdict) -> None:
    incoming = site.config.spool_dir / "incoming"
    for attack in HOSTILE:
        done = as_user(site.testbed, f"cd {incoming} && {attack}")
        assert done.returncode == 0, done.stderr
    seen = {ticks(site), ticks(site)}
    left = sorted(path.name for path in incoming.iterdir())
    doctor = site.testbed.run(["gpushare", "doctor"], check=False).stdout
    named = "doctor names it" if "d.rec" in doctor else "doctor is silent"
    as_user(site.testbed, f"rm -r {incoming}/d.rec")
    verdict(
        "a name of 255 bytes, a full directory, links, pipes, a sparse terabyte, escape sequences in the spool",
        "ticks, only the directory is left, doctor names it",
        f"{', '.join(sorted(seen))}, {'only the directory is' if left == ['d.rec'] else left} left, {named}",
    )


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", [3_000, pytest.param(120_000, marks=pytest.mark.full)])
def test_a_flood_of_files_is_cut(site: Site, verdict: Verdict, count: int) -> None:
    incoming = site.config.spool_dir / "incoming"
    script = f"import os\nfor n in range({count}): open(f'{incoming}/{{n}}.rec', 'w').write('x' * 100)"
    assert python_as_user(site.testbed, script).returncode == 0
    looks = -(-count // ENTRIES_A_LOOK)
    tick = {ticks(site) for _ in range(looks)}
    left = sum(1 for _ in incoming.iterdir())
    kept = sum(1 for _ in (site.config.spool_dir / "rejected").iterdir())
    few = "few files left" if left <= FILES_A_USER and kept <= 2 * KEPT_REJECTED else f"{left} and {kept} files left"
    verdict(f"{count:,} files in the spool at once", "ticks, few files left", f"{', '.join(sorted(tick))}, {few}")


@pytest.mark.full
def test_a_flood_of_sealed_records_founds_nothing(site: Site, verdict: Verdict) -> None:
    """Records of a thousand tokens, each sealed as a user may seal it."""
    tokens = [f"gs-{number:020d}".translate(str.maketrans("0189", "abcd")) for number in range(1, 1001)]
    done = python_as_user(site.testbed, FORGED.replace("TOKENS", repr(tokens)))
    assert done.returncode == 0, done.stderr
    tick = {ticks(site) for _ in range(3)}
    founded, claimed = site.store.profiles.by_model(set(tokens)), site.store.workloads.owners_by_token(tokens)
    sound = site.testbed.run(["gpushare", "db", "check"], user=site.testbed.slurm_user, check=False).returncode == 0
    verdict("1,000 forged records of as many tokens", "ticks, none founded or claimed, the store is sound",
            f"{', '.join(sorted(tick))}, {'none' if not any(founded.values()) and not claimed else 'some'} founded or "
            f"claimed, the store is {'sound' if sound else 'not'}")  # fmt: skip


def test_the_helpers_lock_is_its_own(site: Site, verdict: Verdict) -> None:
    ticks(site)
    done = as_user(site.testbed, f"flock -n {site.config.state_dir}/backfill.lock true")
    verdict("taking the helper's lock", "refused, ticks",
            f"{'refused' if done.returncode else 'taken'}, {ticks(site)}")  # fmt: skip


FORGED = """
import time
from slurm_gpushare.protocol.settings import load_config
from slurm_gpushare.protocol.record import *
from slurm_gpushare.node.delivery import write_record
stat = Stat(500, 3.0, 3.0, 3.0, 3.0, 0.0)
period = Period(300.0, 0.0, {"gpu_util_pct": stat})
now = time.time()
for token in TOKENS:
    write_record(Record(new_id(), new_id(), 1, RecordKind.FINAL, Scope.COMMAND, 1, "gpu0", 0, "V100", now - 300, now,
        Closed.END, Features(3.0, 2.0, 1.0, 3.0, 1.0, 300.0, 16384.0), period, Period(300.0, 0.0), Period(), (), token),
        load_config().spool_dir, load_config().munge_socket)
"""


def test_a_forged_record_founds_nothing_and_claims_nothing(site: Site, verdict: Verdict) -> None:
    """ "3 %, 300 MiB", written without any job, of a token of one's own and of one that was seen in squeue."""
    seen_in_squeue = "gs-" + "s" * 19 + "7"
    done = python_as_user(site.testbed, FORGED.replace("TOKENS", repr([MINE, seen_in_squeue])))
    assert done.returncode == 0, done.stderr
    tick = ticks(site)
    founded = [token for token in (MINE, seen_in_squeue) if site.store.profiles.get(token)]
    claimed = site.store.workloads.owners_by_token((MINE, seen_in_squeue))
    seen = f"{tick}, {'founded' if founded else 'not founded'}, {'claimed' if claimed else 'not claimed'}"
    verdict("a record forged without a job", "ticks, not founded, not claimed", seen)


@pytest.mark.full
def test_one_record_under_many_names_counts_once(site: Site, verdict: Verdict) -> None:
    """A credential can be copied and sent again; munge itself would call the second a replay."""
    incoming = site.config.spool_dir / "incoming"
    script = FORGED.replace("TOKENS", repr([MINE]))
    assert python_as_user(site.testbed, script).returncode == 0
    (path,) = incoming.glob("*.rec")
    for number in range(50):
        copy = incoming / f"copy{number}.rec"
        copy.write_bytes(path.read_bytes())
        os.chown(copy, GAMES, GAMES)
    done = site.testbed.run(["gpushare", "ingest", "--json"], user=site.testbed.slurm_user, check=False)
    runs = len(list(site.store.runs.after(0)))
    verdict("one sealed record 51 times under other names", "counts at most once",
            "counts at most once" if runs <= 1 and done.returncode == 0 else f"{runs} runs")  # fmt: skip


@pytest.mark.usefixtures("raw_shards")
def test_a_job_past_its_profile_is_noticed(site: Site, verdict: Verdict) -> None:
    """A profile says 3 % and 300 MiB; the job takes all of the card and 13 GB."""
    features = {"mgup": 3.0, "gpu_util_mean_pct": 3.0, "gpu_util_sd_pct": 0.5}
    enter_profiles(site.store, [KnownProfile(TOKENS[0], 0, "V100", 300, 16384, 0, 600.0, features)])
    job = site.submit(0, script=f"unset GPUSHARE_EPOCH_FILE; {workload(100, 50, 13000, work_s=600, epochs=100)}")
    daemon = site.daemon()
    until(lambda: _tick(site, daemon) or site.store.violations.to_measure(), 300)
    site.testbed.run(["scancel", job])
    (strike,) = site.store.violations.strikes_by_uid()
    site.beat()
    site.testbed.wait_for_hook()
    again = sbatch(site.testbed, "--gpus=1", "--begin=now+1hour", token=TOKENS[0], user="root")
    tag = again.tag(site.testbed)
    seen = f"{strike.strikes} strike, its next job is {'measured' if tag and tag.probe else f'tagged {tag}'}"
    verdict("a job that takes far more than was measured", "1 strike, its next job is measured", seen)


def _tick(site: Site, daemon: object) -> None:
    with site.environment():
        daemon.once()  # type: ignore[attr-defined]


@pytest.mark.usefixtures("raw_shards")
def test_the_epoch_file_holds_nothing(testbed: Testbed, verdict: Verdict) -> None:
    script = (
        'd=$(dirname "$GPUSHARE_EPOCH_FILE"); head -c 2000000 /dev/zero > "$GPUSHARE_EPOCH_FILE"; '
        'touch "$d/more" 2>/dev/null && echo made; mkdir "$d/sub" 2>/dev/null && echo made; '
        'touch "$GPUSHARE_EPOCH_FILE" && echo touched; stat -c %s "$GPUSHARE_EPOCH_FILE"'
    )
    job = start(testbed, script, "--comment=gpushare:gs-epochsepochsepochs22")
    wait_for(testbed, job, ["COMPLETED"])
    said = (testbed.layout.home / USER / f"{job}.out").read_text().split()
    verdict("filling the epoch file and its directory", "touched, 0 bytes", f"{', '.join(said)} bytes")


@pytest.mark.usefixtures("raw_shards")
def test_the_sampler_knows_nothing_of_the_jobs_environment(testbed: Testbed, verdict: Verdict) -> None:
    """What is in slurmd's environment must not lead a process of root's elsewhere."""
    prolog = testbed.layout.etc / "prolog.sh"
    prolog.write_text(prolog.read_text().replace("exec ", "export PYTHONPATH=/tmp/evil LD_PRELOAD= EVIL=1\nexec ", 1))
    job = start(testbed, "sleep 600")
    until(lambda: spooled(testbed, RecordKind.INTERIM))  # until then it may be a shell with the prolog's variables
    (pid,) = samplers(testbed)
    names = {item.split(b"=")[0].decode() for item in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if item}
    testbed.run(["scancel", str(job)])
    foreign = {name for name in names if not name.startswith("GPUSHARE")} - {
        "PATH", "SLURM_CONF", "LD_LIBRARY_PATH", "MYSQL_UNIX_PORT",
    }  # fmt: skip
    verdict("variables in the prolog's environment", "none reaches the sampler",
            "none reaches the sampler" if not foreign else f"{sorted(foreign)} reach it")  # fmt: skip


@pytest.mark.usefixtures("raw_shards")
def test_nothing_of_a_nodes_state_is_a_users_to_write(testbed: Testbed, verdict: Verdict) -> None:
    configure(testbed, DcgmJobMappingDir=str(testbed.dir / "dcgm"))
    job = start(testbed, "sleep 600")
    until(lambda: samplers(testbed) and list(testbed.dir.glob("dcgm/0")))
    open_to_all = [
        str(path.relative_to(testbed.dir))
        for top in (node_dir(testbed), testbed.dir / "dcgm")
        for path in top.rglob("*")
        if path.lstat().st_mode & 0o022
    ]
    users = [path for path in node_dir(testbed).rglob("*") if path.lstat().st_uid == GAMES]
    locks = {stat.S_IMODE(path.stat().st_mode) for path in testbed.dir.glob("dcgm/.gpushare.lock")}
    testbed.run(["scancel", str(job)])
    only_epoch = all(stat.S_ISCHR(path.lstat().st_mode) for path in users)
    verdict("writing into a node's state, holding DCGM's lock", "nothing to write, locks 600",
            f"{'nothing to write' if not open_to_all and only_epoch else f'{open_to_all}{users}'}, "
            f"locks {'600' if locks == {0o600} else locks}")  # fmt: skip


def test_a_directory_made_beforehand_is_refused(testbed: Testbed, verdict: Verdict) -> None:
    trap = testbed.layout.home / "trap"
    as_user(testbed, f"mkdir {trap}")
    argv = [sys.executable, "-m", "gpushare_lab", "testbed", "up", "--dir", str(trap)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    seen = "refused" if done.returncode == 2 and "somebody else" in done.stderr else f"{done.returncode}: {done.stderr}"
    verdict("'testbed up' in a directory that a user made", "refused, empty",
            f"{seen}, {'empty' if not any(trap.iterdir()) else 'used'}")  # fmt: skip


SQUEUE_COLUMNS = """
account accruetime admin_comment allocnodes allocsid arrayjobid arraytaskid associd batchflag batchhost boardspernode
burstbuffer burstbufferstate cluster clusterfeature command comment container containerid contiguous cores corespec
cpufreq cpus-per-task cpus-per-tres deadline delayboot dependency derivedec eligibletime endtime exc_nodes exit_code
feature gres groupid groupname hetjobid hetjobidset hetjoboffset jobarrayid jobid lastschedeval licenses licensesalloc
maxcpus maxnodes mcslabel mem-per-tres mincpus minmemory mintime mintmpdisk name network nice nodelist nodes ntperboard
ntpercore ntpernode ntpersocket numcpus numnodes numtasks origin originraw oversubscribe partition pendingtime
preempttime prefer priority prioritylong profile qos reason reasonlist reboot reqnodes reqswitch requeue reservation
resizetime restartcnt resvport schednodes sct selectjobinfo shared siblingsactive siblingsactiveraw siblingsviable
siblingsviableraw sockets sperboard starttime state statecompact stderr stdin stdout submittime system_comment threads
timeleft timelimit timeused tres tres-alloc tres-bind tres-freq tres-per-job tres-per-node tres-per-socket
tres-per-step tres-per-task userid username wait4switch wckey workdir
"""
"""Of squeue -O, over the releases: 22.05 cannot list its own."""


def _squeue(testbed: Testbed, job: int) -> dict[str, str]:
    """What every column of squeue that this release knows says of a job."""
    listed = testbed.run(["squeue", "--helpFormat"], check=False)
    newer = listed.stdout.lower().split() if listed.returncode == 0 else []
    columns = sorted({*SQUEUE_COLUMNS.split(), *newer})
    script = f"""for column in {" ".join(columns)}; do
value=$(squeue -h -a -j {job} -O "$column:2000" 2>/dev/null) && printf '%s=%s\\0' "$column" "$value"
done; true"""
    answers = testbed.run(["sh", "-c", script], timeout_s=300).stdout.split("\0")[:-1]
    return {column: value.strip() for column, _, value in (answer.partition("=") for answer in answers)}


def _places(testbed: Testbed, secret: str, job: int) -> set[str]:
    """Every column of sacct and squeue, every line of scontrol, and every file of ours and of slurmctld's."""
    found: set[str] = set()
    columns = testbed.run(["sacct", "-e"]).stdout.split()
    mark = "~every-column~"
    asked = testbed.run(
        ["sacct", "-X", "-n", "--parsable", f"--delimiter={mark}", "-j", str(job), "-o", ",".join(columns)]
    )
    values = asked.stdout.split(mark)
    assert len(values) >= len(columns), asked.stdout
    found |= {f"sacct {column}" for column, value in zip(columns, values, strict=False) if secret in value}
    queue = _squeue(testbed, job)
    assert queue["jobid"] == str(job)
    assert len([value for value in queue.values() if value]) > 60, queue
    found |= {f"squeue {column}" for column, value in queue.items() if secret in value}
    for line in testbed.run(["scontrol", "show", "job", "-d", str(job)]).stdout.split("\n"):
        if secret in line:
            found.add(f"scontrol {line.split('=')[0].strip()}")
    for top in (testbed.layout.gpushare, testbed.layout.log, testbed.layout.spool):
        for path in top.rglob("*"):
            if path.is_file() and secret.encode() in _content(path):
                found.add(path.name.removesuffix(".old").removesuffix(".new"))
    return found


def _content(path: Path) -> bytes:
    """What is in a file; nothing if it has just been renamed: slurmctld writes NAME.new, which then becomes NAME."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


def test_a_workloads_name_stays_at_home(site: Site, verdict: Verdict) -> None:
    secret = f"unicorn{os.getpid()}"
    testbed = site.testbed
    token = as_user(testbed, f"{sys.executable} -m slurm_gpushare token {secret}").stdout.strip()
    assert token.startswith("gs2-")
    job = sbatch(testbed, "--gpus=1", "--begin=now+1hour", token=token).job_id
    testbed.run(["scontrol", "update", f"JobId={job}", "Nice=1"])  # writes job_state
    ticks(site)
    until(lambda: token in testbed.run(["sacct", "-X", "-n", "-P", "-j", str(job), "-o", "SubmitLine,Comment"]).stdout)
    verdict("finding the name behind $(gpushare token NAME)", "nowhere",
            ", ".join(sorted(_places(testbed, secret, job))) or "nowhere")  # fmt: skip


def test_a_name_on_the_command_line_is_in_slurms_own_record(site: Site, verdict: Verdict) -> None:
    """docs/privacy.md says so, and recommends the other way."""
    secret = f"griffin{os.getpid()}"
    testbed = site.testbed
    as_user(testbed, f"{sys.executable} -m slurm_gpushare token {secret}")
    job = sbatch(testbed, "--gpus=1", "--begin=now+1hour", token=secret).job_id
    until(lambda: secret in testbed.run(["sacct", "-X", "-n", "-P", "-j", str(job), "-o", "SubmitLine"]).stdout)
    told = _places(testbed, secret, job) - {"job_state"}
    verdict("a name written into --comment=gpushare:NAME", "only in SubmitLine and job_state",
            "only in SubmitLine and job_state" if told <= {"sacct SubmitLine", "scontrol SubmitLine"}
            else ", ".join(sorted(told)))  # fmt: skip
    assert "sacct SubmitLine" in told
    assert show(testbed, job).get("Comment", "").startswith("gpushare:gs2-")


def test_administrators_see_who_was_struck(site: Site, verdict: Verdict) -> None:
    done = site.testbed.run(["gpushare", "db", "strikes", "--json"], user=site.testbed.slurm_user)
    verdict("asking who had strikes", "a list", "a list" if isinstance(json.loads(done.stdout), list) else done.stdout)
