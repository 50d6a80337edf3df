"""gpushare.conf as a site keeps it: our lines changed in place, everything else left as it is."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_LINE = re.compile(r"^(\s*)([A-Za-z]\w*)(\s*=\s*)([^#\n]*?)(\s*(?:#.*)?)$")


@dataclass(frozen=True, slots=True)
class Setting:
    """A key that configure works out, and why it is there."""

    key: str
    value: str
    why: str = ""

    def __str__(self) -> str:
        return f"# {self.why}\n{self.key}={self.value}\n" if self.why else f"{self.key}={self.value}\n"


def read_settings(text: str) -> dict[str, str]:
    """Values by key in lower case; of a key that is there twice, which `parse_config` refuses, the last."""
    found = (_LINE.match(line) for line in text.splitlines())
    return {match[2].lower(): match[4].strip() for match in found if match}


def merge_settings(current: str | None, wanted: Iterable[Setting]) -> str:
    """`current` with the wanted values in their lines, and lines at the end for those that it lacks."""
    if current is None:
        return "\n".join(str(setting) for setting in wanted)
    lines = current.splitlines()
    missing = []
    for setting in wanted:
        places = [i for i, line in enumerate(lines) if (m := _LINE.match(line)) and m[2].lower() == setting.key.lower()]
        for i in places:
            indent, key, equals, _, rest = _LINE.findall(lines[i])[0]
            lines[i] = f"{indent}{key}{equals}{setting.value}{rest}"
        if not places:
            missing.append(setting)
    text = "\n".join(lines) + "\n" if lines else ""
    return text + "".join(f"\n{setting}" for setting in missing)
