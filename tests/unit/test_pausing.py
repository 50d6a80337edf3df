"""Pausing who came last: the judgement, the decision, and what is written into Slurm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from world import NOW, TOKEN_A, running

from slurm_gpushare.helper.apply import Outcome
from slurm_gpushare.helper.pauses import CPUS_SHARED, LONGEST_PAUSE_S, pause, resume, resume_all
from slurm_gpushare.helper.promises import REST_S, Pauses, PauseStep, Standing, next_step
from slurm_gpushare.protocol.tag import parse_tag
from slurm_gpushare.slurm.commands import Slurm
from slurm_gpushare.slurm.queue import Job, parse_cores
from slurm_gpushare.slurm.runner import UpdateRefused

FINE = Standing(50.0, 1000.0, lost_s=50.0, shared_s=200.0, loss=0.25, error=0.02)
SPENT = Standing(25.0, 1000.0, lost_s=248.0, shared_s=600.0, loss=0.4, error=0.02)


class TestDecision:
    def test_who_came_last_is_paused_when_the_residents_budget_is_spent(self) -> None:
        assert next_step(SPENT, FINE, Pauses(), NOW, 10.0) is PauseStep.PAUSE
        assert next_step(replace(SPENT, lost_s=100.0), FINE, Pauses(), NOW, 10.0) is PauseStep.LEAVE

    def test_nothing_is_done_about_what_was_not_measured_or_could_be_chance(self) -> None:
        assert next_step(replace(SPENT, measured=False), FINE, Pauses(), NOW, 10.0) is PauseStep.LEAVE
        assert next_step(replace(SPENT, error=0.3), FINE, Pauses(), NOW, 10.0) is PauseStep.LEAVE

    def test_no_pause_is_longer_than_five_minutes_and_a_run_comes_between_two(self) -> None:
        paused = Pauses(since_s=NOW - LONGEST_PAUSE_S, total_s=LONGEST_PAUSE_S)
        assert next_step(SPENT, FINE, paused, NOW, 10.0) is PauseStep.END
        assert next_step(SPENT, FINE, Pauses(ran_s=REST_S - 1.0), NOW, 10.0) is PauseStep.LEAVE

    def test_it_goes_on_when_the_resident_has_budget_again(self) -> None:
        paused = Pauses(since_s=NOW - 60.0, total_s=60.0)
        assert next_step(SPENT, FINE, paused, NOW, 10.0) is PauseStep.LEAVE
        assert next_step(replace(SPENT, run_s=1200.0), FINE, paused, NOW, 10.0) is PauseStep.RESUME

    @pytest.mark.parametrize("bound", [{"most_s": 100.0, "total_s": 95.0}, {"end_moves_s": 5.0}])
    def test_pauses_are_bounded_in_all_and_by_reservations(self, bound: dict[str, float]) -> None:
        assert next_step(SPENT, FINE, Pauses(**bound), NOW, 10.0) is PauseStep.LEAVE
        assert next_step(SPENT, FINE, Pauses(since_s=NOW - 60.0, **bound), NOW, 10.0) is PauseStep.END

    def test_the_promise_of_the_job_whose_profile_was_true_comes_first(self) -> None:
        no_more = replace(FINE, lost_s=500.0)
        assert next_step(SPENT, no_more, Pauses(), NOW, 10.0) is PauseStep.PAUSE
        assert next_step(SPENT, no_more, Pauses(), NOW, 10.0, guest_first=True) is PauseStep.LEAVE


class FakeSlurm(Slurm):
    """Slurm's commands, with a refusal or other jobs where a test wants them."""

    def __init__(self, refuse: str = "", others: Sequence[Job] = (), cores: str = "") -> None:
        self.said: list[list[str]] = []
        self.others, self.refuse, self.cores = others, refuse, cores
        super().__init__(self._answer)

    def _answer(self, argv: Sequence[str]) -> str:
        self.said.append(list(argv))
        if self.refuse and self.refuse in argv:
            raise UpdateRefused("scontrol: Access/permission denied")
        return self.cores

    def jobs(self, only: object = ()) -> list[Job]:
        return list(self.others)

    @property
    def acts(self) -> list[str]:
        return [argv[1] if argv[0] == "scontrol" else argv[2] for argv in self.said]

    @property
    def tags(self) -> list[object]:
        words = [word for argv in self.said for word in argv if word.startswith("AdminComment=")]
        return [tag.paused if (tag := parse_tag(word.removeprefix("AdminComment="))) else None for word in words]


def job(extra: str = "", state: str = "RUNNING", key: str = "7") -> Job:
    tag = f"GS1:c=1;t={TOKEN_A};o=gpu:1{extra}"
    return running(key, "n0", "gres/shard:v100_0:1", tag=tag, state=state, start_s=NOW - 500)


class TestActing:
    def test_the_tag_is_written_before_anything_stands_still_and_taken_off_after(self) -> None:
        slurm = FakeSlurm()
        assert pause(slurm, job(), NOW, by_signal=False).outcome is Outcome.DONE
        assert slurm.acts == ["update", "suspend"]
        slurm = FakeSlurm()
        assert resume(slurm, job(f";p={NOW - 90};q=10", "SUSPENDED"), NOW).outcome is Outcome.DONE
        assert slurm.acts == ["resume", "update"]
        assert any("q=100" in word for word in slurm.said[-1]), "paused for 10 s before and 90 s now"

    def test_a_pause_by_signal_is_counted_as_time_to_give_back(self) -> None:
        slurm = FakeSlurm()
        assert resume(slurm, job(f";p={NOW - 90}s", "STOPPED"), NOW).outcome is Outcome.DONE
        assert slurm.acts == ["--signal=CONT", "update"]
        assert any("s=90" in word for word in slurm.said[-1])

    def test_a_refusal_leaves_no_mark(self) -> None:
        slurm = FakeSlurm(refuse="suspend")
        assert pause(slurm, job(), NOW, by_signal=False).outcome is Outcome.REFUSED
        assert slurm.acts == ["update", "suspend", "update"]
        assert slurm.tags[-1] is None

    def test_what_somebody_else_suspended_is_not_ours_to_resume(self) -> None:
        slurm = FakeSlurm()
        assert resume_all(slurm, [job(state="SUSPENDED")], NOW) == []
        assert slurm.said == []

    def test_a_job_that_somebody_else_resumed_only_loses_the_mark(self) -> None:
        slurm = FakeSlurm()
        assert [done.outcome for done in resume_all(slurm, [job(f";p={NOW - 5}")], NOW)] == [Outcome.DONE]
        assert slurm.acts == ["update"]

    def test_a_job_whose_cores_were_given_away_waits_for_them(self) -> None:
        later = replace(job(key="8"), start_s=NOW - 20)
        slurm = FakeSlurm(others=[later], cores="JobId=7 Nodes=n0 CPU_IDs=0-1 Mem=100 GRES=")
        assert resume(slurm, job(f";p={NOW - 90}", "SUSPENDED"), NOW).outcome is Outcome.WAITS
        assert "resume" not in slurm.acts
        before = replace(later, start_s=NOW - 200)  # it was there before, so it has other cores
        slurm = FakeSlurm(others=[before], cores="JobId=7 Nodes=n0 CPU_IDs=0-1 Mem=100 GRES=")
        assert resume(slurm, job(f";p={NOW - 90}", "SUSPENDED"), NOW).outcome is Outcome.DONE

    @pytest.mark.parametrize(("lasted_s", "patient"), [(90, False), (int(LONGEST_PAUSE_S), True)])
    def test_nobody_keeps_a_job_paused_by_taking_its_cores(self, lasted_s: int, patient: bool) -> None:
        later = replace(job(key="8"), start_s=NOW - 20)
        slurm = FakeSlurm(others=[later], cores="JobId=7 Nodes=n0 CPU_IDs=0-1 Mem=100 GRES=")
        done = resume(slurm, job(f";p={NOW - lasted_s}", "SUSPENDED"), NOW, patient=patient)
        assert (done.outcome, done.message) == (Outcome.DONE, CPUS_SHARED)
        assert "resume" in slurm.acts


def test_cores_are_read_off_scontrols_details() -> None:
    text = "JobId=7 ... Nodes=gpu[0-1] CPU_IDs=0-1,4 Mem=100 GRES=shard:1(IDX:0) MinCPUsNode=1"
    assert parse_cores(text) == {(node, cpu) for node in ("gpu0", "gpu1") for cpu in (0, 1, 4)}
    assert parse_cores("JobId=7 JobState=PENDING") == frozenset()
