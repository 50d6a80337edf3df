"""Numbers and names as people read them."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from slurm_gpushare.helper.reasons import Code, Reason, duration_text, sentence
from slurm_gpushare.protocol.history import OPTED_OUT, Decision, last_of_equals


def number(value: float | None, form: str = ".1f", unit: str = "") -> str:
    """A figure for people; the unknown is ``---``."""
    return "---" if value is None else f"{value:{form}}{unit}"


def per_cent(value: float | None) -> str:
    """``25 %``."""
    return "---" if value is None else f"{round(value)} %"


def hours(value: float | None) -> str:
    """GPU time in a unit that fits: hours, as sites count them, or less."""
    if value is None:
        return "---"
    return f"{value:,.0f} h" if abs(value) >= 10 else duration_text(3600 * value)


def clock(seconds: float | None) -> str:
    """As squeue writes times."""
    if seconds is None:
        return "---"
    days, rest = divmod(int(seconds), 86400)
    full, minutes = divmod(rest // 60, 60)
    text = f"{full}:{minutes:02d}:{rest % 60:02d}" if full or days else f"{minutes}:{rest % 60:02d}"
    return f"{days}-{text}" if days else text


def energy(kwh: float) -> str:
    """In a unit that fits."""
    if kwh >= 1000:
        return f"{kwh / 1000:,.1f} MWh"
    return f"{kwh:.{1 if kwh >= 10 else 2}f} kWh" if kwh >= 0.1 else f"{1000 * kwh:.1f} Wh"


def counted(count: int, singular: str) -> str:
    """``1 job``, ``12 jobs``."""
    return f"{count:,} {singular}{'' if count == 1 else 's'}"


def natural(text: str) -> tuple[tuple[int, int | str], ...]:
    """Sorts gpu9 before gpu10."""
    return tuple((0, int(part)) if part.isdecimal() else (1, part) for part in re.split(r"(\d+)", text) if part)


def cluster_name(cluster: int | None) -> str:
    return "no cluster" if cluster is None else f"cluster {cluster}"


# What was decided about a job and why, a line for each decision.


_NO_NAMES: Mapping[int, str] = MappingProxyType({})
CLUSTER_NAMES = {0: "light", 1: "middle", 2: "heavy"}


def _when(at_s: int) -> str:
    return time.strftime("%d %b %H:%M:%S", time.localtime(at_s))


def _numbers(reasons: Mapping[str, Any]) -> Iterable[str]:
    if "guest_isd_pct" in reasons:
        yield f"expected to run {per_cent(reasons['guest_isd_pct'])} longer in all"
    if "resident_isd_pct" in reasons:
        budget = f", {per_cent(reasons['resident_budget_pct'])} are allowed" if "resident_budget_pct" in reasons else ""
        yield f"its neighbour is expected to lose {per_cent(reasons['resident_isd_pct'])} of its run{budget}"
    if float(reasons.get("wait_s") or 0.0) > 0.0:
        yield f"a whole GPU was expected in {duration_text(float(reasons['wait_s']))}"
    if reasons.get("explored"):
        yield "tried to learn how well the two go together"


_DONE = {
    "alone": "placed first on an empty card, half of it left for another",
    "beside": "placed beside {partner}",
    "together": "placed together with {partner}",
    "succeeds": "placed beside {partner}, which ends soon, to have the card after it",
    "unshared": "placed on a whole card",
    "shadow": "would have been {would}, if this site shared",
    "waits": "{why}",
    "taken-back": "placement taken back: {why}",
    "extended": "time limit lengthened by what its neighbour cost it",
    "tagged": "tagged, since the submit hook was away; its request is untouched",
    "past-profile": "took more of the GPU than when it was measured: it is measured anew, and counted as a strike",
    "ran-while-paused": "used {seen} % of the GPU while it was paused: not paused again, and counted as a strike",
    OPTED_OUT: "taken out of sharing by its owner",
    "slowed": "slowed more than promised: {why}. These two workloads are kept apart for two weeks",
    "outgrown": "{why}",
    "resume-waits": "still paused: {why}",
    "requeued": "requeued: {why}",
    "paused": "paused, so that {partner} gets the speed it was promised",
    "resumed": "went on after its pause",
    "out-of-memory": "ran out of GPU memory beside {partner}; its workload now counts with {mem_mib} MiB",
}

KINDS = tuple(_DONE)
"""Every kind of decision that the helper makes."""


def reason_of(decision: Decision) -> Reason | None:
    """Why the job waited, if that is what was decided; None for a code of another release."""
    reasons = decision.reasons
    try:
        code = Code(str(reasons["code"]))
    except (KeyError, ValueError):
        return None
    return Reason(code, reasons.get("need"), reasons.get("have"), reasons.get("wait_s"))


def of_decision(decision: Decision, names: Mapping[int, str] = _NO_NAMES) -> str:
    """One decision as a line. `names` are keys of array tasks by their SLURM_JOB_ID."""
    reasons = dict(decision.reasons)
    other = decision.partner_job
    partner = f"job {names.get(other, other)}" if other is not None else "a neighbour"
    waits = reason_of(decision)
    why = sentence(waits) if waits else reasons.get("why", "")
    would = _DONE.get(str(reasons.get("how")), "placed").format(partner=partner)
    known = {name: reasons.get(name, "---") for name in ("mem_mib", "seen")}
    words = {"partner": partner, "why": why, "would": would, **known}
    text = _DONE.get(decision.kind, decision.kind).format(**words)
    cards = f"all {reasons['gpus']} GPUs" if "gpus" in reasons else f"GPU {decision.gpu_index}"
    place = f" ({cards} of {decision.node})" if decision.node and decision.kind in _PLACES else ""
    numbers = "" if waits else "; ".join(_numbers(reasons))
    return f"{_when(decision.at_s)}  {text}{place}" + (f": {numbers}" if numbers else "")


_PLACES = {"alone", "beside", "together", "succeeds", "unshared", "shadow"}


def tell(key: str, decisions: Sequence[Decision], names: Mapping[int, str] = _NO_NAMES) -> list[str]:
    """What was decided about the job, in order; of equal decisions only the last is told."""
    own = (decision for decision in decisions if decision.reasons.get("key", key) == key)
    return [of_decision(decision, names) for decision in last_of_equals(own)]
