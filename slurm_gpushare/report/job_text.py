"""A job as lines for a terminal: its figures, with bars where a bar says more than a number, and its story."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from slurm_gpushare.helper.reasons import Code, Reason, sentence, words
from slurm_gpushare.protocol.history import OPTED_OUT, Decision, last_of_equals
from slurm_gpushare.protocol.text import (
    CLUSTER_NAMES,
    WIDTH,
    bar,
    clock,
    duration_text,
    energy,
    labelled,
    moment,
    per_cent,
)
from slurm_gpushare.report.job_figures import CpuAdvice
from slurm_gpushare.report.job_view import PLACED, RESIDENT, JobView, Stay

PREALLOCATED = (
    "constant and nearly the whole card: if its framework takes memory in advance (TensorFlow, JAX), let it grow as "
    "needed, else it cannot share"
)
NOT_MEASURABLE = "not measurable here: promises are not kept by us"
_NO_NAMES: Mapping[int, str] = MappingProxyType({})


def _line(label: str, text: str) -> str:
    return labelled(label, text, 15, "  ")


def job_lines(
    job: JobView, story: Sequence[str], note: str, bars: bool, names: Mapping[int, str] = _NO_NAMES
) -> list[str]:
    """The job, told. `names` are keys of array tasks by their SLURM_JOB_ID."""
    where = f" on {','.join(job.nodes)}" if job.nodes else ""
    slurm = f" ({job.reason})" if job.reason and job.state == "PENDING" else ""
    paused = ", paused" if job.paused else ""
    head = f"Job {job.key}: {job.state}{slurm}{paused}{where}, partition {job.partition}"
    return [
        head,
        *_taking_part(job),
        *_waiting(job),
        *_use(job, "not known" if note else _unmeasured(job), bars),
        *_sharing(job, names),
        *_story(story),
        *_note(note),
    ]


def _unmeasured(job: JobView) -> str:
    if job.tag is None:
        return "it takes no part with a token, so nothing is kept of it"
    return "not measured yet" if job.end_s is None else "not measured"


def _taking_part(job: JobView) -> Iterator[str]:
    tag = job.tag
    if job.opted_out:
        yield _line("Sharing", "opted out: its owner took the token off, so it asks for a whole GPU")
    elif tag is None:
        yield _line("Sharing", "takes no part: it carries no token, or no more, or was left alone at submission")
    elif tag.probe:
        if job.state == "PENDING":
            probe = "is new: it waits for a whole GPU, to be measured on it"
        elif job.end_s is None:
            probe = "is new: it has a whole GPU and is measured"
        elif job.elapsed_s is None:
            probe = "was new: it was to be measured on a whole GPU"
        else:
            probe = "was new: it had a whole GPU and was measured"
        yield _line("Sharing", f"its workload {probe}, so that later ones can share")
    elif tag.cluster is not None:
        name = CLUSTER_NAMES.get(tag.cluster)
        kind = f"cluster {tag.cluster}" + (f" ({name})" if name else "")
        role = f", {job.role}" if job.stays else ""
        cap = f", accepts at most {tag.max_isd_pct} % slow-down" if tag.max_isd_pct is not None else ""
        yield _line("Workload", f"{kind}{role}{cap}")


def _waiting(job: JobView) -> Iterator[str]:
    if job.why is not None:
        why, change = words(job.why)
        yield _line("Why it waits", why)
        yield _line("What helps", change)
        if job.why.wait_s is not None:
            yield _line("Expected", f"a whole GPU in about {duration_text(job.why.wait_s)}")
    if job.elapsed_s is not None:
        limit = f" of {clock(job.limit_s)}" if job.limit_s else ""
        given = f", {duration_text(job.given_back_s)} of it given back for sharing" if job.given_back_s else ""
        yield _line("Time", f"{clock(job.elapsed_s)}{limit}{given}")
        if job.paused_s:
            so_far = "so far" if job.paused else "in all, so that its neighbours got the speed they were promised"
            yield _line("Paused", f"{duration_text(job.paused_s)} {so_far}")
        forecast = job.wait_forecast_s
        spared = "" if forecast is None else f"; a whole GPU was forecast {duration_text(forecast)} later"
        yield _line("Waited", f"{duration_text(job.wait_s)}{spared}")


def _use(job: JobView, unknown: str, bars: bool) -> Iterator[str]:
    if job.elapsed_s is None:
        return
    run = job.run

    def gauge(label: str, pct: float | None, text: str) -> str:
        picture = f"{bar(pct)} " if bars and pct is not None else ""
        return _line(label, f"{picture}{per_cent(pct):>5}  {text}")

    measured = f"over {duration_text(run.measured_s)}" if run else unknown
    yield gauge("GPU busy", run.gpu_busy_pct if run else None, measured)
    if run and run.gpu_mem_peak_mib and run.gpu_mem_total_mib:
        peak = f"peak {run.gpu_mem_peak_mib / 1024:.1f} of {run.gpu_mem_total_mib / 1024:.1f} GiB"
    else:
        peak = unknown
    yield gauge("GPU memory", job.gpu_mem_pct, peak)
    if run and run.preallocated and job.tag is not None:
        yield _line("", PREALLOCATED)
    cores = f"{job.cpu_pct / 100 * job.cpus:.1f} of " if job.cpu_pct is not None else ""
    yield gauge("CPU", job.cpu_pct, f"{cores}{job.cpus} core{'s' if job.cpus != 1 else ''}")
    if job.cpu_advice is not None:
        yield _line("CPUs", _cpus(job.cpu_advice, job.cpus))
    if run and run.power_w is not None:
        used = "" if job.energy_kwh is None else f", about {energy(job.energy_kwh)}"
        yield _line("Power", f"{run.power_w:.0f} W of the card{used}")
    if run and run.mgup is not None:
        what = {"epoch": "first epoch", "limit": "up to the time limit of probes", "end": "whole run"}.get(run.closed)
        numbers = f"MGUP {per_cent(run.mgup)}, MGMAP {per_cent(run.mgmap)}, MGTSAMP {per_cent(run.mgtsamp)}"
        yield _line("Profile", f"{numbers}; {what or 'so far'}, {duration_text(run.profile_s)}")


def _cpus(advice: CpuAdvice, had: int) -> str:
    if advice.gpu_waits:
        return (
            f"all {had} are busy and the GPU waits for them: more would help, {advice.cpus} perhaps (-c {advice.cpus})"
        )
    return f"{had} asked for, {advice.used:.1f} used: {advice.cpus} would do (-c {advice.cpus})"


def _cost(expected: float | None, measured: float | None) -> str:
    if measured is not None:
        return f"{measured:.0f} % measured" + ("" if expected is None else f", {expected:.0f} % expected")
    return "---" if expected is None else f"{expected:.0f} % expected, not measured"


def _sharing(job: JobView, names: Mapping[int, str]) -> Iterator[str]:
    if job.blind:
        yield _line("Note", f"{NOT_MEASURABLE} (an MPS server hides what single jobs do)")
    for stay in job.stays:
        yield _line("Shared", _stay(stay, names))
    if job.stays:
        promised = "" if job.promised_pct is None else f"; promised at most {job.promised_pct:.0f} %"
        cost = _cost(job.expected_isd_pct, job.measured_isd_pct)
        yield _line("Slow-down", f"over the whole run {cost}{promised}")
    elif (live := job.live) is not None and live.beside is not None and job.elapsed_s is not None:
        cost = _cost(live.expected_isd_pct, live.measured_isd_pct)
        yield _line("Shares", f"card {live.card} with job {names.get(live.beside, live.beside)}: slower by {cost}")


def _stay(stay: Stay, names: Mapping[int, str]) -> str:
    beside = f"job {names.get(stay.beside, stay.beside)}" if stay.beside else "another job"
    lasting = "" if stay.end_s is not None else ", still"
    card = f"{f'all {stay.gpus} GPUs' if stay.gpus > 1 else f'GPU {stay.gpu_index}'} of {stay.node}"
    cost = _cost(stay.expected_isd_pct, stay.measured_isd_pct)
    neighbour_paused = stay.paused_s and stay.role == RESIDENT
    paused = f"; its neighbour was paused for it, {duration_text(stay.paused_s)} in all" if neighbour_paused else ""
    return f"{duration_text(stay.seconds)}{lasting} with {beside} on {card}, as {stay.role}: slower by {cost}{paused}"


def _story(story: Sequence[str]) -> Iterator[str]:
    for text in story:
        yield textwrap.fill(text, WIDTH, initial_indent="  ", subsequent_indent=" " * 12, break_long_words=False)


def _note(note: str) -> Iterator[str]:
    if note:
        yield _line("Note", note)


# What was decided about a job and why, a line for each decision.


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
    "preempted": "{why}",
    "paused": "paused, so that {partner} gets the speed it was promised",
    "resumed": "went on after its pause",
    "out-of-memory": "ran out of GPU memory beside {partner}; its workload now counts with {mem_mib} MiB",
}

KINDS = tuple(_DONE)
"""Every kind of decision that the helper makes."""
_PLACES = PLACED | {"unshared", "shadow"}


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
    return f"{moment(decision.at_s, '%d %b %H:%M:%S')}  {text}{place}" + (f": {numbers}" if numbers else "")


def tell(key: str, decisions: Sequence[Decision], names: Mapping[int, str] = _NO_NAMES) -> list[str]:
    """What was decided about the job, in order; of equal decisions only the last is told."""
    own = (decision for decision in decisions if decision.reasons.get("key", key) == key)
    return [of_decision(decision, names) for decision in last_of_equals(own)]
