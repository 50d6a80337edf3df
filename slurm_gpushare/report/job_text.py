"""A job as lines for a terminal: its figures, with bars where a bar says more than a number, and its story."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from slurm_gpushare.helper.explain import words
from slurm_gpushare.node.figures import CpuAdvice
from slurm_gpushare.protocol.text import (
    CLUSTER_NAMES,
    WIDTH,
    bar,
    clock,
    duration_text,
    energy,
    labelled,
    per_cent,
)
from slurm_gpushare.report.job_view import RESIDENT, JobView, Stay

PREALLOCATED = (
    "constant and nearly the whole card: if its framework takes memory in advance (TensorFlow, JAX), let it grow as "
    "needed, else it cannot share"
)
NOT_MEASURABLE = "not measurable here: promises are not kept by us"
NOT_MEASURED = (
    "its workload was new, and nothing was measured: it used no GPU, or its token is another user's ('gpushare token "
    "list' shows yours), or its record has not come yet. Later ones are measured instead"
)
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
        *(
            textwrap.fill(text, WIDTH, initial_indent="  ", subsequent_indent=" " * 12, break_long_words=False)
            for text in story
        ),
        *([_line("Note", note)] if note else []),
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
        elif job.run is not None and job.run.gpu_busy_pct is not None:
            probe = "was new: it had a whole GPU and was measured"
        else:
            yield _line("Sharing", NOT_MEASURED)
            return
        yield _line("Sharing", f"its workload {probe}, so that later ones can share")
    elif tag.cluster is not None:
        name = CLUSTER_NAMES.get(tag.cluster)
        kind = f"cluster {tag.cluster}" + (f" ({name})" if name else "")
        role = f", {job.role}" if job.stays else ""
        own, site = tag.max_isd_pct, job.site_cap_pct
        cap = f", accepts at most {own} % slow-down" if own is not None else ""
        if own is not None and site is not None and own > site:
            cap = f", slowed by at most {site:.0f} %, which holds for all here (its max={own} is more)"
        yield _line("Workload", f"{kind}{role}{cap}")


def _waiting(job: JobView) -> Iterator[str]:
    if job.why is not None and not job.opted_out:
        why, change = words(job.why)
        yield _line("Why it waits", why)
        yield _line("What helps", change)
        if job.why.wait_s is not None:
            yield _line("Forecast", f"a start in about {duration_text(job.why.wait_s)}")
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
        numbers = (
            f"at most {per_cent(run.mgup)} busy, {per_cent(run.mgmap)} of its memory allocated, "
            f"{per_cent(run.mgtsamp)} of the time accessing it"
        )
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
        whole_pct = job.expected_isd_pct if job.measured_isd_pct is None else None
        yield _line("Slow-down", f"over the whole run {_cost(whole_pct, job.measured_isd_pct)}{promised}")
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
