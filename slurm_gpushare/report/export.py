"""What commands print for programs: versioned JSON documents, CSV with one line a job, and rows as sacct has them."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from slurm_gpushare.helper.explain import words
from slurm_gpushare.protocol.text import moment
from slurm_gpushare.report.job_view import JobView
from slurm_gpushare.report.status import GpuLine
from slurm_gpushare.report.summary import Report
from slurm_gpushare.slurm.accounting import AccountedJob

JSON_VERSION = 2

_OF_A_LINE = {
    name: name
    for name in (
        "user", "account", "partition", "state", "submit_s", "start_s", "end_s", "elapsed_s", "wait_s", "cluster",
        "role", "partners", "shared_s",
    )
} | {
    "isd_pct": "measured_isd_pct", "predicted_isd_pct": "expected_isd_pct", "promised_pct": "promised_pct",
    "partners": "neighbours",
}  # fmt: skip
"""Columns of the CSV, and the view's names for them."""
CSV_COLUMNS = ("job_id", *_OF_A_LINE)
_FIGURES = (
    "profiled", "complete", "measured_spans", "accounted_gpu_h", "ps_pct", "prediction_error_points", "predictions",
    "gpu_busy_pct", "gpu_busy_shared_pct", "energy_kwh", "measured_jobs",
    "given_back_s", "given_back_jobs", "paused_s",
)  # fmt: skip
_IF_COMPLETE = ("shared", "gpu_h", "busy_gpu_h", "solo_gpu_h", "saved_gpu_h", "pauses", "out_of_memory")
"""Unknown as long as it is not known who shared."""
_OF_A_JOB = (
    "raw_id", "state", "partition", "submit_s", "end_s", "limit_s", "cpus", "elapsed_s", "wait_forecast_s",
    "given_back_s", "paused", "paused_s", "cpu_pct", "gpu_mem_pct", "energy_kwh", "shared_s", "expected_isd_pct",
    "measured_isd_pct", "promised_pct", "cluster", "probe", "opted_out",
)  # fmt: skip
_OF_A_QUEUED_JOB = (
    "uid", "partition", "state", "reason", "cluster", "probe", "card", "partners", "paused", "given_back_s",
)  # fmt: skip
_OF_A_GPU = (
    "node", "index", "model", "usable", "shards_used", "shards_total", "stranger", "state", "gpu_util_pct",
    "mem_used_pct", "off",
)  # fmt: skip


def _some(thing: object, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(thing, name) for name in names}


def _lines(report: Report) -> Iterator[dict[str, Any]]:
    """A row a job. Its partners are named as their rows are; None stands for who has none here."""
    keys = {job.raw_id: job.key for job in report.jobs}
    for job in report.jobs:
        values = {"job_id": job.key} | {name: getattr(job, field) for name, field in _OF_A_LINE.items()}
        partners = [keys.get(partner) for partner in job.neighbours]
        yield values | {"partners": partners, "elapsed_s": job.elapsed_s or 0}


def to_json(report: Report) -> dict[str, Any]:
    """The document that docs/report.md describes; null is unknown."""
    return {
        "format": "gpushare-report",
        "version": JSON_VERSION,
        "start_s": report.start_s,
        "end_s": report.end_s,
        "summary": {
            **_some(report, _FIGURES),
            **{name: value if report.complete else None for name, value in _some(report, _IF_COMPLETE).items()},
            "jobs": len(report.jobs),
            "past_promise": len(report.past_promise) if report.complete else None,
            "spans": len(report.spans),
            "isd_pct": asdict(report.isd_pct),
            "expected_isd_pct": asdict(report.expected_isd_pct),
            "forecast_error_s": asdict(report.forecast_error_s),
            "cpus": asdict(report.cpus),
        },
        "waits_s": {role: asdict(wait) for role, wait in report.waits_s.items()},
        "pairs": [asdict(pair) for pair in report.pairs],
        "users": [
            asdict(owner) | ({} if report.complete else {"shared": None, "gpu_hours_saved": None})
            for owner in report.owners
        ],
        "jobs": list(_lines(report)),
    }


def to_csv(report: Report) -> str:
    """One line a job; several partners are separated by blanks, the unknown is empty."""
    out = io.StringIO()
    writer = csv.DictWriter(out, CSV_COLUMNS, lineterminator="\n")
    writer.writeheader()
    for line in _lines(report):
        writer.writerow(line | {"partners": " ".join(partner or "---" for partner in line["partners"])})
    return out.getvalue()


SACCT_COLUMNS = (
    "JobID", "JobIDRaw", "Cluster", "UID", "User", "Account", "Partition", "State", "Submit", "Eligible", "Start",
    "End", "ElapsedRaw", "NCPUS", "NNodes", "NodeList", "AllocTRES",
)  # fmt: skip


def to_sacct(report: Report) -> str:
    """Rows as ``sacct --parsable2`` prints them, but for GPUs: as many as each job that has started had on average."""
    rows = (job.accounted for job in report.jobs if job.accounted and job.elapsed_s is not None)
    lines = [SACCT_COLUMNS, *(_sacct_cells(row, report.gpus[row.raw_id]) for row in rows)]
    return "".join("|".join(cells) + "\n" for cells in lines)


def _sacct_cells(row: AccountedJob, gpus: float | None) -> tuple[str, ...]:
    tres = row.tres
    if gpus is not None:
        kept = [part for part in tres.split(",") if part and not re.match("gres/(gpu|shard)", part)]
        tres = ",".join(sorted([*kept, f"gres/gpu={gpus:.4g}"]))
    times = (row.submit_s, row.eligible_s, row.start_s, row.end_s)
    return (
        row.key, str(row.raw_id), row.slurm_cluster, str(row.uid), row.user, row.account, row.partition, row.state,
        *(moment(time_s, "%Y-%m-%dT%H:%M:%S") if time_s else "Unknown" for time_s in times),
        str(row.elapsed_s), str(row.cpus), str(len(row.nodes)), ",".join(row.nodes), tres,
    )  # fmt: skip


def job_json(job: JobView, story: Sequence[str], note: str) -> dict[str, Any]:
    """``gpushare job --json``; `note` says why something is null."""
    why = job.why
    return {
        "job_id": job.key,
        **_some(job, _OF_A_JOB),
        "role": job.role if job.stays else None,
        "waited_s": job.wait_s,
        "nodes": list(job.nodes),
        "takes_part": job.tag is not None,
        "start_s": None if job.elapsed_s is None else job.start_s,
        "cpu_advice": asdict(job.cpu_advice) if job.cpu_advice else None,
        "telemetry": asdict(job.run) if job.run else None,
        "stays": [asdict(stay) for stay in job.stays],
        "now": asdict(job.live) if job.live else None,
        "reason": None if why is None else {
            "code": why.code.value, "need": why.need, "have": why.have, "wait_s": why.wait_s,
            "why": words(why)[0], "what_would_change_it": words(why)[1],
        },
        "story": list(story),
        "note": note,
    }  # fmt: skip


def _cost(job: JobView) -> Mapping[str, float | None]:
    return {"predicted_isd_pct": job.expected_isd_pct, "measured_isd_pct": job.measured_isd_pct}


def queued_json(job: JobView) -> dict[str, Any]:
    """``gpushare jobs --json``."""
    why = job.told
    return {
        "job_id": job.key,
        **_some(job, _OF_A_QUEUED_JOB),
        "cost": _cost(job),
        "time_s": None if job.elapsed_s is None else int(job.elapsed_s),
        "why": why.reason if why else None,
        "wait_s": why.wait_s if why else None,
    }


def gpu_json(line: GpuLine) -> dict[str, Any]:
    """``gpushare status --json``."""
    return _some(line, _OF_A_GPU) | {
        "occupants": [
            {"job_id": job.key, **_some(job, ("cluster", "whole", "coming")), "cost": _cost(job),
             "activity": _some(job, ("gpu_util_pct", "mem_used_pct"))}
            for job in line.occupants
        ]
    }  # fmt: skip
