"""What the owner of a job sees without access to the store, and what nobody else does, on a real Slurm."""

from __future__ import annotations

import json
import pwd
import subprocess
import sys
from datetime import datetime, timedelta
from typing import Any

import pytest
from gpushare_lab.experiment.submitting import submit
from gpushare_lab.known_profiles import KnownProfile, enter_profiles
from gpushare_lab.testbed.processes import wait_until
from gpushare_lab.testbed.testbed import Testbed
from helper_kit import Site
from telemetry_bed import workload

from slurm_gpushare.helper.occupancy import GpuAddress
from slurm_gpushare.store.published import OWNERS, PUBLIC

ANN, BOB = "games", "man"


def gpushare(testbed: Testbed, *arguments: str, user: str | None = None, code: int = 0) -> tuple[str, str]:
    command = [sys.executable, "-m", "slurm_gpushare", *arguments]
    done: subprocess.CompletedProcess[str] = testbed.run(command, user=user, check=False)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout, done.stderr


def document(testbed: Testbed, *arguments: str, user: str | None = None) -> Any:
    return json.loads(gpushare(testbed, *arguments, "--json", user=user)[0])


class Owners:
    """Ann's and Bob's jobs share the one card that strangers left; one more of Ann's waits."""

    def __init__(self, testbed: Testbed) -> None:
        self.site, self.testbed = Site(testbed), testbed
        # Accounting still has the jobs of earlier tests, in whole seconds: they ended before this one begins.
        begins = datetime.now().replace(microsecond=0) + timedelta(seconds=1)
        assert wait_until(lambda: datetime.now() >= begins, 5)
        self.since = f"{begins:%Y-%m-%dT%H:%M:%S}"
        self.tokens = {ANN: "gs-" + "2" * 20, BOB: "gs-" + "3" * 20}
        owners = {user: pwd.getpwnam(user).pw_uid for user in self.tokens}
        profiles = [KnownProfile(self.tokens[u], uid, "V100", 2000, 16384, 1, 600.0) for u, uid in owners.items()]
        enter_profiles(self.site.store, profiles)
        self.site.beat()
        testbed.wait_for_hook()
        self.ann = self.submit(ANN)
        index = self.site.index(self.ann)
        self.bob = self.submit(BOB)
        while self.site.index(self.bob) != index:  # before 23.11 the submit hook chooses it
            testbed.run(["scancel", self.bob])
            self.bob = self.submit(BOB)
        cards = [GpuAddress(node, i) for node in ("gpu0", "gpu1") for i in (0, 1)]
        self.site.block(card for card in cards if card != GpuAddress("gpu0", index))
        self.daemon = self.site.daemon("fcfs")
        self.tick()
        self.site.wait_running([self.ann, self.bob])
        self.waits = self.submit(ANN)
        self.tick()

    def submit(self, user: str) -> str:
        options = ("--gres=gpu:1", "--mem=100", "--output=/dev/null", "--job-name=my-net")
        comment = f"--comment=gpushare:{self.tokens[user]}"
        return str(submit(self.testbed, workload(40, 20, 3000, work_s=300), *options, comment, user=user))

    def tick(self) -> None:
        with self.site.environment():
            self.daemon.once()

    def fresh_tick(self) -> None:
        """A tick of a new helper: it looks at PrivateData and at all owners at once."""
        self.daemon = self.site.daemon("fcfs")
        self.tick()


@pytest.fixture
def owners(testbed: Testbed) -> Owners:
    return Owners(testbed)


def test_an_owner_sees_cost_reasons_and_telemetry_and_another_user_only_numbers(owners: Owners) -> None:
    testbed = owners.testbed

    def measured() -> bool:
        owners.fresh_tick()
        (job,) = document(testbed, "job", owners.ann, user=ANN)
        return job["telemetry"] is not None and job["telemetry"]["gpu_busy_pct"] is not None

    assert wait_until(measured, 120)
    (job,) = document(testbed, "job", owners.ann, user=ANN)
    (stay,) = job["stays"]
    assert (stay["beside"], stay["measured_isd_pct"]) == (int(owners.bob), None)
    assert stay["expected_isd_pct"] is not None
    assert job["telemetry"]["gpu_mem_total_mib"] == 16384
    said, _ = gpushare(testbed, "job", owners.ann, owners.waits, user=ANN)
    assert "GPU busy" in said
    assert "Why it waits" in said
    assert max(map(len, said.splitlines())) <= 80

    (seen,) = document(testbed, "job", owners.ann, user=BOB)
    assert seen["telemetry"] is None
    assert seen["stays"] == []
    assert seen["note"] == "details of a job are for its owner"

    listed = {job["job_id"]: job for job in document(testbed, "jobs", user=BOB)}
    assert listed[owners.ann]["cost"]["predicted_isd_pct"] is not None
    assert listed[owners.waits]["why"] == "no-partner"
    assert "name" not in listed[owners.ann]
    own, _ = gpushare(testbed, "jobs", "--me", user=ANN)
    assert "my-net" in own
    assert {line.split()[0] for line in own.splitlines()[1:]} == {owners.ann, owners.waits}, "only her own"
    tables = own + gpushare(testbed, "jobs")[0] + gpushare(testbed, "status")[0]
    assert max(map(len, tables.splitlines())) <= 80

    named = f"mkdir -p ~/.config/gpushare && echo '{owners.tokens[ANN]} my-net' > ~/.config/gpushare/tokens"
    testbed.run(["sh", "-c", named], user=ANN)
    (known,) = document(testbed, "token", "list", user=ANN)
    assert (known["token"], known["name"], known["known"]) == (owners.tokens[ANN], "my-net", True)
    assert known["duration_s"] == 600.0, "as her profile says"


def test_a_users_report_tells_of_own_jobs_what_the_administrators_tells(owners: Owners) -> None:
    owners.fresh_tick()

    def reported() -> bool:  # accounting hears of a job some seconds after Slurm does, of a waiting one later still
        found = document(owners.testbed, "report", "-S", owners.since)
        partners = {job["job_id"]: job["partners"] for job in found["jobs"]}
        return owners.waits in partners and bool(partners.get(owners.ann) and partners.get(owners.bob))

    assert wait_until(reported, 120)
    everything = {job["job_id"]: job for job in document(owners.testbed, "report", "-S", owners.since)["jobs"]}
    own = document(owners.testbed, "report", "-S", owners.since, user=ANN)
    assert {job["user"] for job in own["jobs"]} == {ANN}
    assert own["summary"]["complete"]
    (shared,) = [job for job in own["jobs"] if job["partners"]]
    assert {job["job_id"] for job in own["jobs"]} == {owners.ann, owners.waits}
    for field in ("job_id", "role", "promised_pct"):
        assert shared[field] == everything[owners.ann][field]
    assert shared["partners"] == [None], "it shared with one job, which has no row here"
    said, warned = gpushare(
        owners.testbed, "report", "-S", owners.since, user="www-data"
    )  # 26.05 takes uid 65534 for no uid
    assert "GPU jobs          none in this period" in said
    assert not warned
    public = owners.site.config.public_dir
    public.rename(public.with_name("elsewhere"))
    said, warned = gpushare(owners.testbed, "report", "-S", owners.since, user=ANN)
    assert "shared            ---" in said
    assert "not known" in warned


def test_where_slurm_hides_jobs_only_sums_are_published_and_details_reach_their_owner_alone(testbed: Testbed) -> None:
    testbed.configure(slurm={"PrivateData": "jobs"})
    tried = ["sbatch", "--test-only", "--gres=gpu:1", "--wrap=true"]
    assert wait_until(lambda: testbed.run(tried, check=False).returncode == 0, 60), "nodes register anew"
    owners = Owners(testbed)
    owners.fresh_tick()
    public = owners.site.config.public_dir
    body = json.loads((public / PUBLIC).read_text())
    assert (body["private"], body["jobs"]) == (True, [])
    assert body["sums"]["sharing"] == 2
    (job,) = document(testbed, "job", owners.ann, user=ANN)
    assert job["stays"][0]["expected_isd_pct"] is not None
    assert job["stays"][0]["beside"] is None, "a neighbour's job id is hidden like the job"

    def accounted() -> bool:  # some seconds after its start
        return testbed.run(["sacct", "-X", "-n", "-P", "-o", "JobID", "-j", owners.ann]).stdout.split() == [owners.ann]

    assert wait_until(accounted, 60), "squeue hides her job from Bob, so that he hears of it from accounting alone"
    (seen,) = document(testbed, "job", owners.ann, user=BOB)  # slurmdbd has a PrivateData of its own
    assert (seen["stays"], seen["telemetry"], seen["expected_isd_pct"]) == ([], None, None)
    sealed = public / OWNERS / str(pwd.getpwnam(ANN).pw_uid)
    socket = f"--socket={owners.site.config.munge_socket}"
    opened = testbed.run(["unmunge", socket, f"--input={sealed}"], user=BOB, check=False)
    assert opened.returncode == 18, "EMUNGE_CRED_UNAUTHORIZED"
    assert "UNAUTHORIZED" in opened.stdout.upper() + opened.stderr.upper()
    assert testbed.run(["touch", str(public / "x")], user=BOB, check=False).returncode != 0


def test_filters_that_can_match_nothing_are_mistakes(testbed: Testbed) -> None:
    for arguments in (
        ["jobs", "-s", "FOO"], ["jobs", "-p", "nosuch"], ["status", "-p", "nosuch"], ["status", "-w", "nosuch"],
        ["release", "-j", "abc"], ["job", "abc"], ["jobs", "-u", "no-such-user"], ["report", "-p", "nosuch"],
    ):  # fmt: skip
        _, said = gpushare(testbed, *arguments, code=2)
        assert said.startswith("gpushare: error: "), said
        assert said.count("\n") == 1


def test_a_page_that_cannot_be_written_is_one_line(testbed: Testbed) -> None:
    closed = testbed.layout.home / "closed"
    closed.mkdir(mode=0o700)
    _, said = gpushare(testbed, "report", "--html", str(closed / "page.html"), user=ANN, code=1)
    assert said.count("\n") == 1
    assert "Permission denied" in said


def test_assess_needs_nothing_but_sacct(testbed: Testbed) -> None:
    site = Site(testbed)
    since = f"{datetime.now():%Y-%m-%dT%H:%M:%S}"
    jobs = [site.plain("--gres=gpu:1", script="sleep 1") for _ in range(6)]
    assert wait_until(lambda: not set(jobs) & site.jobs().keys(), 60)

    def known() -> bool:  # slurmdbd hears of ended jobs a moment later
        command = [sys.executable, "-m", "slurm_gpushare", "assess", "-S", since, "--draws", "2", "--json"]
        done = testbed.run(command, user=ANN, check=False, env={"GPUSHARE_CONF": "/nowhere"})
        return done.returncode == 0 and json.loads(done.stdout)["partitions"][0]["jobs"] == 6

    assert wait_until(known, 180)
