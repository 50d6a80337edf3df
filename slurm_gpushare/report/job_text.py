"""A job's figures as lines for a terminal: bars where a bar says more than a number, 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from slurm_gpushare.helper.reasons import duration_text, words
from slurm_gpushare.report.cpu_advice import CpuAdvice
from slurm_gpushare.report.job_facts import JobFacts, Stay
from slurm_gpushare.report.slow_down import RESIDENT
from slurm_gpushare.report.words import CLUSTER_NAMES, clock, energy, per_cent

WIDTH = 80
PREALLOCATED = (
    "constant and nearly the whole card: if its framework takes memory in advance (TensorFlow, JAX), let it grow as "
    "needed, else it cannot share"
)
_NO_NAMES: Mapping[int, str] = MappingProxyType({})
_LABEL = 13
_BAR = 20


def bar(pct: float, cells: int = _BAR) -> str:
    """``[████......]``"""
    full = round(min(max(pct, 0.0), 100.0) / 100.0 * cells)
    return f"[{'█' * full}{'.' * (cells - full)}]"


def _line(label: str, text: str) -> str:
    first, then = f"  {label:<{_LABEL}}", " " * (_LABEL + 2)
    return textwrap.fill(text, WIDTH, initial_indent=first, subsequent_indent=then, break_long_words=False)


def job_lines(
    facts: JobFacts, story: Sequence[str], note: str, bars: bool, names: Mapping[int, str] = _NO_NAMES
) -> list[str]:
    """The job, told. `names` are keys of array tasks by their SLURM_JOB_ID."""
    job = facts.job
    where = f" on {','.join(job.nodes)}" if job.nodes else ""
    slurm = f" ({job.reason})" if job.reason and job.state == "PENDING" else ""
    paused = ", paused" if facts.paused else ""
    head = f"Job {job.key}: {job.state}{slurm}{paused}{where}, partition {job.partition}"
    return [
        head,
        *_taking_part(facts),
        *_waiting(facts),
        *_use(facts, "not known" if note else _unmeasured(facts), bars),
        *_sharing(facts, names),
        *_story(story),
        *_note(note),
    ]


def _unmeasured(facts: JobFacts) -> str:
    if facts.job.tag is None:
        return "it takes no part with a token, so nothing is kept of it"
    return "not measured yet" if facts.job.end_s is None else "not measured"


def _taking_part(facts: JobFacts) -> Iterator[str]:
    tag = facts.job.tag
    if facts.job.opted_out:
        yield _line("Sharing", "opted out: its owner took the token off, so it asks for a whole GPU")
    elif tag is None:
        yield _line("Sharing", "takes no part: it carries no token, or no more, or was left alone at submission")
    elif tag.probe:
        if facts.job.state == "PENDING":
            probe = "is new: it waits for a whole GPU, to be measured on it"
        elif facts.job.end_s is None:
            probe = "is new: it has a whole GPU and is measured"
        elif facts.elapsed_s is None:
            probe = "was new: it was to be measured on a whole GPU"
        else:
            probe = "was new: it had a whole GPU and was measured"
        yield _line("Sharing", f"its workload {probe}, so that later ones can share")
    elif tag.cluster is not None:
        name = CLUSTER_NAMES.get(tag.cluster)
        kind = f"cluster {tag.cluster}" + (f" ({name})" if name else "")
        role = f", {facts.role}" if facts.role else ""
        cap = f", accepts at most {tag.max_isd_pct} % slow-down" if tag.max_isd_pct is not None else ""
        yield _line("Workload", f"{kind}{role}{cap}")


def _waiting(facts: JobFacts) -> Iterator[str]:
    job = facts.job
    if facts.reason is not None:
        why, change = words(facts.reason)
        yield _line("Why it waits", why)
        yield _line("What helps", change)
        if facts.reason.wait_s is not None:
            yield _line("Expected", f"a whole GPU in about {duration_text(facts.reason.wait_s)}")
    if facts.elapsed_s is not None:
        limit = f" of {clock(job.limit_s)}" if job.limit_s else ""
        given = f", {duration_text(facts.given_back_s)} of it given back for sharing" if facts.given_back_s else ""
        yield _line("Time", f"{clock(facts.elapsed_s)}{limit}{given}")
        if facts.paused_s:
            so_far = "so far" if facts.paused else "in all, so that its neighbours got the speed they were promised"
            yield _line("Paused", f"{duration_text(facts.paused_s)} {so_far}")
        avoided = facts.wait_avoided_s
        spared = "" if avoided is None else f"; a whole GPU was expected {duration_text(avoided)} later"
        yield _line("Waited", f"{duration_text(facts.waited_s)}{spared}")


def _use(facts: JobFacts, unknown: str, bars: bool) -> Iterator[str]:
    if facts.elapsed_s is None:
        return
    run = facts.run

    def gauge(label: str, pct: float | None, text: str) -> str:
        picture = f"{bar(pct)} " if bars and pct is not None else ""
        return _line(label, f"{picture}{per_cent(pct):>5}  {text}")

    measured = f"over {duration_text(run.measured_s)}" if run else unknown
    yield gauge("GPU busy", run.gpu_busy_pct if run else None, measured)
    if run and run.gpu_mem_peak_mib and run.gpu_mem_total_mib:
        peak = f"peak {run.gpu_mem_peak_mib / 1024:.1f} of {run.gpu_mem_total_mib / 1024:.1f} GiB"
    else:
        peak = unknown
    yield gauge("GPU memory", facts.gpu_mem_pct, peak)
    if run and run.preallocated and facts.job.tag is not None:
        yield _line("", PREALLOCATED)
    cores = f"{facts.cpu_pct / 100 * facts.job.cpus:.1f} of " if facts.cpu_pct is not None else ""
    yield gauge("CPU", facts.cpu_pct, f"{cores}{facts.job.cpus} core{'s' if facts.job.cpus != 1 else ''}")
    if facts.cpu_advice is not None:
        yield _line("CPUs", _cpus(facts.cpu_advice, facts.job.cpus))
    if run and run.power_w is not None:
        used = "" if facts.energy_kwh is None else f", about {energy(facts.energy_kwh)}"
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


def _sharing(facts: JobFacts, names: Mapping[int, str]) -> Iterator[str]:
    for stay in facts.stays:
        yield _line("Shared", _stay(stay, names))
    if facts.stays:
        promised = "" if facts.promised_pct is None else f"; promised at most {facts.promised_pct:.0f} %"
        cost = _cost(facts.expected_isd_pct, facts.measured_isd_pct)
        yield _line("Slow-down", f"over the whole run {cost}{promised}")
    elif (live := facts.live) is not None and live.beside is not None and facts.elapsed_s is not None:
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
