"""What is reported of jobs, against what the jobs say themselves: slow-down, saving, shared time, runs, energy."""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from emulated import Asker
from gpushare_lab.testbed.layout import Shape
from gpushare_lab.testbed.processes import wait_until
from gpushare_lab.testbed.testbed import Testbed
from truth_stream import Stream, Truth, busy_s

LONG_S = 60.0
"""Who shared for so long is measured."""


class Compared:
    """One stream of jobs, and what ``gpushare report``, ``job`` and ``token list`` make of it."""

    def __init__(self, stream: Stream, asker: Asker) -> None:
        self.stream, self._begun_s = stream, time.time()
        with stream.helped():
            stream.run(asker)
            wait_until(self._all_is_in, 60)
        self.truth, self.report = stream.runs(), self._report()
        self.jobs: Mapping[str, Mapping[str, Any]] = {job["job_id"]: job for job in self.report["jobs"]}
        explained = json.loads(stream.gpushare("job", "--json", *self.truth))
        self.energy_wh = {job["job_id"]: 1000 * job["energy_kwh"] for job in explained if job["energy_kwh"] is not None}
        self.counted = {line["token"]: line["runs"] for line in json.loads(stream.gpushare("token", "list", "--json"))}

    def _report(self) -> dict[str, Any]:
        since = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(self._begun_s - 1))
        found: dict[str, Any] = json.loads(self.stream.gpushare("report", "--json", "-S", since))
        return found

    def _all_is_in(self) -> bool:
        """Whether the last records are: the epilog sends them, and the helper takes them in at its next look."""
        shared = [job for job in self._report()["jobs"] if job["shared_s"] >= LONG_S]
        return all(job["isd_pct"] is not None for job in shared)

    @property
    def every_run(self) -> list[Truth]:
        return [run for runs in self.truth.values() for run in runs]

    def shared_s(self, key: str) -> float:
        """How long the job's last run had a neighbour, by the jobs' own times."""
        own = self.truth[key][-1]
        return sum(own.beside_s(other) for other in self.every_run)

    @property
    def errors(self) -> dict[str, float]:
        """How far from the truth each measured slow-down is, in points."""
        seen = {key: job["isd_pct"] for key, job in self.jobs.items() if key in self.truth}
        return {key: pct - self.truth[key][-1].isd_pct for key, pct in seen.items() if pct is not None}

    @property
    def completed(self) -> dict[str, int]:
        """Jobs of each token that came to their end."""
        return Counter(self.stream.token_of[key] for key, runs in self.truth.items() if runs[-1].done)

    @property
    def long(self) -> list[str]:
        return [key for key in self.truth if self.shared_s(key) >= LONG_S]

    def rows(self) -> list[tuple[str, float, float]]:
        """What, true, reported."""
        summary, errors = self.report["summary"], self.errors
        runs, shared = self.every_run, [key for key in self.truth if self.shared_s(key) > 0]
        drawn_wh = [self.stream.energy_wh(self.truth[key][-1], runs) for key in self.energy_wh]
        told_s = sum(job["shared_s"] for job in self.jobs.values())
        of_users = [token for token in self.completed if token]
        return [
            ("jobs that ran", len(self.truth), sum(job["start_s"] is not None for job in self.jobs.values())),
            ("jobs that shared", len(shared), summary["shared"]),
            (f"of these for {LONG_S:.0f} s or more, and measured", len(self.long), len(errors.keys() & {*self.long})),
            (
                "mean slow-down of those measured, %",
                fmean([self.truth[key][-1].isd_pct for key in errors] or [0.0]),
                summary["isd_pct"]["mean"] or 0.0,
            ),
            ("worst error of one, points", 0.0, max(errors.values(), key=abs, default=0.0)),
            ("GPU time saved, min", (sum(run.work_s for run in runs) - busy_s(runs)) / 60, summary["saved_gpu_h"] * 60),
            ("time shared, min", sum(map(self.shared_s, shared)) / 60, told_s / 60),
            ("runs in token list", sum(self.completed[token] for token in of_users), sum(self.counted.values())),
            ("energy of those measured, Wh", sum(drawn_wh), sum(self.energy_wh.values())),
        ]  # fmt: skip

    def table(self) -> str:
        lines = [f"{what:<45}{true:10.1f}{told:10.1f}" for what, true, told in self.rows()]
        return "\n".join([f"{'':45}{'true':>10}{'reported':>10}", *lines])


def close(told: float, true: float, share: float) -> bool:
    return told == pytest.approx(true, rel=share, abs=1.0)


@pytest.mark.full
def test_figures_of_a_dozen_jobs_are_what_the_jobs_say(testbed: Testbed) -> None:
    found = Compared(Stream(testbed, 14, (15.0, 45.0), 2.0), Asker(testbed.layout.lib))
    rows = {what: (true, told) for what, true, told in found.rows()}
    assert rows["jobs that ran"][0] == rows["jobs that ran"][1], found.table()
    assert found.counted == {token: found.completed.get(token, 0) for token in found.counted}, found.table()
    assert all(abs(error) < 8.0 for error in found.errors.values()), found.errors
    for what in ("GPU time saved, min", "time shared, min", "energy of those measured, Wh"):
        assert close(rows[what][1], rows[what][0], 0.15), found.table()


@pytest.mark.full
@pytest.mark.timeout(5400)
def test_figures_of_two_hundred_jobs_are_what_the_jobs_say(short_tmp: Path, slurm_suite: str | None) -> None:
    bed = Testbed(short_tmp / "truth").up(Shape(nodes=2, gpus=4, shards=2), suite=slurm_suite)
    try:
        found = Compared(Stream(bed, 200, (40.0, 140.0), 6.0), Asker(bed.layout.lib))
    finally:
        bed.down(purge=True)
        shutil.rmtree(short_tmp / "truth", ignore_errors=True)
    print(f"\n{found.table()}")
    rows = {what: (true, told) for what, true, told in found.rows()}
    errors = found.errors
    assert len(errors) >= 40, "so few say nothing"
    assert abs(fmean(errors.values())) < 0.5, errors
    assert max(map(abs, errors.values())) <= 5.0, errors
    assert len(errors.keys() & {*found.long}) >= 0.9 * len(found.long), found.table()
    assert found.counted == {token: found.completed.get(token, 0) for token in found.counted}
    for what in ("GPU time saved, min", "time shared, min", "energy of those measured, Wh"):
        assert close(rows[what][1], rows[what][0], 0.05), found.table()
