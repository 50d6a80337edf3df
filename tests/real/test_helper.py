"""The backfill helper on a real Slurm."""

from __future__ import annotations

import pwd
import signal
import subprocess
import sys
import time

import pytest
from helper_kit import SLEEP, TOKENS, Site, original

from slurm_gpushare.coschedule.occupancy import Card, placed_card
from slurm_gpushare.testbed.cluster import Testbed
from slurm_gpushare.testbed.jobs import show, submit
from slurm_gpushare.testbed.processes import wait_until


@pytest.fixture
def site(testbed: Testbed) -> Site:
    return Site(testbed)


def test_a_known_job_is_placed_on_one_card_and_starts_there(site: Site) -> None:
    job = site.submit(0)
    before = site.jobs()[job]
    assert before.tag is not None
    assert before.tag.lease
    assert not before.running
    report = site.tick()
    site.wait_running([job])
    after = site.jobs()[job]
    assert after.tag is not None
    assert after.tag.placed is not None
    assert not after.tag.lease
    assert after.shard is not None
    assert after.shard.count == 1, "half of the card stays free for a complement"
    assert report.calls <= 3 + 1, "two questions, now and then a third, and one update"


def test_jobs_share_when_cards_run_out_and_the_store_remembers_it(site: Site) -> None:
    jobs = [site.submit(number) for number in range(5)]
    daemon = site.daemon("fcfs")
    with site.environment():
        daemon.once()
    site.wait_running(jobs)
    with site.environment():
        report = daemon.once()
    assert report.pairs == 1
    (span,) = site.store.sharing.open()
    assert {span.resident_token, span.guest_token} <= set(TOKENS[:5])
    kinds = {decision.kind for job in jobs for decision in site.store.decisions.of_job(int(job))}
    assert kinds & {"beside", "together"}


def test_a_job_without_a_place_goes_back_to_slurm_at_once(site: Site) -> None:
    for _ in range(4):
        site.plain("--gres=gpu:1")
    assert wait_until(lambda: sum(job.running for job in site.jobs().values()) == 4, 60)
    job = site.submit(0)
    site.tick()
    waiting = site.jobs()[job]
    assert original(waiting)
    assert not waiting.tag.lease  # type: ignore[union-attr]
    assert waiting.eligible_s is not None
    assert waiting.eligible_s <= time.time() + 1, "eligible long before the lease would have ended"
    assert {decision.kind for decision in site.store.decisions.of_job(int(job))} == {"waits"}


def test_a_waiting_job_gets_half_of_the_card_of_a_job_in_its_epilog(site: Site) -> None:
    """Once the epilog is over Slurm would start it there on all of the card, before the helper looks."""
    epilog, over = site.testbed.layout.etc / "epilog.sh", site.testbed.dir / "epilog-over"
    wait = f"for _ in $(seq 600); do [ -e {over} ] && break; sleep 0.1; done"
    epilog.write_text(epilog.read_text().replace("\n", f"\n{wait}\n", 1))
    job = site.submit(0)
    cards = [Card(node, index) for node in ("gpu0", "gpu1") for index in (0, 1)]
    strangers = {card: site.plain(f"--gres=gpu:v100_{card.index}:1", f"--nodelist={card.node}") for card in cards}
    site.wait_running(list(strangers.values()))
    site.tick()
    assert original(site.jobs()[job])
    card = Card("gpu0", site.index(job))
    try:
        site.testbed.run(["scancel", strangers[card]])
        assert wait_until(lambda: site.jobs()[strangers[card]].state == "COMPLETING", 30), site.picture()
        site.tick()
        assert placed_card(site.jobs()[job]) == card, site.picture()
    finally:
        over.touch()
    site.wait_running([job])
    started = site.jobs()[job]
    assert started.shard is not None
    assert (started.nodes, started.shard.count) == ((card.node,), 1)


def test_jobs_without_a_token_are_never_touched(site: Site) -> None:
    plain = [
        site.plain("--gres=gpu:1"),
        site.plain("--gres=gpu:2", "--hold"),
        site.plain("--gres=gpu:1", "--comment=something else", "--begin=now+1hour"),
        site.plain("--ntasks=1"),
        site.plain("--gres=gpu:1", "--array=1-3%1"),
    ]
    site.wait_running([plain[0], plain[3]])
    sharing = [site.submit(number) for number in range(5)]

    def stable() -> dict[str, dict[str, str]]:
        volatile = {"RunTime", "LastSchedEval", "Scheduler", "Reason", "JobState", "Priority", "SchedNodeList"}
        times = {"StartTime", "EndTime", "NodeList", "BatchHost", "NumNodes", "GRES", "Nodes", "TRES", "AllocTRES"}
        return {
            key: {name: value for name, value in show(site.testbed, key).items() if name not in volatile | times}
            for key in [plain[0], plain[1], plain[2], plain[3]]
        }

    before = stable()
    for _ in range(3):
        site.tick("fcfs")
    assert stable() == before
    assert all(not job.admin_comment for key, job in site.jobs().items() if key.split("_")[0] in plain)
    site.wait_running(sharing[:1])


def _pin(site: Site, job: str, card: Card) -> None:
    """Put a pending job on a card as the helper would, by its own means."""
    from slurm_gpushare.coschedule.changes import place
    from slurm_gpushare.slurm.interface import connect

    with site.environment():
        slurm = connect()
        (found,) = slurm.jobs([job])
        change = place(found, card, f"v100_{card.index}", 1, slurm.release, time.time())
        assert change is not None
        slurm.update_job(change.key, change.fields)
    assert placed_card(site.jobs()[job]) == card


def _stuck(site: Site, *options: str) -> tuple[str, Card]:
    """A job that we placed on a card which a stranger has whole, so that it does not start there."""
    job = site.submit(0, *options)
    card = Card("gpu0", site.index(job))
    site.block([card])
    _pin(site, job, card)
    return job, card


def test_release_puts_back_placed_and_leased_jobs_from_their_tags_alone(site: Site) -> None:
    placed, leased, by_node = site.submit(0), site.submit(1), site.submit(2, "--nodelist=gpu0")
    site.block([Card("gpu0", 0), Card("gpu0", 1)])
    _pin(site, placed, Card("gpu0", site.index(placed)))
    _pin(site, by_node, Card("gpu0", site.index(by_node)))
    site.config.hook_file.unlink()
    site.store.close()
    done = subprocess.run(
        [sys.executable, "-m", "slurm_gpushare", "release"],
        env=site.testbed.env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert {line.split(":")[0] for line in done.stdout.splitlines()} == {placed, leased, by_node}
    jobs = site.jobs()
    for key in (placed, leased, by_node):
        job = jobs[key]
        assert job.running or (original(job) or job.wanted_nodes == "gpu0"), job
        assert job.tag is not None
        assert not job.tag.lease
        assert job.tag.placed is None
        assert job.eligible_s is not None
        assert job.eligible_s <= time.time() + 1
    assert jobs[by_node].wanted_nodes == "gpu0", "the user's own node list is back"


def test_a_placement_that_does_not_start_is_taken_back_and_tried_elsewhere(site: Site) -> None:
    job, _ = _stuck(site)
    daemon = site.daemon(lease_s=1)
    with site.environment():
        daemon.once()
        assert wait_until(lambda: daemon.once().outcomes.get("take-back:done") == 1, 60)
        daemon.once()
    site.wait_running([job])
    assert site.jobs()[job].nodes == ("gpu1",), "not on the node that did not start it"


def test_a_placement_on_a_node_that_drains_is_taken_back_at_once(site: Site) -> None:
    job, _ = _stuck(site)
    site.testbed.run(["scontrol", "update", "NodeName=gpu0", "State=DRAIN", "Reason=test"])
    report = site.tick()
    assert report.outcomes.get("take-back:done") == 1
    site.tick()
    site.wait_running([job])
    assert site.jobs()[job].nodes == ("gpu1",)


def test_a_requeued_job_gets_its_original_request_back(site: Site) -> None:
    job = site.submit(0)
    daemon = site.daemon()
    with site.environment():
        daemon.once()
        site.wait_running([job])
        daemon.once()
    site.testbed.run(["scontrol", "requeue", job])
    assert wait_until(lambda: site.jobs()[job].pending, 60)
    assert site.jobs()[job].tag.placed is not None  # type: ignore[union-attr]
    with site.environment():
        daemon.once()
    back = site.jobs()[job]
    assert back.running or original(back)


def test_one_task_of_an_array_is_placed_without_moving_the_others(site: Site) -> None:
    array = site.submit(0, "--array=1-3")
    free = Card("gpu1", site.index(f"{array}_1"))
    site.block({Card(node, index) for node in ("gpu0", "gpu1") for index in (0, 1)} - {free})
    site.tick()
    site.wait_running([f"{array}_1"])
    jobs = site.jobs()
    assert jobs[f"{array}_1"].nodes == ("gpu1",)
    assert all(original(jobs[f"{array}_{task}"]) for task in (2, 3))


def test_a_users_own_begin_time_is_never_overwritten(site: Site) -> None:
    job = site.submit(0, "--begin=now+1hour")
    begin = site.jobs()[job].eligible_s
    for _ in range(2):
        site.tick("fcfs")
    assert site.jobs()[job].eligible_s == begin


def test_a_dry_run_changes_nothing(site: Site) -> None:
    job = site.submit(0)
    command = [sys.executable, "-m", "slurm_gpushare", "backfill", "--once", "--dry-run"]
    done = subprocess.run(command, env=site.testbed.env, capture_output=True, text=True, check=True)
    assert "event=place" in done.stderr
    assert "outcome=dry-run" in done.stderr
    assert site.store.decisions.of_job(int(job)) == []
    after = site.jobs()[job]
    assert after.tag is not None
    assert after.tag.placed is None


def test_a_job_whose_hook_was_away_is_tagged_and_left_as_it_asked(site: Site) -> None:
    from slurm_gpushare.store.hookfile import HookFile

    HookFile(site.config.hook_file).beat(0)
    site.testbed.wait_for_hook(3)  # it may still have the last test's file open
    job = site.submit(0)
    asked = site.jobs()[job].per_node
    assert site.jobs()[job].tag is None
    site.tick()
    after = site.jobs()[job]
    assert after.tag is not None
    assert after.tag.token == TOKENS[0]
    assert after.tag.original is None
    assert after.per_node == asked


def test_a_token_belongs_to_whoever_submitted_with_it_first(site: Site) -> None:
    new = "gs-" + "z" * 19 + "7"
    options = ("--gres=gpu:1", "--mem=100", "--output=/dev/null", "--hold", f"--comment=gpushare:{new}")
    for user in ("games", "man"):
        submit(site.testbed, SLEEP, *options, user=user)
    site.tick()
    workload = site.store.workloads.get(new)
    assert workload is not None
    assert workload.owner_uid == pwd.getpwnam("games").pw_uid
    assert site.store.counters.all()["ticks"] == 1


def test_one_helper_at_a_time_and_a_stop_that_the_hook_sees(site: Site) -> None:
    with site.process() as helper:
        second = subprocess.run(
            [sys.executable, "-m", "slurm_gpushare", "backfill", "--once"],
            env=site.testbed.env,
            capture_output=True,
            text=True,
        )
        assert second.returncode == 1
        assert str(helper.pid) in second.stderr
        helper.send_signal(signal.SIGHUP)
        job = site.submit(0)
        site.wait_running([job])
        helper.send_signal(signal.SIGTERM)
        assert helper.wait(60) == 0
    assert not site.alive(), "a helper that stops says so"
    log = (site.testbed.dir / "log" / "backfill.log").read_text()
    assert "event=reload" in log
    assert "event=stop" in log


def test_a_helper_killed_among_sixty_jobs_strands_nobody(site: Site) -> None:
    site.configure(LeaseSeconds="10", HeartbeatSeconds="5")
    submitted: dict[str, float] = {}
    with site.process("--policy=fcfs") as helper:
        for number in range(60):
            submitted[site.submit(number % len(TOKENS), "--time=5", script="exec sleep 1")] = time.time()
            if number == 40:
                helper.kill()
                helper.wait()
                killed_s = time.time()
        # What the watchdog's timer runs, a little more often.
        watchdog = [sys.executable, "-m", "slurm_gpushare", "release", "--if-stale"]

        def restored() -> bool:
            subprocess.run(watchdog, env=site.testbed.env, check=True, capture_output=True)
            pending = [job for job in site.jobs().values() if job.pending and job.tag]
            return time.time() > killed_s + 5 and all(original(job) and not job.tag.lease for job in pending)  # type: ignore[union-attr]

        assert wait_until(restored, 120), site.picture()
        assert all((job.eligible_s or 0) <= time.time() + 1 for job in site.jobs().values())
    assert wait_until(lambda: not site.jobs(), 300), site.picture()

    def ends() -> str:
        return site.testbed.run(["sacct", "-X", "-n", "-P", "-o", "JobID,State", "-j", ",".join(submitted)]).stdout

    # Slurm's accounting is told later than squeue.
    assert wait_until(lambda: ends().count("COMPLETED") == 60, 60), ends()


def test_a_node_taken_down_under_placed_and_running_pairs_strands_nobody(site: Site) -> None:
    jobs = [site.submit(number, "--requeue", script="exec sleep 4") for number in range(6)]
    daemon = site.daemon("fcfs", lease_s=10)
    with site.environment():
        daemon.once()
        assert wait_until(lambda: any(job.running and job.nodes == ("gpu0",) for job in site.jobs().values()), 60)
        for state in ("DOWN", "DRAIN"):  # drained too, or its slurmd would register and the node be back at once
            site.testbed.run(["scontrol", "update", "NodeName=gpu0", f"State={state}", "Reason=test"])

        def all_ended() -> bool:
            daemon.once()
            return not set(jobs) & site.jobs().keys()

        assert wait_until(lambda: bool(daemon.once()) and not _on(site, "gpu0"), 60), site.picture()
        # Slurm makes requeued jobs wait two minutes; a test need not. gpu0 stays down: 22.05 holds a job that comes
        # back to the same node sooner, because its old credential is still being revoked there.
        for job in jobs:
            site.testbed.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], check=False)
        assert wait_until(all_ended, 180), site.picture()


def _on(site: Site, node: str) -> list[str]:
    """Pending jobs that are still sent to a node."""
    return [key for key, job in site.jobs().items() if job.pending and job.wanted_nodes == node]


def test_a_whole_node_job_of_higher_priority_gets_its_node_as_if_guests_were_not_there(site: Site) -> None:
    site.configure(LeaseSeconds="30")
    go = site.testbed.layout.home / "go"
    until_told = f"until [ -e {go} ]; do sleep 0.1; done"
    residents = [site.submit(number, "--time=2", script=until_told) for number in range(4)]
    daemon = site.daemon()
    with site.environment():
        daemon.once()
        site.wait_running(residents)
        whole = site.plain(
            "--gres=gpu:2", "--nodes=1", "--exclusive", "--nice=-1000", "--time=1", script="exec sleep 1"
        )
        guests = [site.submit(number, "--time=60") for number in range(4, 8)]
        for _ in range(2):
            daemon.once()
        go.touch()

        def started() -> bool:
            daemon.once()
            job = site.jobs().get(whole)
            return job is None or job.running

        assert wait_until(started, 60), site.picture()
    ended = site.ended([*residents, whole])
    free_s = min(
        max(job.end_s or 0 for job in ended.values() if job.nodes == (node,) and job.key != whole)
        for node in ("gpu0", "gpu1")
    )
    waited_s = (ended[whole].start_s or 0) - free_s
    assert waited_s <= site.config.lease_s, f"the node was free of residents {waited_s} s before"
    assert guests, "they are there, and long: one beside a resident would have kept the node busy for ten minutes"


def test_a_job_explains_itself_to_whoever_asks(site: Site) -> None:
    jobs = [site.submit(number) for number in range(5)]
    daemon = site.daemon("fcfs")
    with site.environment():
        daemon.once()
        site.wait_running(jobs)
        daemon.once()
    guest = next(
        job for job in jobs if {d.kind for d in site.store.decisions.of_job(int(job))} & {"beside", "together"}
    )
    command = [sys.executable, "-m", "slurm_gpushare", "job", guest]
    told = site.testbed.run(command).stdout
    assert f"Job {guest}: RUNNING" in told
    assert "shared GPU" in told
    assert "with job" in told
    as_user = site.testbed.run(command, user="games").stdout
    assert "was sent to GPU" in as_user, "the tag and Slurm are enough"
    missing = site.testbed.run([*command[:-1], "999999"], check=False)
    assert missing.returncode == 2
    assert "no job 999999" in missing.stderr
