"""Configure on a cluster with GPUs of several models: only those that share are renamed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from slurm_gpushare.protocol.errors import BadInput
from slurm_gpushare.protocol.release import parse_release
from slurm_gpushare.protocol.settings import DEFAULTS, Config, parse_config
from slurm_gpushare.site.configure import choose, pieces
from slurm_gpushare.site.current_setup import Device, SiteSetup, autodetect, devices
from slurm_gpushare.slurm.nodes import Node, Partition
from slurm_gpushare.slurm.values import Usage, parse_gres

ROOT = Path(__file__).resolve().parents[2]
GRES_CONF = """\
AutoDetect=nvml  # found on all nodes
NodeName=v[0-1] Name=gpu Type=v100 File=/dev/nvidia[0-1] Cores=0-7
nodename=v0 name=gpu type=v100 file=/dev/nvidia2
"""


def node(name: str, gres: str) -> Node:
    return Node(
        name, frozenset({"idle"}), True, parse_gres(gres), Usage(frozenset(), {}, True), (), 64, 0, 1000, 0, ("gpu",)
    )


def site(nodes: Mapping[str, str], gres_conf: str = "") -> SiteSetup:
    return SiteSetup(
        release=parse_release("24.11.5"),
        config={"SelectType": "select/cons_tres"},
        nodes=tuple(node(name, gres) for name, gres in nodes.items()),
        partitions=(Partition("gpu", None, {}),),
        limits=(),
        etc=Path("/etc/slurm"),
        files={"gres.conf": gres_conf},
    )


V100 = replace(DEFAULTS, partitions=("gpu",), gpu_models=("v100",))
MIXED = {"v0": "gpu:v100:2", "v1": "gpu:v100:2", "ampere": "gpu:a100:4", "both": "gpu:v100:1,gpu:a100:1"}


def texts(facts: SiteSetup, choice: Config) -> dict[str, str]:
    return {piece.name: piece.text for piece in pieces(facts, choice)}


def test_nodes_of_another_model_stay_what_they_are() -> None:
    facts = site(MIXED)
    written = texts(facts, choose(facts, ["gpu"], ["v100"], None))
    for name in ("slurm.conf", "gres.conf", "job_submit.lua"):
        assert "v0,v1" in written[name]
        assert "a100" not in written[name]
    assert "ampere" not in written["gres.conf"]
    assert "both" not in written["gres.conf"]
    assert "GpusPerNode=2" in written["gpushare.generated.conf"]


def test_what_slurm_says_of_itself_goes_into_a_file_of_its_own_and_out_of_the_site_s() -> None:
    """An older gpushare.conf had it; what the site said of munge stays, where Slurm's configuration does not say it."""
    old = "# Change it by hand\nSlurmVersion=22.05.8\nGuestCap=40 # ours\nMungeSocket=/m\nNodeUsers=root,x\n"
    facts = replace(site(MIXED), files={"gpushare.conf": old})
    facts = replace(facts, config={**facts.config, "SlurmUser": "sl(64030)", "SlurmdUser": "sd(5)"})
    written = texts(facts, choose(facts, ["gpu"], ["v100"], None))
    assert written["gpushare.conf"].startswith("GuestCap=40 # ours\n")
    assert "Slurm" not in written["gpushare.conf"]
    both = parse_config(written["gpushare.conf"], generated=written["gpushare.generated.conf"])
    assert (both.slurm_version, both.gpus_per_node, both.slurm_user) == ("24.11.5", 2, "sl")
    assert (both.node_users, str(both.munge_socket), both.warnings) == (("root", "x", "sd"), "/m", ())
    socket = replace(facts, config={**facts.config, "AuthInfo": "cred_expire=9,socket=/run/m"})
    assert "MungeSocket=/run/m\n" in texts(socket, choose(socket, ["gpu"], ["v100"], None))["gpushare.generated.conf"]


def test_several_models_share_each_for_itself() -> None:
    facts = site(MIXED)
    written = texts(facts, choose(facts, ["gpu"], ["v100", "a100"], None))
    assert "Gres=gpu:v100_0:1,gpu:v100_1:1,shard:4 Feature=v100" in written["slurm.conf"]
    assert "Gres=gpu:a100_0:1,gpu:a100_1:1,gpu:a100_2:1,gpu:a100_3:1,shard:8 Feature=a100" in written["slurm.conf"]
    assert "NodeName=v0,v1 AutoDetect=off Name=gpu Type=v100_1" in written["gres.conf"]
    assert "NodeName=ampere AutoDetect=off Name=gpu Type=a100_3" in written["gres.conf"]
    assert "both" not in written["gres.conf"], "a node with cards of two models has no one feature"
    assert "GpuModel=v100,a100" in written["gpushare.conf"]
    for name in ("job_submit.lua", "cli_filter.lua"):
        known = '{ models = { ["a100"] = "ampere", ["v100"] = "v0,v1" }, gpus = { ["a100"] = 4, ["v100"] = 2 } }'
        assert known in written[name]


def test_what_was_decided_about_models_stays_decided() -> None:
    facts = replace(site(MIXED), files={"gpushare.conf": "GpuModel=a100,v100\nPartitions=gpu\n"})
    assert choose(facts, [], [], None).gpu_models == ("a100", "v100")


def test_other_nodes_go_on_detecting_their_gpus() -> None:
    written = texts(site(MIXED), V100)["gres.conf"]
    assert "NodeName=v0,v1 AutoDetect=off Name=gpu Type=v100_0" in written
    assert "\nAutoDetect=off" not in written
    alone = texts(site({"v0": "gpu:v100:2"}), V100)["gres.conf"]
    assert "\nAutoDetect=off\n" in alone


def test_a_model_that_no_node_has_is_a_mistake() -> None:
    with pytest.raises(BadInput, match="h100"):
        choose(site(MIXED), ["gpu"], ["v100", "h100"], None)
    with pytest.raises(BadInput, match="several types"):
        choose(site(MIXED), ["gpu"], [], None)


def test_device_files_are_those_of_gres_conf() -> None:
    assert devices(GRES_CONF, "v1") == (Device("/dev/nvidia0", "Cores=0-7"), Device("/dev/nvidia1", "Cores=0-7"))
    assert [device.file for device in devices(GRES_CONF, "v0")][2] == "/dev/nvidia2"
    written = texts(site({"v1": "gpu:v100:2"}, GRES_CONF.replace("/dev/", "/bed/")), V100)
    assert "Type=v100_1 File=/bed/nvidia1 Cores=0-7" in written["gres.conf"]


def test_a_nodes_own_line_decides_whether_it_detects() -> None:
    assert autodetect(GRES_CONF, "v0") == "nvml"
    assert autodetect(GRES_CONF + "NodeName=v0 AutoDetect=off\n", "v0") == "off"
    assert autodetect("AutoDetect=off\nNodeName=v0 AutoDetect=nvml\n", "v0") == "nvml"
    assert autodetect("", "v0") == "off"
