from __future__ import annotations

from pathlib import Path

import pytest

from slurm_gpushare.protocol.errors import ConfigError
from slurm_gpushare.protocol.settings import KEYS, config_path, load_config, parse_config


def test_every_default_is_valid() -> None:
    config = parse_config("")
    assert config.lease_s == 30
    assert config.partitions == ()


def test_keys_are_case_insensitive_and_comments_are_ignored() -> None:
    config = parse_config("# site\npartitions = gpu, debug # both\nLEASESECONDS=10\n\n")
    assert config.partitions == ("gpu", "debug")
    assert config.lease_s == 10


def test_numbers_per_partition() -> None:
    assert parse_config("DefCpuPerGpu=gpu:8,debug:4").def_cpu_per_gpu == {"gpu": 8, "debug": 4}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\nLeese=3", "x.conf:2: unknown key 'Leese'"),
        ("LeaseSeconds", "x.conf:1: 'LeaseSeconds' is not Key=Value"),
        ("LeaseSeconds=soon", "x.conf:1: LeaseSeconds=soon must be a whole number from 1 to 600"),
        ("LeaseSeconds=0", "x.conf:1: LeaseSeconds=0 must be a whole number from 1 to 600"),
        ("TickSeconds=nan", "x.conf:1: TickSeconds=nan must be a number from 0.2 to 600"),
        ("RawShards=perhaps", "x.conf:1: RawShards=perhaps must be one of deny, allow"),
        ("SpoolDir=spool", "x.conf:1: SpoolDir=spool must be an absolute path"),
        ("StoreUrl=", "x.conf:1: StoreUrl= is empty"),
        ("DefCpuPerGpu=8", "x.conf:1: DefCpuPerGpu=8 must be PARTITION:NUMBER[,PARTITION:NUMBER...]"),
        ("LeaseSeconds=3\nleaseseconds=4", "x.conf:2: LeaseSeconds is set twice. Line 1 has it too."),
    ],
)
def test_a_mistake_is_named_with_its_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, Path("x.conf"))
    assert str(caught.value).startswith(message)


def test_missing_file_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such file.*gpushare configure"):
        load_config(tmp_path / "gpushare.conf")


def test_a_file_without_a_setting_is_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "gpushare.conf").write_text("# of the site\n\n")
    with pytest.raises(ConfigError, match=r"there is no setting in it.*gpushare configure"):
        load_config(tmp_path / "gpushare.conf")


@pytest.mark.parametrize("what", ["a directory", "not text"])
def test_a_file_that_cannot_be_read_says_what_to_do(tmp_path: Path, what: str) -> None:
    path = tmp_path / "gpushare.conf"
    if what == "a directory":
        path.mkdir()
    else:
        path.write_bytes(b"\xff\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    reason = "Is a directory" if what == "a directory" else "it is not text in UTF-8"
    assert str(caught.value) == f"{path}: cannot be read: {reason}. It is a text file of root's, with mode 644."


def test_file_is_found_beside_slurm_conf_unless_named() -> None:
    assert config_path({"SLURM_CONF": "/x/slurm.conf"}) == Path("/x/gpushare.conf")
    assert config_path({"SLURM_CONF": "/x/slurm.conf", "GPUSHARE_CONF": "/y"}) == Path("/y")
    assert config_path({}) == Path("/etc/slurm/gpushare.conf")


def test_every_key_has_help_that_ends_in_a_full_stop() -> None:
    assert all(key.help.endswith(".") for key in KEYS)
