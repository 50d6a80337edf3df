"""The systemd units, filled in for a site: where its files are decides what the helper must be let write and see."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slurm_gpushare.protocol.files import resource_dir
from slurm_gpushare.protocol.settings import DEFAULT_PATH, DEFAULTS, KEYS, Config, parse_config
from slurm_gpushare.protocol.settings_in_force import DEFAULT_PATH as LAST_GOOD
from slurm_gpushare.site.configure import FileKind, Piece
from slurm_gpushare.site.current_setup import SiteSetup
from slurm_gpushare.site.site_files import read_settings
from slurm_gpushare.slurm.configuration import slurm_user

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
    slurm_bin: Path | None = None
    """Where Slurm's commands are; None: where everybody finds them."""

    @property
    def state(self) -> list[Path]:
        return [self.config.state_dir]

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


def unit_texts(site: UnitSite) -> Iterator[tuple[str, str]]:
    """Each unit's name and text."""
    state = site.config.state_dir
    below = [state.relative_to(run) for run in _RUNS if run in state.parents]
    values = {
        "GPUSHARE": str(site.command),
        "SLURM_USER": site.user,
        "STATE": _writable(site.state),
        "STORE": _writable(site.store),
        "SPOOL": _writable(site.spool),
        "RUNTIME": str(below[0]) if below else "",
        "HOMES": "read-only" if site.needs(*HOMES) else "yes",
        "TEMPORARY": "no" if site.needs(*TEMPORARY) else "yes",
        "ENVIRONMENT": "".join(f"Environment={_quoted(word)}\n" for word in site.environment),
    }
    for path in sorted((resource_dir("share") / "systemd").iterdir()):
        text = path.read_text(encoding="utf-8").replace("@ENVIRONMENT@\n", "@ENVIRONMENT@")
        for name, value in values.items():
            text = text.replace(f"@{name}@", value)
        yield path.name, text


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
    return UnitSite(command, user, settings_of_places(settings), facts.etc, slurm_bin)


def unit_pieces(site: UnitSite) -> Iterator[Piece]:
    """The units as files below slurm.conf's directory."""
    for name, text in unit_texts(site):
        yield Piece(f"systemd/{name}", FileKind.FILE, text)
