from __future__ import annotations

import configparser
from pathlib import Path

from slurm_gpushare.protocol.files import resource_dir

ROOT = Path(__file__).resolve().parents[2]
DATA = ("lua_bridge", "prolog", "share", "sql")


def test_setup_cfg_lists_every_package() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    listed = set(setup["options"]["packages"].split())
    found = {".".join(init.parent.relative_to(ROOT).parts) for init in (ROOT / "slurm_gpushare").rglob("__init__.py")}
    data = {f"slurm_gpushare.{name}" for name in DATA}
    assert listed == found | data


def test_data_directories_are_those_of_the_checkout() -> None:
    for name in DATA:
        assert resource_dir(name).resolve() == ROOT / name
