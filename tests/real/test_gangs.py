"""Two jobs that each want all GPUs of a node share it, on a real Slurm: 23.11.5 or newer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpushare_lab.emulator.card import EmulatedCard, now_us
from gpushare_lab.emulator.node import card_path
from gpushare_lab.experiment.submitting import show, wait_for
from gpushare_lab.job.light_job import build_light_job
from gpushare_lab.known_profiles import KnownProfile, enter_profiles
from gpushare_lab.testbed.layout import Shape
from gpushare_lab.testbed.processes import wait_until
from gpushare_lab.testbed.reset import idle_nodes
from gpushare_lab.testbed.testbed import Testbed
from helper_kit import SLEEP, TOKENS, Site
from pair_kit import after_ticks, alone_is_known, kinds, tick
from telemetry_bed import configure, workload

from slurm_gpushare.helper.changes import release_jobs
from slurm_gpushare.helper.pair_speeds import ACTIVITY
from slurm_gpushare.protocol.release import parse_release
from slurm_gpushare.slurm.commands import connect
from slurm_gpushare.slurm.nodes import GANGS_NEED
from slurm_gpushare.store.hookfile import HookFile
from slurm_gpushare.store.refine import GPUS
from slurm_gpushare.store.stored_jobs import EVER

FOUR = "--gres=gpu:4"
HALF_OF_EACH = "shard:4(1/2,1/2,1/2,1/2)"
EVERYWHERE = "0,1,2,3"


@pytest.fixture(scope="module")
def four_gpus(slurm_suite: str | None, short_tmp: Path, testbed_session: Testbed) -> Iterator[Testbed]:
    """A node with four GPUs, set up for gangs."""
    if not parse_release(testbed_session.release).can("keeps_whole_gpus_apart"):
        pytest.skip(f"Slurm {testbed_session.release} cannot share whole nodes: that needs 23.11.5 or newer")
    testbed = Testbed(short_tmp / "gangs").up(Shape(nodes=1, gpus=4, shards=2), suite=slurm_suite, accounting=False)
    try:
        testbed.configure(
            slurm={"SelectTypeParameters": f"CR_CPU_Memory,{','.join(GANGS_NEED)}"},
            gpushare={"ShareGangs": "yes", "LeaseSeconds": "300", "HeartbeatSeconds": "600", "InterimSeconds": "1"},
        )
        idle_nodes(testbed)  # slurmctld was restarted, and nodes register anew
        (testbed.layout.home / "out").mkdir(mode=0o777)
        yield testbed
    finally:
        testbed.down(purge=True)


@pytest.fixture
def site(four_gpus: Testbed) -> Iterator[Site]:
    """The node, idle, with workloads that were measured on four GPUs and a helper that lets them share it."""
    site = Site(four_gpus)
    light = {GPUS: 4, "gpu_util_mean_pct": 20.0, "mem_access_mean_pct": 8.0}
    lasts_s = (20_000.0, 1500.0, 60.0)  # so that each may join the one before it
    profiles = [KnownProfile(t, 0, "V100", 2000, 16384, 0, s, light) for t, s in zip(TOKENS, lasts_s, strict=False)]
    enter_profiles(site.store, profiles)
    HookFile(site.config.hook_file, gangs=True).sync(site.store)
    four_gpus.wait_for_hook()
    yield site
    jobs = list(site.jobs())
    if jobs:
        four_gpus.run(["scancel", *jobs])
    assert wait_until(lambda: not site.jobs(), 60), site.picture()
    site.store.close()


STEPS = {
    "": None,  # as many tasks as its owner asked for
    "-n4 -c1": [f"step 4 {EVERYWHERE}"] * 4,
    "--gres=gpu:4 -n1": [f"step 1 {EVERYWHERE}"],
    "-n4 -c1 --gpus-per-task=1": [f"step 4 {card}" for card in range(4)],
    "-n2 -c1 --gpus-per-task=2": ["step 2 0,1", "step 2 2,3"],
    "-n4 -c1 --gpu-bind=single:1": [f"step 4 {card}" for card in range(4)],
    "-n1 --gpus=1": ["step 1 0"],
    "-n1 --gres=gpu:2": ["step 1 0,1"],
}
"""Options of srun inside a gang, and what its tasks see: tasks and cards, as on plain Slurm."""


def script(site: Site, name: str) -> tuple[str, Path]:
    """Writes down what a gang's script and its steps see, and goes on."""
    out = site.testbed.layout.home / "out" / name
    seen = (
        "${SLURM_NTASKS:--} $SLURM_TASKS_PER_NODE ${SLURM_CPUS_PER_TASK:--} $SLURM_GPUS_ON_NODE $CUDA_VISIBLE_DEVICES"
    )
    step = "sh -c 'echo step $SLURM_NTASKS $CUDA_VISIBLE_DEVICES' | sort"
    lines = [f'echo "script {seen}"', *(f"srun {options} {step}" for options in STEPS)]
    busy = f"srun -n1 sh -c 'touch {out}.busy; sleep 4' & until [ -e {out}.busy ]; do sleep 0.1; done"
    lines += [f"{busy}; srun {step}; wait", "echo done"]  # the second waits for the first
    return f"{{ {'; '.join(lines)}; }} >{out} 2>&1 </dev/null\n{SLEEP}", out


def wait_for_line(path: Path, line: str) -> list[str]:
    assert wait_until(lambda: path.exists() and line in path.read_text().splitlines(), 120), (
        path.read_text() if path.exists() else f"no {path}"
    )
    return path.read_text().splitlines()


def test_two_gangs_share_a_node_and_the_next_joins_who_is_left(site: Site) -> None:
    testbed = site.testbed
    (first_script, first_out), (second_script, second_out) = script(site, "first"), script(site, "second")
    first = site.submit(0, "-c6", "--time=600", script=first_script, gres=FOUR)
    second = site.submit(1, "-N1", "-n4", "-c2", "--time=60", script=second_script, gres="--gpus=4")
    site.tick()
    site.wait_running([first, second])
    for key in (first, second):
        about = show(testbed, key)
        assert (about["NodeList"], about["GRES"]) == ("gpu0", HALF_OF_EACH)
    third = site.submit(2, "--time=5", gres=FOUR)
    # No word of tasks and six CPUs, eight on four cards; four tasks of two CPUs. Slurm counts four tasks of both.
    for out, said, tasks in ((first_out, "- 1 8", 1), (second_out, "4 4 2", 4)):
        lines = wait_for_line(out, "done")
        plain = [f"step {tasks} {EVERYWHERE}"] * tasks
        steps = [line for seen in STEPS.values() for line in seen or plain] + plain
        quiet = [line for line in lines if "tep creat" not in line]  # srun may say that it has to wait
        assert quiet == [f"script {said} 4 {EVERYWHERE}", *steps, "done"]

    report = site.tick()
    assert report.pairs == 1
    waiting = site.jobs()[third]
    assert (waiting.pending, waiting.shards_a_card) == (True, 2), "a third waits, as it was submitted"

    testbed.run(["scancel", first])
    wait_for(testbed, int(first))
    site.tick()
    site.wait_running([third])
    assert show(testbed, third)["GRES"] == HALF_OF_EACH
    assert site.tick().pairs == 1
    (span,) = [span for span in site.store.sharing.open() if span.guest_job == int(third)]
    assert (span.resident_job, span.node, span.gpu_index, span.gpus) == (int(second), "gpu0", 0, 4)


def test_a_job_for_one_gpu_never_joins_a_gang(site: Site) -> None:
    enter_profiles(site.store, [KnownProfile(TOKENS[5], 0, "V100", 2000, 16384, 0, 60.0)])
    HookFile(site.config.hook_file, gangs=True).sync(site.store)
    gang = site.submit(0, gres=FOUR)
    site.tick()
    site.wait_running([gang])
    single = site.submit(5, "--time=5")
    site.tick()
    site.tick()
    assert site.jobs()[single].pending
    assert show(site.testbed, gang)["GRES"] == HALF_OF_EACH


def test_a_gang_that_was_placed_gets_its_request_back_from_slurm_alone(site: Site) -> None:
    strangers = [site.plain("--gres=gpu:4")]
    site.wait_running(strangers)
    gang = site.submit(0, gres=FOUR)
    placed = f"GS1:c=0;t={TOKENS[0]};o=shard:2;k=4;g=gpu0:0"
    fields = ["TresPerTask=gres/shard:1", "ReqNodeList=gpu0", f"AdminComment={placed}", "StartTime=now"]
    site.testbed.run(["scontrol", "update", f"JobId={gang}", *fields])
    assert site.jobs()[gang].shards_a_card == 1
    with site.environment():
        slurm = connect()
        release_jobs(slurm, slurm.jobs(), time.time())
    back = site.jobs()[gang]
    assert (back.shards_a_card, back.wanted_nodes, back.tag.placed if back.tag else "?") == (2, "", None)
    site.testbed.run(["scancel", *strangers])
    site.wait_running([gang])
    assert show(site.testbed, gang)["GRES"] == "shard:8(2/2,2/2,2/2,2/2)"


def test_a_gang_of_an_unknown_workload_is_measured_on_all_its_cards_as_one(site: Site) -> None:
    token = "gs-" + "2" * 20
    each = f"for gpu in 0 1 2 3; do CUDA_VISIBLE_DEVICES=$gpu {workload(work_s=8)} & done; wait"
    site.plain(FOUR, f"--comment=gpushare:{token}", script=each)
    daemon = site.daemon()

    def known() -> bool:
        with site.environment():
            daemon.once()
        return site.store.profiles.get(token) is not None

    assert wait_until(known, 180)
    profile = site.store.profiles.get(token)
    assert profile is not None
    assert (profile.features[GPUS], profile.runs) == (4, 1)
    assert 40 <= profile.features["gpu_util_mean_pct"] <= 60
    assert profile.mem_used_mib >= 2048


def training(site: Site, name: str, other: str, tasks: int) -> tuple[str, Path]:
    """A gang with one process for all cards or one for each, slowed to 0.6 by the other; it ends with the file."""
    home = site.testbed.layout.home
    rates, end = home / f"{name}.rates", home / f"{name}.end"
    rates.write_text(f"{other} 0.6\n")
    job = f"exec {build_light_job(site.testbed.layout.lib)} 3000 1000 95 60 1024 {name} {rates}"
    own = "CUDA_VISIBLE_DEVICES=$SLURM_LOCALID" if tasks > 1 else ""
    return (
        f"srun -n{tasks} -c1 sh -c '{own} {job}' & until [ -e {end} ]; do sleep 0.2; done; kill $!; wait; exit 0",
        end,
    )


def standing_still(site: Site, since_us: int) -> list[tuple[bool, ...]]:
    """Of each card, whether the processes that sat down after `since_us` stand still or work, first come first."""
    found = []
    for gpu in range(4):
        with EmulatedCard(card_path(site.testbed.layout.emu, "gpu0", gpu)) as card:
            found.append(tuple(stay.until_us is not None for stay in card.occupants(since_us)))
    return found


def test_the_gang_that_came_last_is_paused_for_the_residents_promise_and_goes_on_when_that_has_ended(
    site: Site,
) -> None:
    begun_us = now_us()
    configure(site.testbed, SampleSeconds="0.2")
    busy = {GPUS: 4, f"{ACTIVITY}_mean": 95.0}
    enter_profiles(site.store, [KnownProfile(t, 0, "V100", 2000, 16384, 0, 600.0, busy) for t in TOKENS[:2]])
    HookFile(site.config.hook_file, gangs=True).sync(site.store)
    site.testbed.wait_for_hook()
    (of_resident, resident_end), (of_guest, guest_end) = training(site, "p", "q", 1), training(site, "q", "p", 4)
    daemon = site.daemon("fcfs", resident_budget_pct=1.0, pause_most_pct=100.0)  # any slow-down breaks such a promise
    resident = site.submit(0, "--time=30", script=of_resident, gres=FOUR)
    tick(site, daemon)
    site.wait_running([resident])
    assert wait_until(lambda: alone_is_known(site, daemon, resident), 120), "no interim record of the resident"
    guest = site.submit(1, "--time=30", script=of_guest, gres=FOUR)
    tick(site, daemon)
    site.wait_running([guest])
    assert show(site.testbed, guest)["GRES"] == HALF_OF_EACH

    assert after_ticks(site, daemon, lambda: site.jobs()[guest].paused), site.picture()
    assert site.testbed.run(["squeue", "-h", "-j", guest, "-o", "%T"]).stdout.strip() == "RUNNING"
    assert not site.jobs()[resident].paused
    # The node stops them at its next look.
    assert wait_until(lambda: standing_still(site, begun_us) == [(False, True)] * 4, 60), (
        "all processes of the one stand still, and none of the other"
    )
    assert show(site.testbed, guest)["GRES"] == HALF_OF_EACH, "it keeps its half of every card"

    paused_s = time.monotonic()
    assert after_ticks(site, daemon, lambda: time.monotonic() > paused_s + 3), "pauses are counted in whole seconds"
    assert site.jobs()[guest].paused

    resident_end.touch()
    assert after_ticks(site, daemon, lambda: not site.jobs()[guest].paused), site.picture()
    tag = site.jobs()[guest].tag
    assert tag is not None
    assert tag.paused is None
    assert {"paused", "resumed"} <= kinds(site, guest)
    (span,) = site.store.sharing.of_jobs({int(guest): EVER})
    assert span.paused_s > 0
    assert (span.resident_job, span.gpus) == (int(resident), 4)

    guest_end.touch()
    assert wait_until(lambda: not site.jobs(), 60), site.picture()
    assert {show(site.testbed, job)["JobState"] for job in (resident, guest)} == {"COMPLETED"}
