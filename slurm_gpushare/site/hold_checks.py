"""Doctor's checks of the hold: does the controller wake the helper, and can this node see what the helper publishes?"""

from __future__ import annotations

import stat
import time
from collections.abc import Iterator
from pathlib import Path

from slurm_gpushare.node.delivery import hold_dir
from slurm_gpushare.protocol.settings import PLACES_NOBODY, Config
from slurm_gpushare.protocol.users import user_name
from slurm_gpushare.site.current_setup import SiteSetup
from slurm_gpushare.site.finding import Finding, failed, passed, warned
from slurm_gpushare.site.script_checks import is_executable, is_there
from slurm_gpushare.slurm.configuration import completing_stops_everybody, slurm_user

OLD_S = 120.0
"""The helper writes its beat every half minute at the least, also while nobody waits."""
_OFF = "EpilogHold=0: Slurm may start the next job on a whole card before the helper has looked"


def hold_setup(facts: SiteSetup, config: Config) -> Iterator[Finding]:
    """What Slurm's configuration and gpushare.conf say about the hold."""
    scripts = [Path(script) for script in facts.scripts("EpilogSlurmctld")]
    absent = [path for path in scripts if "gpushare" in path.name and not is_there(path)]
    if absent and facts.is_controller:
        yield failed(
            "hold",
            f"EpilogSlurmctld={absent[0]} is missing: slurmctld may not start again without it",
            "Run 'gpushare configure --write'.",
        )
        return
    inert = [path for path in scripts if "gpushare" in path.name and not is_executable(path)]
    if inert and facts.is_controller:
        yield failed(
            "hold",
            f"EpilogSlurmctld={inert[0]} is not executable: slurmctld may not start again",
            f"Run 'chmod 755 {inert[0]}'.",
        )
        return
    if config.epilog_hold_s == 0:
        yield passed("hold", _OFF)
        return
    user = slurm_user(facts.config)
    if config.slurm_user not in {user.name, str(user.uid)}:
        yield failed(
            "hold-user",
            f"gpushare.conf says SlurmUser={config.slurm_user}, slurmctld runs as {user.name}: no card is held",
            f"Set SlurmUser={user.name} in gpushare.conf.",
        )
    if completing_stops_everybody(facts.config):
        yield warned(
            "hold",
            "CompleteWait is set: a job in its epilog keeps all others waiting, so no card is held",
            "Add reduce_completing_frag to SchedulerParameters, or remove CompleteWait.",
        )
    elif not any(map(_calls_us, scripts)):
        yield warned(
            "hold",
            "EpilogSlurmctld does not call us: the helper hears too late of a card that becomes empty",
            "Run 'gpushare configure' for the line and the script. The script must be there before slurmctld reads it.",
        )
    else:
        yield passed("hold", f"EpilogSlurmctld calls us; a card is kept for {config.epilog_hold_s:g} s at the most")


def _calls_us(script: Path) -> bool:
    """On a node the controller's script may be absent: then its name must do."""
    try:
        return "gpushare" in script.name or "gpushare" in script.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


def hold_board(config: Config) -> Iterator[Finding]:
    """On nodes and controller: the directory is there, only SlurmUser's, and the helper writes to it."""
    if config.epilog_hold_s == 0 or config.policy in PLACES_NOBODY:
        return
    board = hold_dir(config.spool_dir)
    try:
        about = board.lstat()
        words = (board / "helper").read_text(encoding="ascii", errors="replace").split()
    except OSError as why:
        yield warned("hold-board", f"{why.filename}: {why.strerror}: no card is held", "Start 'gpushare backfill'.")
        return
    ours = about.st_uid == 0 or config.slurm_user in {str(about.st_uid), user_name(about.st_uid)}
    if not stat.S_ISDIR(about.st_mode) or about.st_mode & 0o022 or not ours:
        yield failed(
            "hold-board",
            f"{board} is not {config.slurm_user}'s alone: nodes do not believe what is in it",
            f"Run: chown {config.slurm_user} {board}; chmod 755 {board}",
        )
        return
    beat_s, until_s = (int(word) / 1000.0 if word.isdecimal() else 0.0 for word in (*words, "", "")[:2])
    now_s = time.time()
    if now_s - beat_s > OLD_S:
        since = time.strftime("since %Y-%m-%d %H:%M:%S", time.localtime(beat_s)) if beat_s else "since it was stopped"
        yield warned(
            "hold-board",
            f"{board / 'helper'}: the helper has not written {since}: no card is held",
            "Is 'gpushare backfill' running? Is SpoolDir the same file system here as there, and not stale?",
        )
        return
    state = "somebody waits for a card" if until_s > now_s else "nobody waits for a card now"
    yield passed("hold-board", f"{state}{_last_minute(config)}")


def _last_minute(config: Config) -> str:
    """What this node's own record says of the last minute."""
    since_ms = 1000 * (time.time() - 60)
    lines = [line.split() for path in config.state_dir.glob("nodes/*/holds") for line in _lines(path)]
    recent = [words for words in lines if len(words) == 5 and words[0].isdecimal() and int(words[0]) > since_ms]
    if not recent:
        return ""
    answered = sum(words[3] == "1" for words in recent)
    held_s = sum(int(words[1]) - int(words[0]) for words in recent) / 1000.0
    return f"; in the last minute {len(recent)} holds of {held_s:.1f} s in all, {answered} answered"


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []
