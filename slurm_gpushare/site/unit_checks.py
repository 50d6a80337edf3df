"""Doctor's check of the systemd units that are installed: do they fit the settings, which may have changed since?"""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from slurm_gpushare.config import Config
from slurm_gpushare.site.current_setup import SiteSetup
from slurm_gpushare.site.finding import Finding, passed, warned
from slurm_gpushare.site.units import HOMES, TEMPORARY, UnitSite
from slurm_gpushare.slurm.configuration import slurm_user

FOLDERS = tuple(
    Path(name)
    for name in (
        "/etc/systemd/system",
        "/run/systemd/system",
        "/usr/local/lib/systemd/system",
        "/usr/lib/systemd/system",
    )
)
"""Where systemd looks for a unit, the first counts. Drop-ins are read from all."""
_FIX = (
    "Run 'gpushare configure --write', copy its systemd/gpushare-* to /etc/systemd/system, then: "
    "systemctl daemon-reload. Restart the helper."
)
_YES = frozenset({"yes", "true", "on", "1"})

Directives = Mapping[str, Sequence[str]]


def installed_units(facts: SiteSetup, config: Config) -> Iterator[Finding]:
    """On the controller: the helper's units let it write and see what gpushare.conf names."""
    if not facts.is_controller:
        return
    found = {name: said for name in _NEEDS if (said := _read(name)) is not None}
    for name, said in found.items():
        command = next(iter(" ".join(said.get("ExecStart", [])[-1:]).split()), "").lstrip("@-:+!")
        site = UnitSite(Path(command or "/"), slurm_user(facts.config).name, config, facts.etc)
        if faults := list(_faults(said, site, [path for need in _NEEDS[name] for path in getattr(site, need)])):
            yield warned("units", f"{name} {', '.join(faults)}", _FIX)
            return  # the others are of the same time
    if found:
        yield passed("units", "the helper's units fit these settings")


_NEEDS = {
    "gpushare-backfill.service": ("state", "store", "spool"),
    "gpushare-watchdog.service": ("store", "spool"),
    "gpushare-metrics.service": ("store",),
}


def _faults(said: Directives, site: UnitSite, needed: Sequence[Path]) -> Iterator[str]:
    if not site.command.exists():
        yield f"starts {site.command}, which is not there"
    if (user := _last(said, "User")) != site.user:
        yield f"runs as {user or 'root'}, and SlurmUser is {site.user}"
    if _last(said, "ProtectSystem") == "strict":
        allowed = list(_writable(said))
        for path in needed:
            if not any(path.is_relative_to(place) for place in allowed):
                yield f"does not let it write {path}"
    if _last(said, "ProtectHome") in _YES | {"tmpfs"} and site.needs(*HOMES):
        yield "hides home directories, and something that it needs is in one"
    if _last(said, "PrivateTmp") in _YES and site.needs(*TEMPORARY):
        yield "hides /tmp, and something that it needs is there"
    set_here = [word.partition("=")[0] for word in _words(said, "Environment")]
    if site.environment and "EnvironmentFile" not in said and not {"SLURM_CONF", "GPUSHARE_CONF"} & set(set_here):
        yield f"does not say that slurm.conf is in {site.etc}"


def _writable(said: Directives) -> Iterator[Path]:
    yield from (Path(word.lstrip("-+")) for word in _words(said, "ReadWritePaths"))
    for key, parent in (("RuntimeDirectory", "/run"), ("StateDirectory", "/var/lib")):
        yield from (Path(parent, word) for word in _words(said, key))


def _last(said: Directives, key: str) -> str:
    return said[key][-1] if said.get(key) else ""


def _words(said: Directives, key: str) -> Iterator[str]:
    for value in said.get(key, ()):
        with suppress(ValueError):  # a quote without an end
            yield from (word.replace("%%", "%") for word in shlex.split(value))


def _read(name: str) -> Directives | None:
    """The unit's settings with its drop-ins; None if it is not installed, or masked by a link to /dev/null."""
    unit = next((folder / name for folder in FOLDERS if (folder / name).exists()), None)
    if unit is None or not unit.is_file():
        return None
    drop_ins = {path.name: path for folder in reversed(FOLDERS) for path in (folder / f"{name}.d").glob("*.conf")}
    found: dict[str, list[str]] = defaultdict(list)
    for path in (unit, *(drop_ins[name] for name in sorted(drop_ins))):
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""  # a link to nowhere
        for line in text.splitlines():
            key, equals, value = (part.strip() for part in line.partition("="))
            if equals and not key.startswith(("#", ";", "[")):
                found[key] = [*found[key], value] if value else []  # an empty one takes back those before
    return dict(found)
