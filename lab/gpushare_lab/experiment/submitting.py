"""Submitting jobs to a testbed and waiting for what becomes of them; for tests and the demo."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpushare_lab.testbed.testbed import Testbed
from slurm_gpushare.protocol.errors import GpushareError

ENDED = frozenset(
    {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"}
)
_FIELD = re.compile(r"(?:^|\s)([A-Za-z][\w:/]*)=")


def submit(
    testbed: Testbed,
    script: str,
    *options: str,
    user: str | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> int:
    """sbatch a script's text; the job's id."""
    text = script if script.startswith("#!") else f"#!/bin/sh\n{script}\n"
    answer = testbed.run(["sbatch", "--parsable", *options], user=user, input=text, env=env, cwd=cwd)
    return int(answer.stdout.strip().split(";")[0])


def show(testbed: Testbed, job_id: int | str) -> dict[str, str]:
    """``scontrol show job -d`` as a mapping."""
    line = testbed.run(["scontrol", "show", "job", "-d", "-o", str(job_id)]).stdout.strip()
    marks = list(_FIELD.finditer(line))
    ends = [mark.start() for mark in marks[1:]] + [len(line)]
    return {mark.group(1): line[mark.end() : end].strip() for mark, end in zip(marks, ends, strict=True)}


def wait_for(testbed: Testbed, job_ids: Sequence[int] | int, states: Sequence[str] = (), timeout_s: float = 60) -> None:
    """Until each job is in one of `states` (default: it ended); a job that ended otherwise is an error."""
    wanted = frozenset(states) or ENDED
    waiting = {job_ids} if isinstance(job_ids, int) else set(job_ids)
    end = time.monotonic() + timeout_s
    while waiting:
        for job_id in sorted(waiting):
            job = show(testbed, job_id)
            state = job["JobState"]
            if state in wanted:
                waiting.remove(job_id)
            elif state in ENDED:
                raise GpushareError(f"job {job_id}: {state} ({job.get('Reason')}) while waiting for {sorted(wanted)}")
            elif time.monotonic() > end:
                raise GpushareError(f"job {job_id}: still {state} ({job.get('Reason')}) after {timeout_s:g} s")
        if waiting:
            time.sleep(0.1)
