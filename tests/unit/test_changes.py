"""What we write into pending jobs, and that it can always be undone."""

from __future__ import annotations

import math
from typing import Any

from world import NEW, NOW, OLD, TOKEN_A, TOKEN_B, job, running

from slurm_gpushare.helper.changes import GUEST_NICE, extension, leave, most_lost_s, place, restore
from slurm_gpushare.helper.observe import expectation
from slurm_gpushare.helper.occupancy import GpuAddress, token_of
from slurm_gpushare.helper.queue_facts import TokenFacts
from slurm_gpushare.protocol.tag import parse_tag
from slurm_gpushare.protocol.tokens import OwnedToken
from slurm_gpushare.report.status import jobs_that_take_part
from slurm_gpushare.slurm.accounting import JobTokens
from slurm_gpushare.slurm.queue import Job

TAG = f"GS1:c=1;t={TOKEN_A};o=gpu:1;l=1"
TAG_OLD = f"GS1:c=1;t={TOKEN_A};o=shard:v100_0:2;l=1"


def test_a_placement_is_one_update_that_ends_the_lease() -> None:
    waiting = job("14", tag=TAG, eligible_s=NOW + 20, admin_comment="")
    change = place(waiting, GpuAddress("n1", 1), "v100_1", 1, NEW, NOW)
    assert change is not None
    assert change.key == "14"
    assert change.fields == {
        "Account": "science",  # its own: makes Slurm refuse all of it once the job has started
        "Gres": "shard:v100_1:1",
        "ReqNodeList": "n1",
        "AdminComment": f"GS1:c=1;t={TOKEN_A};o=gpu:1;g=n1:1",
        "StartTime": "now",
    }


def test_on_22_05_a_job_keeps_its_index() -> None:
    waiting = job("14", tag=TAG_OLD, per_node="gres:shard:v100_0:2", eligible_s=NOW + 20)
    change = place(waiting, GpuAddress("n1", 0), "v100_0", 1, OLD, NOW)
    assert change is not None
    assert change.fields["Gres"] == "shard:v100_0:1"
    assert place(waiting, GpuAddress("n1", 1), "v100_1", 1, OLD, NOW) is None


def test_start_time_is_never_written_once_the_lease_is_over() -> None:
    late = job("14", tag=TAG, eligible_s=NOW - 1)
    assert "StartTime" not in place(late, GpuAddress("n1", 1), "v100_1", 1, NEW, NOW).fields  # type: ignore[union-attr]
    users_own_begin = job("15", tag=f"GS1:c=1;t={TOKEN_A};o=gpu:1", eligible_s=NOW + 900)
    assert "StartTime" not in place(users_own_begin, GpuAddress("n1", 1), "v100_1", 1, NEW, NOW).fields  # type: ignore[union-attr]


def test_other_words_in_the_admin_comment_stay() -> None:
    waiting = job("14", tag=f"billing=7 {TAG} checked")
    change = place(waiting, GpuAddress("n1", 1), "v100_1", 1, NEW, NOW)
    assert change is not None
    assert change.fields["AdminComment"].startswith("billing=7 GS1:")
    assert change.fields["AdminComment"].endswith(" checked")


def test_a_requeued_job_starts_anew_but_what_its_limit_was_given_stays_known() -> None:
    before = f"GS1:c=1;t={TOKEN_A};o=gpu:1;g=n1:1;x=5;q=300;s=120"
    for limit_s, given_min in ((900, 5), (300, 0)):  # as Slurm leaves it; as somebody shortened it since
        back = restore(job("14", tag=before, per_node="gres/shard:v100_1:1", limit_s=limit_s), NEW, NOW)
        assert back is not None
        tag = parse_tag(back.fields["AdminComment"])
        assert tag is not None
        assert (tag.paused_before_s, tag.stopped_before_s, tag.given_min) == (0, 0, given_min)


def test_what_was_given_is_never_more_than_the_limit() -> None:
    shortened = running("14", "n1", "gres/shard:v100_1:1", tag=f"{TAG};x=5", limit_s=240)
    assert expectation(shortened, TokenFacts(duration_s=600.0)).middle_s > 0.0


def test_an_untagged_job_is_never_placed_or_restored() -> None:
    assert place(job("14"), GpuAddress("n1", 1), "v100_1", 1, NEW, NOW) is None
    assert restore(job("14"), NEW, NOW) is None
    assert restore(job("14", tag=f"GS1:probe;t={TOKEN_B}"), NEW, NOW) is None


def test_restoring_gives_back_the_request_and_the_users_own_node_list() -> None:
    waiting = job("14", tag=TAG, wanted_nodes="n[0-1]", eligible_s=NOW + 20)
    change = place(waiting, GpuAddress("n1", 1), "v100_1", 1, NEW, NOW)
    assert change is not None
    placed = job(
        "14", tag=change.fields["AdminComment"], per_node="gres/shard:v100_1:1", wanted_nodes="n1", eligible_s=NOW
    )
    back = restore(placed, NEW, NOW)
    assert back is not None
    assert back.fields["Gres"] == "gpu:1"
    assert back.fields["ReqNodeList"] == "n[0-1]"
    tag = parse_tag(back.fields["AdminComment"])
    assert tag is not None
    assert (tag.placed, tag.nodes, tag.lease, tag.original) == (None, None, False, "gpu:1")
    assert "StartTime" not in back.fields


def test_restoring_a_job_without_a_node_list_clears_ours() -> None:
    placed = job("14", tag=f"{TAG_OLD[:-4]};g=n1:0", per_node="gres:shard:v100_0:1", wanted_nodes="n1")
    back = restore(placed, OLD, NOW)
    assert back is not None
    assert back.fields["Gres"] == "shard:v100_0:2"
    assert back.fields["ReqNodeList"] == ""


def test_a_lease_alone_is_ended_without_touching_the_request() -> None:
    back = restore(job("14", tag=TAG, eligible_s=NOW + 10), NEW, NOW)
    assert back is not None
    assert set(back.fields) == {"Account", "AdminComment", "StartTime"}


def test_what_somebody_else_changed_since_is_theirs() -> None:
    changed = job("14", tag=f"{TAG[:-4]};g=n1:1", per_node="gres/gpu:2", wanted_nodes="n7")
    back = restore(changed, NEW, NOW)
    assert back is not None
    assert set(back.fields) == {"Account", "AdminComment"}


def test_an_array_task_is_named_with_its_task() -> None:
    back = restore(job("6_2", tag=TAG, eligible_s=NOW + 10), NEW, NOW)
    assert back is not None
    assert back.key == "6_2"


def test_a_guest_goes_ahead_of_the_queue_and_its_own_nice_value_comes_back() -> None:
    waiting = job("14", tag=TAG, nice=7, eligible_s=NOW + 20)
    change = place(waiting, GpuAddress("n1", 1), "v100_1", 1, NEW, NOW, guest=True)
    assert change is not None
    assert int(change.fields["Nice"]) < -100_000
    placed = job(
        "14", tag=change.fields["AdminComment"], per_node="gres/shard:v100_1:1", wanted_nodes="n1", nice=-1_000_000
    )
    again = place(placed, GpuAddress("n1", 0), "v100_0", 1, NEW, NOW, guest=True)
    assert again is not None
    assert "n=7" in again.fields["AdminComment"], "the value to restore is the user's, not ours"
    back = restore(placed, NEW, NOW)
    assert back is not None
    assert back.fields["Nice"] == "7"
    assert "n=" not in back.fields["AdminComment"]


def test_a_successor_goes_ahead_like_a_guest_and_its_tag_says_what_it_is() -> None:
    change = place(job("14", tag=TAG), GpuAddress("n1", 1), "v100_1", 1, NEW, NOW, successor=True)
    assert change is not None
    assert int(change.fields["Nice"]) < -100_000
    assert change.fields["AdminComment"].endswith(";h=1")
    placed = job("14", tag=change.fields["AdminComment"], per_node="gres/shard:v100_1:1", wanted_nodes="n1")
    for undone in (restore(placed, NEW, NOW), place(placed, GpuAddress("n1", 0), "v100_0", 1, NEW, NOW, guest=True)):
        assert undone is not None
        assert "h=1" not in undone.fields["AdminComment"]


def test_a_job_alone_on_a_card_keeps_its_place_in_the_queue() -> None:
    change = place(job("14", tag=TAG), GpuAddress("n1", 1), "v100_1", 1, NEW, NOW)
    assert change is not None
    assert "Nice" not in change.fields


class TestExtension:
    RUNNING = running("14", "n1", "gres/shard:v100_1:1", tag=f"GS1:c=1;t={TOKEN_A};o=gpu:1", start_s=NOW - 600)

    def test_lost_minutes_are_given_once(self) -> None:
        change = extension(self.RUNNING, 130.0, math.inf, math.inf)
        assert change is not None
        assert change.fields["TimeLimit"] == "63"
        given = running(
            "14", "n1", "gres/shard:v100_1:1", tag=change.fields["AdminComment"], start_s=NOW - 600, limit_s=63 * 60
        )
        assert extension(given, 130.0, math.inf, math.inf) is None
        more = extension(given, 200.0, math.inf, math.inf)
        assert more is not None
        assert more.fields["TimeLimit"] == "64"

    def test_neither_partition_nor_reservation_is_overrun(self) -> None:
        assert extension(self.RUNNING, 600.0, 3600.0, math.inf) is None
        change = extension(self.RUNNING, 600.0, math.inf, NOW - 600 + 3600 + 120)
        assert change is not None
        assert change.fields["TimeLimit"] == "62"


def _out(key: str = "14", tag: str = f"x GS1:c=1;t={TOKEN_A};o=gpu:1;g=n1:1;n=3 y", **changes: Any) -> Job:
    """A job as the hook leaves it when its owner opts out."""
    return job(key, tag=tag, per_node="", per_job="gres/gpu:1", wanted_nodes="n1", **changes)


def test_nothing_of_ours_stays_in_a_job_that_opted_out() -> None:
    change = leave(_out(nice=GUEST_NICE), NOW)
    assert change is not None
    assert change.fields == {"Account": "science", "AdminComment": "x y", "ReqNodeList": "", "Nice": "3"}
    changed_since = leave(_out(nice=9), NOW)
    assert changed_since is not None
    assert "Nice" not in changed_since.fields
    started = leave(_out(state="RUNNING", nice=GUEST_NICE), NOW)
    assert started is not None
    assert started.fields == {"AdminComment": "x y"}
    assert leave(job("14", tag=TAG), NOW) is None
    assert leave(job("14", tag=f"GS1:probe;t={TOKEN_A}", per_node="", per_job="gres/gpu:1"), NOW) is None


def test_a_job_that_opted_out_has_no_token_any_more() -> None:
    assert token_of(_out()) is None
    assert token_of(job("14", tag=TAG)) == TOKEN_A
    assert jobs_that_take_part([_out()], {}, NOW) == []
    tokens = JobTokens(None)  # type: ignore[arg-type]
    tokens.take([_out(state="RUNNING"), running("15", "n1", "gres/shard:v100_1:1", tag=TAG)])
    assert tokens._known == {15: OwnedToken(TOKEN_A, 1000)}


def test_time_is_given_back_up_to_what_was_promised_of_the_limit_as_submitted() -> None:
    grown = running("14", "n1", "gres/shard:v100_1:1", tag=f"{TAG};x=10", limit_s=4200)
    assert most_lost_s(grown, 25.0) == 900.0
    assert most_lost_s(running("14", "n1", "gres/shard:v100_1:1", limit_s=None), 25.0) == math.inf
