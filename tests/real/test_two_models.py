"""V100 and A100 nodes in one Slurm cluster: each model shares for itself, by what was measured on it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpushare_lab.experiment.submitting import wait_for
from gpushare_lab.known_profiles import KnownProfile, enter_profiles
from gpushare_lab.testbed.configuration import with_keys
from gpushare_lab.testbed.layout import Shape
from gpushare_lab.testbed.processes import wait_until
from gpushare_lab.testbed.testbed import Testbed
from helper_kit import TOKENS, Site
from telemetry_bed import workload

from slurm_gpushare.protocol.release import parse_release
from slurm_gpushare.protocol.tag import Tag
from slurm_gpushare.slurm.queue import Job

A_NODE = "gpu1"


@pytest.fixture(scope="module")
def mixed(slurm_suite: str | None, short_tmp: Path) -> Iterator[Testbed]:
    """One node with two V100s, one with two A100s."""
    if os.geteuid() or shutil.which("munged") is None:
        pytest.skip("a real Slurm needs root and munge")
    bed = Testbed(short_tmp / "mixed").up(Shape(nodes=2, gpus=2, models=("v100", "a100")), suite=slurm_suite)
    keys = {"LeaseSeconds": "300", "HeartbeatSeconds": "600", "InterimSeconds": "1"}
    conf = bed.layout.gpushare_conf
    conf.write_text(with_keys(conf.read_text(), keys))
    yield bed
    bed.down(purge=True)


def test_each_model_shares_by_what_was_measured_on_it(mixed: Testbed) -> None:
    """Tokens 0, 1 and 2 are known on the V100 only; then 0 and 2 are measured on an A100, and 1 is not."""
    if not parse_release(mixed.release).can("gpu_becomes_shard"):
        pytest.skip("this Slurm keeps the GPU index of a job's submission, and here jobs must move to the free card")
    site = Site(mixed)
    helper = site.daemon()

    def tick() -> bool:
        with site.environment():
            helper.once()
        return True

    # Long enough to be sampled on a busy machine, and light: by their telemetry the two go well together.
    measured = [
        site.submit(token, script=workload(30, 10, 4096, work_s=8), gres="--gres=gpu:a100:1") for token in (0, 2)
    ]
    tick()
    assert all(_tag(site, key).probe for key in measured), (
        "known on the V100, they are measured on the A100 all the same"
    )
    wait_for(mixed, [int(key) for key in measured], ["COMPLETED"])
    tokens = {TOKENS[0], TOKENS[2]}
    assert wait_until(lambda: tick() and tokens == set(site.store.profiles.by_model(tokens).get("A100", ())), 60)
    profiles = {model: found[TOKENS[0]] for model, found in site.store.profiles.by_model(tokens).items()}
    assert (profiles["A100"].mem_total_mib, profiles["V100"].mem_total_mib) == (40960, 16384)
    assert profiles["V100"].mem_used_mib == 2000, "what was measured on one model does not change the other"
    # As if it had run for longer.
    enter_profiles(site.store, [KnownProfile(TOKENS[0], 0, "A100", 4096, 40960, 1, 600.0, profiles["A100"].features)])
    site.beat()
    mixed.wait_for_hook()

    strangers = [site.plain(f"--gres=gpu:v100_{index}:1") for index in (0, 1)] + [site.plain("--gres=gpu:a100_1:1")]
    site.wait_running(strangers)
    resident = site.submit(0, gres="--gres=gpu:a100:1")
    assert not _tag(site, resident).probe
    assert wait_until(lambda: tick() and _job(site, resident).running, 60), site.picture()
    unknown = site.submit(1, "--time=1", gres="--gres=gpu:a100:1")
    assert _tag(site, unknown).probe, "known on the V100 only, it must not sit beside anybody"
    anywhere = site.submit(1, "--time=1")
    for _ in range(3):
        tick()
    assert not _job(site, anywhere).running, site.picture()
    assert not _job(site, unknown).running, site.picture()

    mixed.run(["scancel", unknown, anywhere])
    guest = site.submit(2, "--time=1", gres="--gres=gpu:a100:1")
    assert wait_until(lambda: tick() and _job(site, guest).running, 60), site.picture()
    for job in (resident, guest):
        assert _job(site, job).nodes == (A_NODE,)
        assert [gres.type for gres in _job(site, job).gres if gres.count] == ["a100_0"]
    tick()
    assert [span.gpu_model for span in site.store.sharing.open()] == ["A100"]

    shown = json.loads(mixed.run(["gpushare", "kb", "show", "--json"]).stdout)
    assert [document["site"]["gpu_model"] for document in shown["models"]] == ["V100", "A100"]
    said = mixed.run(["gpushare", "doctor", "--json"], check=False).stdout
    types = [item for item in json.loads(said) if item["check"] == "gpu-types"]
    assert [item["level"] for item in types] == ["pass"], types


def _tag(site: Site, key: str) -> Tag:
    tag = _job(site, key).tag
    assert tag is not None
    return tag


def _job(site: Site, key: str) -> Job:
    return site.jobs()[key]
