"""The optional backend on objects recorded from pyslurm 25.11: it says what squeue said of the same jobs."""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Iterable
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
from recorded_pyslurm import Recorded, RecordedJob, recorded_jobs

from slurm_gpushare.protocol.errors import SlurmError
from slurm_gpushare.protocol.release import Release
from slurm_gpushare.slurm.commands import connect
from slurm_gpushare.slurm.pyslurm_backend import (
    ASKED_ANEW_S,
    MOST_JOBS,
    PyslurmSlurm,
    base_job,
    jobs_of,
    listed,
    unsure,
    why_not,
)
from slurm_gpushare.slurm.queue import Job
from slurm_gpushare.slurm.runner import ControllerDown
from slurm_gpushare.slurm.values import expand_tasks

JOBS = list(recorded_jobs())
IDS = [f"{job.record.id}-{job.label}" for job in JOBS]
REQUEST = ("per_job", "per_socket", "per_gpu_extras")
"""What pyslurm does not know; where it matters squeue is asked."""


class RpcError(Exception):
    """Stands for pyslurm.RPCError."""


def as_row(job: Job) -> dict[str, Any]:
    """A job in the recording's form: lists for tuples, a tag as its text."""
    row = {field.name: getattr(job, field.name) for field in fields(job)}
    row = {name: list(value) if isinstance(value, tuple) else value for name, value in row.items()}
    return row | {"tag": str(job.tag) if job.tag else None}


def expected(row: dict[str, Any]) -> dict[str, Any]:
    """squeue's row. Of several dependencies pyslurm only keeps the order within a kind."""
    kept = {name: value for name, value in row.items() if name != "comment"}  # not asked for
    return kept | {"tag": None if row["tag"] is None else row["admin_comment"]}


def unordered(row: dict[str, Any]) -> dict[str, Any]:
    return row | {"dependency": sorted(row["dependency"].replace("?", ",").split(","))}


def comparable(row: dict[str, Any], *, request: bool = True) -> dict[str, Any]:
    return {name: value for name, value in unordered(row).items() if request or name not in REQUEST}


@pytest.mark.parametrize("job", JOBS, ids=IDS)
def test_a_record_says_what_squeue_said(job: RecordedJob) -> None:
    found = {each.key: as_row(each) for each in jobs_of(base_job(job.record), job.record.array_tasks_waiting or "")}
    for row in job.rows:
        known = comparable(found[row["key"]], request=not unsure(job.record))
        assert known == comparable(expected(row), request=not unsure(job.record))


@pytest.mark.parametrize("job", JOBS, ids=IDS)
def test_a_record_is_listed_where_squeue_lists_it(job: RecordedJob) -> None:
    assert listed(job.record) == job.listed


def test_the_last_task_of_a_step_array_is_there_though_squeue_leaves_it_out() -> None:
    job = next(job for job in JOBS if job.label == "pend_array_step")
    assert {each.key for each in jobs_of(base_job(job.record), job.record.array_tasks_waiting or "")} - {
        row["key"] for row in job.rows
    } == {"40_20"}


@pytest.mark.parametrize("label", ["pend_gpus", "pend_gpus_typed", "pend_gpus_per_socket", "pend_cpus_per_gpu"])
def test_what_pyslurm_cannot_say_is_asked_of_squeue(label: str) -> None:
    assert unsure(next(job for job in JOBS if job.label == label).record)


class Recording(PyslurmSlurm):
    """The backend with the recorded queue in place of the library, and the recorded rows in place of squeue."""

    def __init__(self, jobs: Iterable[RecordedJob]) -> None:
        self.recorded = list(jobs)
        self.asked: list[list[str]] = []
        self.loads = 0
        library = SimpleNamespace(RPCError=RpcError, Jobs=SimpleNamespace(load=self.load))
        super().__init__(library=library)

    def load(self) -> dict[int, Any]:
        self.loads += 1
        return {job.record.id: job.record for job in self.recorded}

    def squeue(self, only: list[str]) -> list[Job]:
        self.asked.append(only)
        rows = [row for job in self.recorded for row in job.rows if not only or str(row["raw_id"]) in only]
        names = [field.name for field in fields(Job)]
        return [Job(**{name: row[name] for name in names if name != "tag"}, tag=None) for row in rows]


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> None:
    def jobs(self: Recording, only: Iterable[str] = ()) -> list[Job]:
        return self.squeue(list(only))

    monkeypatch.setattr("slurm_gpushare.slurm.commands.Slurm.jobs", jobs)


@pytest.mark.usefixtures("commands")
def test_the_whole_queue_is_the_commands_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slurm_gpushare.slurm.pyslurm_backend.MOST_JOBS", 10 * MOST_JOBS)
    backend = Recording(JOBS)
    found = {job.key: comparable(as_row(job)) for job in backend.jobs()}
    rows = {row["key"]: comparable(expected(row)) for job in JOBS if job.listed for row in job.rows}
    # --mem-per-gpu of a job that takes no part in sharing is nobody's concern, and not worth a question.
    strangers = {"pend_mem_per_gpu", "run_mem_per_gpu", "pend_no_default_mem_per_gpu"}
    for job in JOBS:
        if job.label in strangers:
            rows[job.rows[0]["key"]]["per_gpu_extras"] = found[job.rows[0]["key"]]["per_gpu_extras"]
    assert {key: found[key] for key in rows} == rows
    assert found.keys() - rows.keys() == {"40_20"}
    assert len(backend.asked) == 1, "one question for all that is unsure"
    backend.jobs()
    assert len(backend.asked) == 1, "a request is asked for once"


def changed(job: RecordedJob, **attributes: Any) -> RecordedJob:
    return RecordedJob(job.label, job.listed, Recorded(**{**job.record.__dict__, **attributes}), job.rows)


@pytest.mark.usefixtures("commands")
def test_squeue_is_asked_again_when_a_waiting_jobs_request_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    job = next(job for job in JOBS if job.label == "pend_gpus")
    backend = Recording([job])
    assert [each.per_job for each in backend.jobs()] == ["gres/gpu:2"]
    gres = {"gpu": SimpleNamespace(count=1)}
    tres = SimpleNamespace(**{**job.record.requested_tres.__dict__, "gres": gres})
    now = changed(job, requested_tres=tres)
    backend.recorded = [RecordedJob(now.label, True, now.record, [job.rows[0] | {"per_job": "gres/gpu:1"}])]
    assert [each.per_job for each in backend.jobs()] == ["gres/gpu:1"]
    backend.jobs()
    assert len(backend.asked) == 2
    later = backend._asked_s + ASKED_ANEW_S + 1
    monkeypatch.setattr("time.monotonic", lambda: later)
    backend.jobs()
    assert len(backend.asked) == 3, "a type may have changed, which no record shows"


@pytest.mark.usefixtures("commands")
def test_long_queues_are_left_to_squeue(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Recording(JOBS)
    for _ in range(3):
        backend.jobs()
    assert backend.loads == 1, "it is longer than that"
    monkeypatch.setattr("slurm_gpushare.slurm.pyslurm_backend.MOST_JOBS", 10 * MOST_JOBS)
    backend = Recording(JOBS)
    for _ in range(3):
        backend.jobs()
    assert backend.loads == 3


@pytest.mark.usefixtures("commands")
def test_a_bad_record_costs_that_record_a_question_and_a_line(caplog: pytest.LogCaptureFixture) -> None:
    plain = next(job for job in JOBS if job.label == "pend_gres_gpu")
    broken = Recorded(**{**plain.record.__dict__, "partition": 7})
    backend = Recording([RecordedJob("broken", True, broken, plain.rows), JOBS[4]])
    with caplog.at_level(logging.WARNING):
        keys = {job.key for job in backend.jobs()}
    assert keys == {plain.rows[0]["key"], JOBS[4].rows[0]["key"]}
    assert len(caplog.records) == 1


@pytest.mark.usefixtures("commands")
def test_a_comment_that_is_not_utf8_stops_nobody() -> None:
    job = next(job for job in JOBS if job.label == "pend_comment_bytes")
    (found,) = Recording([job]).jobs()
    assert found.key == job.rows[0]["key"]


def test_a_controller_that_does_not_answer_is_said_so() -> None:
    backend = Recording([])

    def down() -> None:
        raise RpcError("Unable to contact slurm controller")

    backend._pyslurm.Jobs.load = down
    with pytest.raises(ControllerDown, match="Unable to contact"):
        backend.jobs()


@pytest.mark.parametrize(
    ("text", "tasks"), [("0-20:4", (0, 4, 8, 12, 16, 20)), ("1,4,9-10%2", (1, 4, 9, 10)), ("[3]", (3,))]
)
def test_array_tasks(text: str, tasks: tuple[int, ...]) -> None:
    assert expand_tasks(text) == tasks


def test_a_list_that_was_cut_is_not_taken_for_whole() -> None:
    with pytest.raises(ValueError, match="no array tasks"):
        expand_tasks("1,2,3,...")


@pytest.mark.parametrize(
    ("version", "release", "tres", "reason"),
    [
        (None, Release(25, 11, 7), "gres/gpu", "not installed"),
        ("25.11.2", Release(24, 11, 5), "gres/gpu", "and this is 24.11.5"),
        ("25.5.0", Release(25, 5, 1), "gres/gpu", "only 25.11 has been tried"),
        ("unknown", Release(25, 11, 7), "gres/gpu", "does not say"),
        # Without slurmdbd: a waiting --gpus, --gpus-per-socket, --tres-per-task is nowhere in the record then.
        ("25.11.2", Release(25, 11, 0), "cpu,mem,energy,node,billing,fs/disk,vmem,pages", "which waiting jobs ask for"),
        ("25.11.2", Release(25, 11, 0), "cpu,mem,gres/gpu,gres/shard", None),
    ],
)
def test_it_is_used_only_where_it_was_tried(
    version: str | None, release: Release, tres: str, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def installed(name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr("importlib.metadata.version", installed)
    answer = why_not(release, lambda: {"AccountingStorageTRES": tres})
    assert answer is None if reason is None else reason in (answer or "")


def test_asking_for_it_where_it_does_not_fit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slurm_gpushare.slurm.commands.Slurm.release", Release(24, 11, 5))
    with pytest.raises(SlurmError, match="pyslurm cannot be used"):
        connect("pyslurm")
    assert connect("auto").name == "commands"
