"""Write a software bill of materials (CycloneDX 1.5, JSON) of this package and of what it needs at run time.

    python scripts/sbom.py dist/slurm-gpushare.cdx.json [--extras controller,mariadb]

Versions and licences are those of the environment that runs this. The same environment gives the same file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

PACKAGE = "slurm-gpushare"


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def needed(dist: Distribution, extras: frozenset[str]) -> Iterator[tuple[str, frozenset[str]]]:
    """What a distribution requires here: names, and the extras of each."""
    for line in dist.requires or ():
        requirement = Requirement(line)
        environments = [{"extra": extra} for extra in extras or {""}]
        if requirement.marker is None or any(requirement.marker.evaluate(each) for each in environments):
            yield canonical(requirement.name), frozenset(requirement.extras)


def collect(extras: frozenset[str]) -> dict[str, tuple[Distribution, list[str]]]:
    """Every distribution that the package needs, with what each needs itself."""
    found: dict[str, tuple[Distribution, list[str]]] = {}
    waiting = [(PACKAGE, extras)]
    while waiting:
        name, wanted = waiting.pop()
        try:
            dist = distribution(name)
        except PackageNotFoundError:
            raise SystemExit(f"sbom: error: {name} is not installed here. Run 'make setup'.") from None
        below = dict(needed(dist, wanted))
        known = found.get(name, (dist, []))[1]
        found[name] = (dist, sorted({*known, *below}))
        waiting += [(other, more) for other, more in below.items() if other not in found]
    return found


def reference(dist: Distribution) -> str:
    return f"pkg:pypi/{canonical(dist.metadata['Name'])}@{dist.version}"


def component(dist: Distribution, kind: str) -> dict[str, Any]:
    meta = dist.metadata
    licence = meta.get("License-Expression") or meta.get("License") or ""
    classified = [line.rpartition("::")[2].strip() for line in meta.get_all("Classifier", []) if "License ::" in line]
    named = licence.strip() if 0 < len(licence.strip()) < 60 else ", ".join(classified)
    found: dict[str, Any] = {
        "type": kind,
        "bom-ref": reference(dist),
        "name": meta["Name"],
        "version": dist.version,
        "purl": reference(dist),
    }
    if named:
        found["licenses"] = [{"license": {"name": named}}]
    return found


def bill(extras: frozenset[str]) -> dict[str, Any]:
    """The document."""
    found = collect(extras)
    parts = {name: dist for name, (dist, _) in sorted(found.items()) if name != PACKAGE}
    body = {
        "metadata": {"component": component(found[PACKAGE][0], "application")},
        "components": [component(dist, "library") for dist in parts.values()],
        "dependencies": [
            {"ref": reference(dist), "dependsOn": [reference(found[other][0]) for other in below]}
            for _, (dist, below) in sorted(found.items())
        ],
    }
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    serial = f"{digest[:8]}-{digest[8:12]}-5{digest[13:16]}-8{digest[17:20]}-{digest[20:32]}"
    return {
        "bomFormat": "CycloneDX", "specVersion": "1.5", "serialNumber": f"urn:uuid:{serial}", "version": 1, **body,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--extras", default="controller,mariadb", help="what a controller installs")
    arguments = parser.parse_args()
    extras = frozenset(filter(None, arguments.extras.split(",")))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    document = bill(extras)
    arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    print(f"{arguments.out}: {len(document['components'])} components")


if __name__ == "__main__":
    main()
