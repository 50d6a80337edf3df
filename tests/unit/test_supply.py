"""What the test environment and a release are made of: locked with hashes, and listed."""

from __future__ import annotations

import configparser
import json
import re
import subprocess
import sys
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]


def test_the_lock_has_every_requirement_with_a_hash() -> None:
    """After a change of setup.cfg: python scripts/lock.py."""
    locked: dict[str, str] = {}
    for line in (ROOT / "requirements" / "test.txt").read_text().splitlines():
        if line.startswith("#"):
            continue
        found = re.fullmatch(r"([a-z0-9-]+)==(\S+) --hash=sha256:[0-9a-f]{64}", line)
        assert found is not None, line
        locked[found[1]] = found[2]
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    wanted = setup["options"]["install_requires"].split("\n")
    for extra in ("controller", "mariadb", "test"):
        wanted += setup["options.extras_require"][extra].split("\n")
    lab = configparser.ConfigParser()
    lab.read(ROOT / "lab" / "setup.cfg")
    wanted += [line for line in lab["options"]["install_requires"].split("\n") if "slurm-gpushare" not in line]
    for line in filter(None, wanted):
        requirement = Requirement(line)
        version = locked.get(re.sub(r"[-_.]+", "-", requirement.name).lower())
        assert version is not None, f"{requirement.name} is not locked"
        assert requirement.specifier.contains(version), line


def test_the_bill_of_materials_lists_what_a_controller_installs(tmp_path: Path) -> None:
    outs = [tmp_path / name for name in ("a.json", "b.json")]
    for out in outs:
        subprocess.run([sys.executable, ROOT / "scripts" / "sbom.py", out], check=True, capture_output=True)
    assert outs[0].read_bytes() == outs[1].read_bytes()
    bill = json.loads(outs[0].read_text())
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.5")
    names = {part["name"].lower() for part in bill["components"]}
    assert {"click", "nvidia-ml-py", "psutil", "numpy", "scikit-learn", "sqlalchemy", "pymysql"} <= names
    assert not names & {"pytest", "mypy", "ruff"}
    known = {bill["metadata"]["component"]["bom-ref"], *(part["bom-ref"] for part in bill["components"])}
    assert {ref for item in bill["dependencies"] for ref in (item["ref"], *item["dependsOn"])} == known
