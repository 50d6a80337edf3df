"""Figures for Prometheus, in the text format that node_exporter's textfile collector reads."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm_gpushare.report.status import GpuLine, TaggedJob
from slurm_gpushare.store.decisions import COUNTED
from slurm_gpushare.store.store import Store
from slurm_gpushare.telemetry.spool import INCOMING, SUFFIX

_RECORDS = ("final", "interim", "duplicate", "rejected", "ignored")


@dataclass(frozen=True, slots=True)
class SpoolState:
    """Files that wait, and files that were refused."""

    waiting: int
    oldest_s: float
    rejected: int


def spool_state(spool_dir: Path) -> SpoolState | None:
    """None where this user may not look."""
    try:
        ages = [time.time() - e.stat().st_mtime for e in os.scandir(spool_dir / INCOMING) if e.name.endswith(SUFFIX)]
        rejected = spool_dir / "rejected"
        refused = sum(entry.name.endswith(SUFFIX) for entry in os.scandir(rejected)) if rejected.is_dir() else 0
    except OSError:
        return None
    return SpoolState(len(ages), max(ages, default=0.0), refused)


def _family(name: str, kind: str, text: str, samples: Mapping[str, float]) -> Iterator[str]:
    if samples:
        yield f"# HELP gpushare_{name} {text}"
        yield f"# TYPE gpushare_{name} {kind}"
        yield from (f"gpushare_{name}{labels} {value:.10g}" for labels, value in samples.items())


def _labelled(label: str, values: Mapping[str, float]) -> dict[str, float]:
    return {f'{{{label}="{name}"}}': value for name, value in sorted(values.items())}


def metrics(gpus: Sequence[GpuLine], jobs: Sequence[TaggedJob], store: Store | None, spool: SpoolState | None) -> str:
    """All families that can be told; what is unknown is absent, never 0."""
    states = Counter(line.state for line in gpus)
    lines = [
        *_family(
            "gpus",
            "gauge",
            "GPUs of the shared partitions by state.",
            _labelled("state", {state: states[state] for state in ("shared", "busy", "idle", "down")}),
        ),
        *_family("pairs", "gauge", "Pairs of jobs that share a GPU now.", {"": sum(line.shared for line in gpus)}),
        *_family("jobs", "gauge", "Tagged jobs by state.", _labelled("state", Counter(j.state.lower() for j in jobs))),
    ]
    if store:
        lines += _stored(store)
    if spool:
        lines += _family("spool_waiting", "gauge", "Records that wait to be taken in.", {"": spool.waiting})
        lines += _family("spool_oldest_seconds", "gauge", "Age of the oldest waiting record.", {"": spool.oldest_s})
        lines += _family("spool_rejected", "gauge", "Files in the rejected directory.", {"": spool.rejected})
    return "\n".join(lines) + "\n"


def _stored(store: Store) -> Iterator[str]:
    counters = store.counters.all()
    decisions = {k.removeprefix(COUNTED): float(v) for k, v in counters.items() if k.startswith(COUNTED)}
    records = {name: float(counters[name]) for name in _RECORDS if name in counters}
    yield from _family("decisions_total", "counter", "Decisions of the helper by kind.", _labelled("kind", decisions))
    yield from _family("records_total", "counter", "Telemetry records by outcome.", _labelled("outcome", records))
    beat_s = store.live.heartbeat_s()
    if beat_s is not None:
        yield from _family("helper_heartbeat_seconds", "gauge", "When the helper was last alive.", {"": beat_s})
    for name, unit, factor in (("ticks", "ticks", 1.0), ("tick_ms", "tick_seconds", 0.001)):
        if name in counters:
            text = "Ticks of the helper." if name == "ticks" else "Time spent in ticks."
            yield from _family(f"helper_{unit}_total", "counter", text, {"": counters[name] * factor})
