"""What is made of Slurm's commands when they fail."""

from __future__ import annotations

import pytest

from slurm_gpushare.protocol.errors import SlurmError
from slurm_gpushare.slurm import commands, runner
from slurm_gpushare.slurm.runner import AccountingDown, ControllerDown, JobMovedOn, SlurmMissing, UpdateRefused


@pytest.mark.parametrize(
    ("command", "words", "kind"),
    [
        ("squeue", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)", ControllerDown),
        ("sinfo", "slurm_load_partitions: Socket timed out on send/recv operation", ControllerDown),
        ("squeue", "squeue: fatal: Could not establish a configuration source", SlurmMissing),
        ("sacct", "sacct: error: Slurm accounting storage is disabled", AccountingDown),
        ("sacct", "sacct: error: Problem talking to the database: Connection refused", AccountingDown),
        ("scontrol", "Job is no longer pending execution for job 3", JobMovedOn),
        ("scontrol", "Invalid job id specified for job 99", JobMovedOn),
        ("scontrol", "Invalid node name specified for job 3", JobMovedOn),
        ("scontrol", "Resource temporarily unavailable for job 3", JobMovedOn),
        ("scontrol", "Invalid generic resource (gres) specification for job 5", UpdateRefused),
        ("squeue", "", SlurmError),
    ],
)
def test_failures_are_told_apart_by_what_can_be_done(command: str, words: str, kind: type[SlurmError]) -> None:
    assert type(runner.failure(command, words)) is kind


def test_a_missing_command_and_a_silent_one_say_what_to_do() -> None:
    with pytest.raises(SlurmMissing, match="no such command"):
        runner.run(["/nowhere/squeue"])
    with pytest.raises(ControllerDown, match="no answer within"):
        runner.run(["sleep", "30"], timeout_s=0.05)


def test_a_users_own_settings_do_not_reach_our_commands() -> None:
    clean = runner.environment({"SQUEUE_FORMAT": "%i", "SACCT_FEDERATION": "1", "PATH": "/bin", "LC_ALL": "de_DE"})
    assert clean == {"PATH": "/bin", "SLURM_TIME_FORMAT": "%s", "SLURM_BITSTR_LEN": "0", "LC_ALL": "C"}


BUSY = "Resource temporarily unavailable"


class BusySlurm:
    """Refuses the first `times` changes as a slurmctld does that has no time just now."""

    def __init__(self, times: int, words: str = "Resource temporarily unavailable for job 7") -> None:
        self.left, self.words = times, words
        self.asked: list[list[str]] = []

    def __call__(self, argv: list[str]) -> str:
        self.asked.append(argv)
        if len(self.asked) <= self.left:
            raise runner.failure("scontrol", self.words)
        return ""


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "BUSY_PAUSES_S", (0.0, 0.0, 0.0))


@pytest.mark.usefixtures("no_pauses")
def test_a_slurm_that_has_no_time_for_a_change_is_asked_again() -> None:
    slurm = BusySlurm(3)
    commands.Slurm(slurm, patient=True).resume("7")
    assert slurm.asked == 4 * [["scontrol", "resume", "7"]]


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize(
    ("patient", "words", "asked"),
    [
        (True, "Resource temporarily unavailable", 4),
        (True, "Denied", 1),
        (False, "Resource temporarily unavailable", 1),
    ],
)
def test_a_refusal_is_not_asked_again_for_ever(patient: bool, words: str, asked: int) -> None:
    slurm = BusySlurm(9, words)
    with pytest.raises(UpdateRefused):
        commands.Slurm(slurm, patient=patient).update_job("7", {"TimeLimit": "5"})
    assert len(slurm.asked) == asked
