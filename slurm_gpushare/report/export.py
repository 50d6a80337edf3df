"""The report for programs: one versioned JSON document, or CSV with one line a job."""

from __future__ import annotations

import csv
import io
from dataclasses import asdict
from typing import Any

from slurm_gpushare.report.job_lines import JobLine
from slurm_gpushare.report.summary import Report

JSON_VERSION = 1

_OF_SLURM = ("user", "account", "partition", "state", "submit_s", "start_s", "end_s", "elapsed_s")
_OF_SHARING = (
    "wait_s", "cluster", "role", "partners", "shared_s", "isd_pct", "predicted_isd_pct", "promised_pct",
)  # fmt: skip
CSV_COLUMNS = ("job_id", *_OF_SLURM, *_OF_SHARING)


def _job(line: JobLine) -> dict[str, Any]:
    return {
        "job_id": line.job.key,
        **{name: getattr(line.job, name) for name in _OF_SLURM},
        **{name: getattr(line, name) for name in _OF_SHARING},
        "partners": [partner or None for partner in line.partners],  # None: the site hides jobs from each other
    }


_FIGURES = (
    "profiled", "complete", "measured_spans", "ps_pct", "prediction_error_points", "predictions", "wait_avoided_h",
    "waits_avoided", "gpu_busy_pct", "gpu_busy_shared_pct", "energy_kwh", "measured_jobs", "given_back_s",
    "given_back_jobs", "paused_s",
)  # fmt: skip
_IF_COMPLETE = ("shared", "busy_gpu_h", "solo_gpu_h", "saved_gpu_h", "pauses")
"""Unknown as long as it is not known who shared."""


def to_json(report: Report) -> dict[str, Any]:
    """The document that docs/report.md describes; null is unknown."""
    return {
        "format": "gpushare-report",
        "version": JSON_VERSION,
        "start_s": report.start_s,
        "end_s": report.end_s,
        "summary": {
            **{name: getattr(report, name) for name in _FIGURES},
            **{name: getattr(report, name) if report.complete else None for name in _IF_COMPLETE},
            "jobs": len(report.jobs),
            "past_promise": len(report.past_promise) if report.complete else None,
            "spans": len(report.spans),
            "isd_pct": asdict(report.isd_pct),
            "expected_isd_pct": asdict(report.expected_isd_pct),
            "cpus": asdict(report.cpus),
        },
        "waits_s": {role: asdict(wait) for role, wait in report.waits_s.items()},
        "pairs": [asdict(pair) for pair in report.pairs],
        "users": [
            asdict(owner) | ({} if report.complete else {"shared": None, "gpu_hours_saved": None})
            for owner in report.owners
        ],
        "jobs": [_job(line) for line in report.jobs],
    }


def to_csv(report: Report) -> str:
    """One line a job; several partners are separated by blanks, the unknown is empty."""
    out = io.StringIO()
    writer = csv.DictWriter(out, CSV_COLUMNS, lineterminator="\n")
    writer.writeheader()
    for line in report.jobs:
        writer.writerow(_job(line) | {"partners": " ".join(str(partner or "---") for partner in line.partners)})
    return out.getvalue()
