"""Faults of what runs on a node for a job: its sampler, its prolog, its epilog, also while that holds a card."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from gpushare_lab.chaos.fault import Pause
from gpushare_lab.chaos.site import ChaosSite
from gpushare_lab.chaos.slurm_faults import heal_nodes, kill

PATIENCE_S = 120.0
"""So long a fault waits for somebody to hit."""
MOMENT_S = 2.0
BELIEVED_S = 6.0
"""So long nodes hold cards for a helper that stands still; less than helper/answering.py lets them."""
BEATS_S = 5.0
"""Between two tries the helper looks at the queue and tells the nodes that somebody waits, or none would hold again."""
_HOLD = re.compile(r"(\d+) (\d+) \d+ 0 (\d+)")  # begin, end, the helper's beat, not answered, the job


def samplers_die(site: ChaosSite, pause: Pause) -> None:
    _until_hit(lambda: _kill_some(site, "node.sampler", 3), "sampler", pause)
    pause(8)


def scripts_die(site: ChaosSite, pause: Pause) -> None:
    """Prologs and epilogs end half-way, one that holds a card too; Slurm then drains the node, whoever wrote them."""
    for name in ("prolog", "epilog", "prolog", "epilog"):
        _until_hit(partial(_kill_some, site, f"/{name}.sh", 1), name, pause)
        heal_nodes(site)
        pause(3)
    _until_hit(lambda: _hit_in_a_hold(site), "epilog in a hold", pause, between_s=BEATS_S)
    heal_nodes(site)
    pause(5)
    heal_nodes(site)


def _until_hit(hit: Callable[[], bool], what: str, pause: Pause, between_s: float = 0.2) -> None:
    """Try until somebody was hit: a fault that met nobody would prove nothing."""
    begun = time.monotonic()
    while not hit():
        if time.monotonic() > begun + PATIENCE_S:
            raise AssertionError(f"no {what} was hit")
        pause(between_s)


def _kill_some(site: ChaosSite, word: str, most: int) -> bool:
    """Kill processes with a word in their command lines; whether there were any within a moment: scripts are short."""
    end = time.monotonic() + MOMENT_S
    while time.monotonic() < end:
        if sum(kill(pid) for pid in site.processes(word)[:most]):
            return True
        time.sleep(0.01)
    return False


def _hit_in_a_hold(site: ChaosSite) -> bool:
    """Kill an epilog while it holds its card. The helper stands still meanwhile, or its answer would end the hold."""
    site.signal_helper(signal.SIGSTOP)
    try:
        end = time.monotonic() + BELIEVED_S
        while time.monotonic() < end:
            if (holding := _holding(site)) and any(
                _job_of(pid) in holding and _job_of(pid) in _holding(site) and kill(pid)
                for pid in site.processes("/epilog.sh")
            ):
                return True
            time.sleep(0.02)
    finally:
        site.signal_helper(signal.SIGCONT)
    return False


def _holding(site: ChaosSite) -> set[str]:
    """The jobs whose epilogs hold a card now, by the nodes' own record (prolog/epilog.sh)."""
    return set(_open_holds(site.config.state_dir.glob("nodes/*/holds"), 1000 * time.time()))


def _open_holds(records: Iterable[Path], now_ms: float) -> Iterable[str]:
    for record in records:
        try:
            lines = record.read_text().splitlines()
        except OSError:
            continue
        for match in filter(None, map(_HOLD.fullmatch, lines)):
            if int(match[1]) <= now_ms < int(match[2]):
                yield match[3]


def _job_of(pid: int) -> str:
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    return next((item[13:].decode() for item in variables if item.startswith(b"SLURM_JOB_ID=")), "")
