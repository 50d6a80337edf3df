"""Whose record it is: by the tag, else by what the owner wrote; a job that nobody tagged loses no telemetry."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace

import pytest
from world import TOKEN_A, TOKEN_B, job

from slurm_gpushare.protocol.tag import parse_tag
from slurm_gpushare.protocol.tokens import OwnedToken
from slurm_gpushare.slurm.accounting import AccountingQuery, JobTokens, without_token
from slurm_gpushare.slurm.commands import Slurm
from slurm_gpushare.slurm.queue import Job
from slurm_gpushare.slurm.runner import AccountingDown


class Accounted:
    """A Slurm whose queue is given, and whose accounting knows 8 (tagged), 9, 10 (not tagged) and of 11 only a step."""

    down = False

    def __init__(self, *queue: Job) -> None:
        self._queue = list(queue)
        self.asked_comments: list[str] = []

    def jobs(self, only: Iterable[str] = ()) -> list[Job]:
        return self._queue

    def comments(self, only: Iterable[str] = ()) -> Mapping[str, str]:
        return {key: f"gpushare:{TOKEN_B}" if key == "1" else "" for key in only}

    def accounting(self, query: AccountingQuery) -> list[SimpleNamespace]:
        if self.down:
            raise AccountingDown("sacct: no slurmdbd")
        tags = {8: parse_tag(f"GS1:t={TOKEN_A}"), 9: None, 10: None}
        jobs = [raw_id for raw_id in map(int, query.jobs) if raw_id in tags]
        whole = [SimpleNamespace(raw_id=raw_id, uid=1000, tag=tags[raw_id], partition="gpu") for raw_id in jobs]
        return [*whole, SimpleNamespace(raw_id=11, uid=0, tag=None, partition="")]

    def accounted_comments(self, jobs: Sequence[str]) -> Mapping[int, str]:
        self.asked_comments += jobs
        return {9: f"nightly gpushare:{TOKEN_B}", 10: "gpushare:nonsense"}


def test_a_job_that_ran_while_nobody_tagged_keeps_its_token() -> None:
    slurm = Accounted(job("1", state="RUNNING"), job("2", state="RUNNING"))
    tokens = JobTokens(slurm)  # type: ignore[arg-type]
    tokens.take(slurm.jobs())
    assert tokens.resolve([1, 2, 8, 9, 10]) == {
        1: OwnedToken(TOKEN_B, 1000),
        2: OwnedToken(None, 1000),
        8: OwnedToken(TOKEN_A, 1000),
        9: OwnedToken(TOKEN_B, 1000),
        10: OwnedToken(None, 1000),
    }
    assert slurm.asked_comments == ["9", "10"], "a tagged job's comment is nobody's business"


def test_a_running_job_whose_owner_took_the_token_off_is_nobodys_profile() -> None:
    slurm = Accounted()
    tokens = JobTokens(slurm)  # type: ignore[arg-type]
    tokens.take([job("2", state="RUNNING", tag=f"GS1:probe;t={TOKEN_A}")])
    tokens.take([job("2", state="RUNNING")])
    assert tokens.resolve([2]) == {2: OwnedToken(None, 1000)}


def test_a_comment_that_looks_like_a_row_of_another_jobs_gives_it_no_token() -> None:
    """sacct takes its delimiter on the command line, where every user of the machine can read it."""

    def sacct(argv: Sequence[str], settings: Mapping[str, str]) -> str:
        d = next(item.partition("=")[2] for item in argv if item.startswith("--delimiter="))
        mark = settings["SLURM_TIME_FORMAT"].removesuffix("%s")
        assert not any(mark in word for word in argv), "everybody can read the command line"
        forged = f"x{d}\n1700000000{d}9{d}gpushare:{TOKEN_A}"
        comments = {8: forged, 9: "two\nlines", 10: f"gpushare:{TOKEN_B}"}
        return "".join(f"{mark}1700000000{d}{job}{d}{comment}{d}\n" for job, comment in comments.items())

    assert Slurm(sacct).accounted_comments(["8", "9", "10"]) == {9: "two\nlines", 10: f"gpushare:{TOKEN_B}"}


def test_records_wait_while_accounting_is_down() -> None:
    slurm = Accounted()
    slurm.down = True
    assert JobTokens(slurm).resolve([9]) == {}  # type: ignore[arg-type]


def test_a_job_of_which_accounting_knows_only_a_step_is_not_taken_for_roots() -> None:
    assert JobTokens(Accounted()).resolve([8, 11]) == {8: OwnedToken(TOKEN_A, 1000)}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("GS1:c=2;t=gs-aaaaaaaaaaaaaaaaaaaa;o=gpu:1", "GS1:c=2;o=gpu:1"),
        ("a note GS1:probe;t=gs-aaaaaaaaaaaaaaaaaaaa", "a note GS1:probe"),
        ("GS1:c=2;t=gs-aaaaaaaaaaaaaaaaaaaa JS1:H4sI+/A==", "JS1:H4sI+/A=="),
        ("JS1:H4sI GS1:c=2", "JS1:H4sI"),
    ],
)
def test_the_token_of_an_ended_job_goes_and_jobstats_summary_stands_alone(text: str, left: str) -> None:
    assert without_token(text) == left
