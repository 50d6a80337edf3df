"""The report for programs: one versioned JSON document, or CSV with one line a job."""

from __future__ import annotations

import csv
import io
from dataclasses import asdict
from typing import Any

from slurm_gpushare.report.summary import JobLine, Report

JSON_VERSION = 1

CSV_COLUMNS = (
    "job_id", "user", "account", "partition", "state", "submit_s", "start_s", "end_s", "elapsed_s", "wait_s", "cluster",
    "role", "partners", "shared_s", "isd_pct", "predicted_isd_pct", "promised_pct",
)  # fmt: skip


def _job(line: JobLine) -> dict[str, Any]:
    job = line.job
    return {
        "job_id": job.key,
        "user": job.user,
        "account": job.account,
        "partition": job.partition,
        "state": job.state,
        "submit_s": job.submit_s,
        "start_s": job.start_s,
        "end_s": job.end_s,
        "elapsed_s": job.elapsed_s,
        "wait_s": line.wait_s,
        "cluster": line.cluster,
        "role": line.role,
        "partners": list(line.partners),
        "shared_s": line.shared_s,
        "isd_pct": line.isd_pct,
        "predicted_isd_pct": line.predicted_isd_pct,
        "promised_pct": line.promised_pct,
    }


def to_json(report: Report) -> dict[str, Any]:
    """The document that docs/report.md describes; null is unknown."""
    return {
        "format": "gpushare-report",
        "version": JSON_VERSION,
        "start_s": report.start_s,
        "end_s": report.end_s,
        "summary": {
            "jobs": len(report.jobs),
            "profiled": report.profiled,
            "shared": report.shared,
            "past_promise": len(report.past_promise),
            "spans": len(report.spans),
            "measured_spans": report.measured_spans,
            "busy_gpu_h": report.busy_gpu_h,
            "solo_gpu_h": report.solo_gpu_h,
            "saved_gpu_h": report.saved_gpu_h,
            "ps_pct": report.ps_pct,
            "isd_pct": asdict(report.isd_pct),
            "prediction_error_points": report.prediction_error_points,
            "wait_avoided_h": report.wait_avoided_h,
        },
        "waits_s": {role: asdict(wait) for role, wait in report.waits_s.items()},
        "pairs": [asdict(pair) for pair in report.pairs],
        "users": [asdict(owner) for owner in report.owners],
        "jobs": [_job(line) for line in report.jobs],
    }


def to_csv(report: Report) -> str:
    """One line a job; several partners are separated by blanks, the unknown is empty."""
    out = io.StringIO()
    writer = csv.DictWriter(out, CSV_COLUMNS, lineterminator="\n")
    writer.writeheader()
    for line in report.jobs:
        writer.writerow(_job(line) | {"partners": " ".join(map(str, line.partners))})
    return out.getvalue()
