"""The systemd units, filled in for a site: where its files are decides what the helper must be let write and see. And
doctor's check of those that are installed: do they fit the settings, which may have changed since?"""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from slurm_gpushare.protocol.files import resource_dir
from slurm_gpushare.protocol.settings import DEFAULT_PATH, DEFAULTS, KEYS, Config, parse_config
from slurm_gpushare.protocol.settings_in_force import DEFAULT_PATH as LAST_GOOD
from slurm_gpushare.site.current_setup import SiteSetup
from slurm_gpushare.site.finding import Finding, check, passed, warned
from slurm_gpushare.site.site_files import FileKind, Piece, read_settings
from slurm_gpushare.slurm.nodes import slurm_user

# Where systemd looks for commands of its own accord.
_USUAL_BIN = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
HOMES = (Path("/home"), Path("/root"), Path("/run/user"))
TEMPORARY = (Path("/tmp"), Path("/var/tmp"))
_RUNS = (Path("/run"), Path("/var/run"))
_PLACES = frozenset({"state_dir", "spool_dir", "public_dir", "hook_file", "store_url", "munge_socket"})


@dataclass(frozen=True, slots=True)
class UnitSite:
    """What the units must know of a site."""

    command: Path
    """The gpushare command."""
    user: str
    config: Config = DEFAULTS
    etc: Path = DEFAULT_PATH.parent
    """Where slurm.conf and gpushare.conf are."""
    slurmctld: Path | None = None
    """StateSaveLocation, where the helpers' lease lies."""
    slurm_bin: Path | None = None
    """Where Slurm's commands are; None: where everybody finds them."""

    @property
    def state(self) -> list[Path]:
        return [self.config.state_dir, *filter(None, [self.slurmctld])]

    @property
    def store(self) -> list[Path]:
        """Directories of the store, of the hook's file and of the last good settings. To read SQLite is to write.

        Where the store is a link, that of the file it leads to as well.
        """
        store = self.config.store_file
        target = store.resolve() if store is not None and store.is_symlink() else None
        files = (store, target, self.config.hook_file, LAST_GOOD)
        return list(dict.fromkeys(path.parent for path in files if path is not None))

    @property
    def spool(self) -> list[Path]:
        spool, public = self.config.spool_dir, self.config.public_dir
        return [spool] if public.is_relative_to(spool) else [spool, public]

    @property
    def environment(self) -> list[str]:
        found = []
        if self.etc != DEFAULT_PATH.parent:
            found.append(f"SLURM_CONF={self.etc}/slurm.conf")
        if self.slurm_bin is not None and str(self.slurm_bin) not in _USUAL_BIN:
            found.append(f"PATH={self.slurm_bin}:{':'.join(_USUAL_BIN[:4])}")
        return found

    def needs(self, *roots: Path) -> bool:
        """Whether anything that the helper uses is below one of these, which units usually hide."""
        optional = (self.slurm_bin, self.config.munge_socket, self.config.url_file)
        used = [self.command, self.etc, *self.state, *self.store, *self.spool, *filter(None, optional)]
        return any(path.is_relative_to(root) for path in used for root in roots)


def unit_pieces(site: UnitSite) -> Iterator[Piece]:
    """The units as files below slurm.conf's directory."""
    state = site.config.state_dir
    below = [state.relative_to(run) for run in _RUNS if run in state.parents]
    values = {
        "GPUSHARE": str(site.command),
        "SLURM_USER": site.user,
        "STATE": _writable(site.state),
        "STORE": _writable(site.store),
        "SPOOL": _writable(site.spool),
        "STATE_DIR": str(state),
        "RUNTIME": str(below[0]) if below else "",
        "HOMES": "read-only" if site.needs(*HOMES) else "yes",
        "TEMPORARY": "no" if site.needs(*TEMPORARY) else "yes",
        "ENVIRONMENT": "".join(f"Environment={_quoted(word)}\n" for word in site.environment),
    }
    for path in sorted((resource_dir("share") / "systemd").iterdir()):
        text = path.read_text(encoding="utf-8").replace("@ENVIRONMENT@\n", "@ENVIRONMENT@")
        for name, value in values.items():
            text = text.replace(f"@{name}@", value)
        yield Piece(f"systemd/{path.name}", FileKind.FILE, text)


def _writable(paths: list[Path]) -> str:
    """As ReadWritePaths has them; one that is not there yet must not keep the unit from starting."""
    return " ".join(_quoted(f"-{path}") for path in paths)


def _quoted(word: str) -> str:
    """A word as systemd reads it."""
    word = word.replace("%", "%%")
    plain = word.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{plain}"' if plain != word or any(blank in word for blank in " \t'") else word


def settings_of_places(text: str) -> Config:
    """Where a gpushare.conf says that things are. A mistake in another line of it does not matter here."""
    given = read_settings(text)
    keys = [key for key in KEYS if key.attribute in _PLACES and key.name.lower() in given]
    return parse_config("".join(f"{key.name}={given[key.name.lower()]}\n" for key in keys))


def unit_site(facts: SiteSetup, command: Path, settings: str, scontrol: str | None) -> UnitSite:
    """The site, from what Slurm says, the text of its gpushare.conf and the path of scontrol."""
    user, slurm_bin = slurm_user(facts.config).name, Path(scontrol).parent if scontrol else None
    saved = Path(facts.config["StateSaveLocation"]) if "StateSaveLocation" in facts.config else None
    return UnitSite(command, user, settings_of_places(settings), facts.etc, saved, slurm_bin)


FOLDERS = tuple(Path(top, "systemd/system") for top in ("/etc", "/run", "/usr/local/lib", "/usr/lib"))
"""Where systemd looks for a unit, the first counts. Drop-ins are read from all."""
_FIX = (
    "Run 'gpushare configure --write', copy its systemd/gpushare-* to /etc/systemd/system, then: "
    "systemctl daemon-reload. Restart the helper."
)
_YES = frozenset({"yes", "true", "on", "1"})

Directives = Mapping[str, Sequence[str]]


@check("units")
def installed_units(facts: SiteSetup, config: Config) -> Iterator[Finding]:
    """On the controller: the helper's units let it write and see what gpushare.conf names."""
    if not facts.is_controller:
        return
    found = {name: said for name in _NEEDS if (said := _installed(name)) is not None}
    for name, said in found.items():
        command = next(iter(" ".join(said.get("ExecStart", [])[-1:]).split()), "").lstrip("@-:+!")
        site = UnitSite(Path(command or "/"), slurm_user(facts.config).name, config, facts.etc)
        if faults := list(_faults(said, site, [path for need in _NEEDS[name] for path in getattr(site, need)])):
            yield warned(f"{name} {', '.join(faults)}", _FIX)
            return  # the others are of the same time
    if found:
        yield passed("the helper's units fit these settings")


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
        allowed = list(_may_write(said))
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


def _may_write(said: Directives) -> Iterator[Path]:
    yield from (Path(word.lstrip("-+")) for word in _words(said, "ReadWritePaths"))
    for key, parent in (("RuntimeDirectory", "/run"), ("StateDirectory", "/var/lib")):
        yield from (Path(parent, word) for word in _words(said, key))


def _last(said: Directives, key: str) -> str:
    return said[key][-1] if said.get(key) else ""


def _words(said: Directives, key: str) -> Iterator[str]:
    for value in said.get(key, ()):
        with suppress(ValueError):  # a quote without an end
            yield from (word.replace("%%", "%") for word in shlex.split(value))


def _installed(name: str) -> Directives | None:
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
