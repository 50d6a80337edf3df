"""gpushare.conf as a site keeps it: our lines changed in place, everything else left as it is."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

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


def without_settings(text: str, names: Iterable[str]) -> str:
    """`text` without the lines of these keys, and without the comments just above them."""
    lowered, kept = {name.lower() for name in names}, list[str]()
    for line in text.splitlines():
        match = _LINE.match(line)
        if match and match[2].lower() in lowered:
            while kept and kept[-1].startswith("#"):
                kept.pop()
        else:
            kept.append(line)
    return "".join(f"{line}\n" for line in kept)


# job_submit.lua and cli_filter.lua as a site gets them: each one file, with the modules and the site's models in it.
#
# They must not depend on other files of ours. With one GRES type for each GPU index, ``gpu:v100`` is a name that only
# these scripts understand: without them every such job of every user fails.


SCRIPTS = {
    "job_submit.lua": (
        "gpushare_protocol",
        "gpushare_conf",
        "gpushare_consent",
        "gpushare_fields",
        "gpushare_nodes",
        "gpushare_request",
        "gpushare_single",
        "gpushare_gang",
        "gpushare_store",
        "gpushare_tag",
        "gpushare_share",
        "gpushare_places",
        "gpushare_change",
        "gpushare",
    ),
    "cli_filter.lua": ("gpushare_protocol", "gpushare_fields", "gpushare_consent", "gpushare_request", "gpushare_cli"),
}


@dataclass(frozen=True, slots=True)
class ModelNodes:
    """The nodes with GPUs of one model, as Slurm writes them, and how many GPUs all of them have."""

    nodes: str
    gpus: int


def lua_script(directory: Path, name: str, models: Mapping[str, ModelNodes]) -> str:
    """The script `name` of the Lua `directory`; `models` are the GPU models with one type an index."""
    text = (directory / name).read_text(encoding="utf-8")
    given = _table({model: _quoted(found.nodes) for model, found in models.items()})
    gpus = _table({model: str(found.gpus) for model, found in models.items()})
    modules = "".join(_module(directory, module) for module in SCRIPTS[name])
    text = _replaced(text, "site", f"local site = {{ models = {given}, gpus = {gpus} }}\n")
    return _replaced(text, "modules", f"local modules = {{}}\n{modules}")


def _table(values: Mapping[str, str]) -> str:
    return "{ " + ", ".join(f"[{_quoted(name)}] = {value}" for name, value in sorted(values.items())) + " }"


def _replaced(text: str, mark: str, wanted: str) -> str:
    found = re.search(rf"(?m)^.*--@{mark}\n", text)
    assert found is not None, mark
    return text[: found.start()] + wanted + text[found.end() :]


def _module(directory: Path, name: str) -> str:
    body = (directory / f"{name}.lua").read_text(encoding="utf-8")
    return f"\nmodules.{name} = function(...)\n{body}end\n"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
