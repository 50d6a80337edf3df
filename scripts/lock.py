"""Write requirements/*.txt: every package of an environment, for tests and docs, with version and hash of its file.

.venv/bin/python scripts/lock.py
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = "controller,mariadb,test"
LAB = ["matplotlib>=3.7"]  # what lab/setup.cfg asks for beside the product

WANTED = {
    "test": ("scripts/setup.sh", ["setuptools", "wheel", f"{ROOT}[{EXTRAS}]", *LAB]),
    "ansible": ("make ansible", ["ansible-core>=2.19,<2.20", "ansible-lint>=26"]),
    "docs": ("make docs", ["mkdocs-material>=9.5", "twine>=5"]),
}
HEAD = """\
# The {name} environment, locked: Python 3.11 on Linux, x86_64. {user} installs exactly these files.
# Written by scripts/lock.py: run it after a change of setup.cfg.
"""


def resolved(wanted: Sequence[str]) -> list[dict[str, str]]:
    """What pip would install into an empty environment now."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.json"
        argv = [sys.executable, "-m", "pip", "install", "-q", "--dry-run", "--ignore-installed", "--report",
                str(report), *wanted]  # fmt: skip
        subprocess.run(argv, check=True)
        found = json.loads(report.read_text())["install"]
    packages = []
    for item in found:
        hashes = item["download_info"].get("archive_info", {}).get("hashes", {})
        if "sha256" in hashes:  # this package itself is a directory
            name = re.sub(r"[-_.]+", "-", item["metadata"]["name"]).lower()
            packages.append({"name": name, "version": item["metadata"]["version"], "sha256": hashes["sha256"]})
    return sorted(packages, key=lambda package: package["name"])


def main() -> None:
    for name, (user, wanted) in WANTED.items():
        lines = [f"{each['name']}=={each['version']} --hash=sha256:{each['sha256']}\n" for each in resolved(wanted)]
        path = ROOT / "requirements" / f"{name}.txt"
        path.write_text(HEAD.format(name=name, user=user) + "".join(lines))
        print(f"{path}: {len(lines)} packages")


if __name__ == "__main__":
    main()
