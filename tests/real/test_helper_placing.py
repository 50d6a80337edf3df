"""The backfill helper on a real Slurm: whom it places, and whom it leaves alone."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace

import pytest
from gpushare_lab.experiment.submitting import show
from gpushare_lab.known_profiles import KnownProfile, enter_profiles
from gpushare_lab.testbed.processes import wait_until
from gpushare_lab.testbed.testbed import Testbed
from helper_kit import TOKENS, Site, original

from slurm_gpushare.helper.occupancy import GpuAddress, parse_card, placed_card, token_of
from slurm_gpushare.protocol.tag import Tag
from slurm_gpushare.protocol.tokens import new_token
from slurm_gpushare.slurm.commands import connect
from slurm_gpushare.store.stored_jobs import EVER


@pytest.fixture
def site(testbed: Testbed) -> Site:
    return Site(testbed)


SLURMS_OWN = {
    "RunTime", "LastSchedEval", "Scheduler", "Reason", "JobState", "Priority", "SchedNodeList",
    "StartTime", "EndTime", "NodeList", "BatchHost", "NumNodes", "GRES", "Nodes", "TRES", "AllocTRES",
}  # fmt: skip
"""What changes of a job while nobody changes it."""


def settled_fields(site: Site, jobs: list[str]) -> dict[str, dict[str, str]]:
    """Everything that scontrol shows of the jobs, but for what Slurm itself changes."""
    return {
        key: {name: value for name, value in show(site.testbed, key).items() if name not in SLURMS_OWN} for key in jobs
    }


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
    assert report.calls <= 4 + 1, "two questions, the job once more, now and then a fourth, and one update"


def test_the_rest_of_an_array_shares_once_its_first_tasks_were_measured(site: Site) -> None:
    """Its tasks wait as plain jobs do, become sharers where they stand, and get their whole card back on release."""
    with site.environment():
        if not connect().release.can("gpu_becomes_shard"):
            pytest.skip("this Slurm cannot turn a waiting GPU into shards")
    resident, token = site.submit(0), new_token()
    site.tick("fcfs")
    site.wait_running([resident])
    card = parse_card(site.jobs()[resident].tag.placed)
    everywhere = site.tick().view.cards
    site.block(other for other in everywhere if other != card)
    array = site.plain("--array=0-5", "--gpus=1", f"--comment=gpushare:{token},max=40", "--time=20")
    before = {key: job for key, job in site.jobs().items() if key.startswith(array)}
    assert all(job.pending and job.tag.probe for job in before.values())
    enter_profiles(site.store, [KnownProfile(token, 0, "V100", 2000, 16384, 1, 600.0)])
    assert wait_until(lambda: site.tick("fcfs") and not any(site.jobs()[key].tag.probe for key in before), 60)
    for key, was in before.items():
        job = site.jobs()[key]
        assert replace(job.tag, placed=None, nice=None) == replace(was.tag, probe=False, cluster=1)
        assert job.submit_s == was.submit_s
    assert wait_until(lambda: site.tick("fcfs") and any(site.jobs()[key].running for key in before), 60), site.picture()
    after = {key: site.jobs()[key] for key in before}
    assert [parse_card(job.tag.placed) for job in after.values() if job.running] == [card], "beside the resident"
    assert sum(original(job) for job in after.values()) == 5, "the others wait for whole GPUs"


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
    shared = {token_of(site.jobs()[job]) for job in jobs if int(job) in (span.resident_job, span.guest_job)}
    assert {span.resident_token, span.guest_token} == shared, "the span names the two that share"
    assert len(shared) == 2
    kinds = {decision.kind for job in jobs for decision in site.store.decisions.of_jobs({int(job): EVER})}
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
    assert {decision.kind for decision in site.store.decisions.of_jobs({int(job): EVER})} == {"waits"}


def test_a_waiting_job_gets_half_of_the_card_of_a_job_in_its_epilog(site: Site) -> None:
    """Once the epilog is over Slurm would start it there on all of the card, before the helper looks."""
    epilog, over = site.testbed.layout.etc / "epilog.sh", site.testbed.dir / "epilog-over"
    wait = f"for _ in $(seq 600); do [ -e {over} ] && break; sleep 0.1; done"
    epilog.write_text(epilog.read_text().replace("\n", f"\n{wait}\n", 1))
    job = site.submit(0)
    cards = [GpuAddress(node, index) for node in ("gpu0", "gpu1") for index in (0, 1)]
    strangers = {card: site.plain(f"--gres=gpu:v100_{card.index}:1", f"--nodelist={card.node}") for card in cards}
    site.wait_running(list(strangers.values()))
    site.tick()
    assert original(site.jobs()[job])
    card = GpuAddress("gpu0", site.index(job))
    try:
        site.testbed.run(["scancel", strangers[card]])
        assert wait_until(lambda: site.jobs()[strangers[card]].state == "COMPLETING", 60), site.picture()
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

    before = settled_fields(site, plain[:4])
    for _ in range(3):
        site.tick("fcfs")
    assert settled_fields(site, plain[:4]) == before
    assert all(not job.admin_comment for key, job in site.jobs().items() if key.split("_")[0] in plain)
    site.wait_running(sharing[:1])


def test_one_task_of_an_array_is_placed_without_moving_the_others(site: Site) -> None:
    array = site.submit(0, "--array=1-3")
    free = GpuAddress("gpu1", site.index(f"{array}_1"))
    site.block({GpuAddress(node, index) for node in ("gpu0", "gpu1") for index in (0, 1)} - {free})
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
    assert site.store.decisions.of_jobs({int(job): EVER}) == []
    after = site.jobs()[job]
    assert after.tag is not None
    assert after.tag.placed is None


def test_in_the_shadow_all_is_recorded_and_nothing_is_changed(site: Site) -> None:
    site.configure(Policy="shadow")
    site.testbed.wait_for_hook()
    jobs = [site.submit(number, "--time=60") for number in range(4)]
    site.wait_running(jobs)
    waiting = site.submit(4, "--time=5")
    assert wait_until(lambda: show(site.testbed, waiting)["AccrueTime"] != "Unknown", 60), "Slurm has looked at it"
    before = settled_fields(site, [*jobs, waiting])
    tag = site.jobs()[waiting].tag
    assert tag == Tag(token=TOKENS[4]), "measured, with neither a lease nor a request to restore"
    daemon = site.daemon(resident_budget_pct=1000.0, guest_cap_pct=1000.0)
    with site.environment():
        assert daemon.once().outcomes == {"shadow": 1}, site.picture()
        assert daemon.once().outcomes == {}
    assert settled_fields(site, [*jobs, waiting]) == before
    (decision,) = (item for item in site.store.decisions.of_jobs({int(waiting): EVER}) if item.kind == "shadow")
    assert str(decision.partner_job) in jobs
    site.testbed.run(["scancel", jobs[0]])
    site.wait_running([waiting])
    assert not site.jobs()[waiting].shard, "Slurm gave it a whole card"


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
        sent = [guest for guest in guests if (tag := site.jobs()[guest].tag) and tag.placed]
        assert not sent, "a long one beside a resident would keep the node busy for an hour"
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
