"""Limits and prices on GPUs: what doctor finds, and what configure gives in their place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from slurm_gpushare.protocol.release import Release
from slurm_gpushare.protocol.settings import parse_config
from slurm_gpushare.site.current_setup import SiteSetup
from slurm_gpushare.site.finding import Level
from slurm_gpushare.site.limits import accounting, billing_lines, limit_commands, limits
from slurm_gpushare.slurm.accounting import parse_limits
from slurm_gpushare.slurm.nodes import Partition

CONFIG = parse_config("Partitions=gpu\nGpuModel=v100\n")


def facts(per_user: str = "", weights: str = "", **slurm_conf: str) -> SiteSetup:
    """A site whose QOS has a MaxTRESPerUser, and whose partition has billing weights."""
    found = parse_limits("qos", f"normal|||||||{per_user}||")
    partition = Partition("gpu", None, {"TRESBillingWeights": weights})
    return SiteSetup(Release(24, 11, 5), slurm_conf, (), (partition,), tuple(found), Path("/etc/slurm"), {})


def failures(site: SiteSetup) -> list[str]:
    return [finding.check for finding in limits(site, CONFIG) if finding.level is Level.FAIL]


@pytest.mark.parametrize(
    ("limit", "instead"),
    [
        ("gres/gpu=3", "gres/shard=6"),
        ("gres/gpu:v100=3", "gres/gpu=3,gres/shard=6,gres/gpu:v100=-1"),
        ("cpu=4,gres/gpu=5,gres/gpu:v100=3,gres/shard=10", "gres/gpu=3,gres/shard=6,gres/gpu:v100=-1"),
    ],
)
def test_a_limit_that_would_be_slipped_past_is_a_failure_and_gets_its_equivalent(limit: str, instead: str) -> None:
    assert failures(facts(limit)) == ["limits"]
    commands = limit_commands(facts(limit, AccountingStorageTRES="gres/gpu,gres/shard"), CONFIG)
    assert commands == f"sacctmgr modify qos where name=normal set MaxTRESPerUser={instead}\n"


def test_limits_come_before_sharing() -> None:
    """sacctmgr takes no gres/shard before slurmctld counts it: what must be done first stands above the commands."""
    commands = limit_commands(facts("gres/gpu=3", GresTypes="gpu,nic", AccountingStorageTRES="cpu,gres/gpu"), CONFIG)
    first, last = commands.splitlines()[0], commands.splitlines()[-1]
    assert first.startswith("# Limits come before sharing")
    assert "#   GresTypes=gpu,nic,shard\n#   AccountingStorageTRES=gres/gpu,gres/shard\n" in commands
    assert last.startswith("sacctmgr modify qos")


def test_what_every_job_must_ask_for_has_no_equivalent() -> None:
    """MinTRES=gres/shard would refuse every job with a whole GPU."""
    site = replace(facts(), limits=tuple(parse_limits("qos", "normal|||||||||gres/gpu=1")))
    assert failures(site) == ["limits"]
    assert limit_commands(site, CONFIG) == ""


@pytest.mark.parametrize("limit", ["", "cpu=4", "gres/gpu=3,gres/shard=6", "gres/gpu:a100=3"])
def test_other_limits_stay_as_they_are(limit: str) -> None:
    assert failures(facts(limit)) == []
    assert limit_commands(facts(limit), CONFIG) == ""


@pytest.mark.parametrize(
    ("weights", "instead"),
    [
        ("CPU=1,GRES/gpu=4", "CPU=1,GRES/gpu=4,GRES/shard=2"),
        ("CPU=1,GRES/gpu:v100=4", "CPU=1,GRES/gpu=4,GRES/shard=2"),
        ("GRES/gpu=1,GRES/gpu:v100=4,GRES/gpu:a100=9", "GRES/gpu:a100=9,GRES/gpu=5,GRES/shard=2.5"),
    ],
)
def test_a_price_that_would_be_slipped_past_is_a_failure_and_gets_its_equivalent(weights: str, instead: str) -> None:
    assert failures(facts(weights=weights)) == ["billing"]
    (lines,) = billing_lines(facts(weights=weights), CONFIG)
    assert f"TRESBillingWeights={instead}" in lines
    assert failures(facts(weights=instead)) == []
    assert list(billing_lines(facts(weights=instead), CONFIG)) == []


def test_priorities_and_accounting_by_model_are_named() -> None:
    assert failures(facts(PriorityWeightTRES="GRES/gpu:v100=1000")) == ["priority"]
    assert failures(facts(PriorityWeightTRES="GRES/gpu:a100=1000")) == []
    counted = facts(AccountingStorageTRES="gres/gpu,gres/shard,gres/gpu:v100")
    assert [(item.check, item.level) for item in accounting(counted, CONFIG)] == [
        ("accounting-tres", Level.PASS),
        ("accounting-types", Level.WARN),
    ]
