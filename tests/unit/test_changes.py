"""What we write into pending jobs, and that it can always be undone."""

from __future__ import annotations

import math

from slurm_things import NEW, NOW, OLD, TOKEN_A, TOKEN_B, job, running

from slurm_gpushare.coschedule.changes import place, restore
from slurm_gpushare.coschedule.extend import extension
from slurm_gpushare.coschedule.occupancy import Card
from slurm_gpushare.slurm.tag import parse_tag

TAG = f"GS1:c=1;t={TOKEN_A};o=gpu:1;l=1"
TAG_OLD = f"GS1:c=1;t={TOKEN_A};o=shard:v100_0:2;l=1"


def test_a_placement_is_one_update_that_ends_the_lease() -> None:
    waiting = job("14", tag=TAG, eligible_s=NOW + 20, admin_comment="")
    change = place(waiting, Card("n1", 1), "v100_1", 1, NEW, NOW)
    assert change is not None
    assert change.key == "14"
    assert change.fields == {
        "Gres": "shard:v100_1:1",
        "ReqNodeList": "n1",
        "AdminComment": f"GS1:c=1;t={TOKEN_A};o=gpu:1;g=n1:1",
        "StartTime": "now",
    }


def test_on_22_05_a_job_keeps_its_index() -> None:
    waiting = job("14", tag=TAG_OLD, per_node="gres:shard:v100_0:2", eligible_s=NOW + 20)
    change = place(waiting, Card("n1", 0), "v100_0", 1, OLD, NOW)
    assert change is not None
    assert change.fields["Gres"] == "shard:v100_0:1"
    assert place(waiting, Card("n1", 1), "v100_1", 1, OLD, NOW) is None


def test_start_time_is_never_written_once_the_lease_is_over() -> None:
    late = job("14", tag=TAG, eligible_s=NOW - 1)
    assert "StartTime" not in place(late, Card("n1", 1), "v100_1", 1, NEW, NOW).fields  # type: ignore[union-attr]
    users_own_begin = job("15", tag=f"GS1:c=1;t={TOKEN_A};o=gpu:1", eligible_s=NOW + 900)
    assert "StartTime" not in place(users_own_begin, Card("n1", 1), "v100_1", 1, NEW, NOW).fields  # type: ignore[union-attr]


def test_other_words_in_the_admin_comment_stay() -> None:
    waiting = job("14", tag=f"billing=7 {TAG} checked")
    change = place(waiting, Card("n1", 1), "v100_1", 1, NEW, NOW)
    assert change is not None
    assert change.fields["AdminComment"].startswith("billing=7 GS1:")
    assert change.fields["AdminComment"].endswith(" checked")


def test_an_untagged_job_is_never_placed_or_restored() -> None:
    assert place(job("14"), Card("n1", 1), "v100_1", 1, NEW, NOW) is None
    assert restore(job("14"), NEW, NOW) is None
    assert restore(job("14", tag=f"GS1:probe;t={TOKEN_B}"), NEW, NOW) is None


def test_restoring_gives_back_the_request_and_the_users_own_node_list() -> None:
    waiting = job("14", tag=TAG, wanted_nodes="n[0-1]", eligible_s=NOW + 20)
    change = place(waiting, Card("n1", 1), "v100_1", 1, NEW, NOW)
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
    assert set(back.fields) == {"AdminComment", "StartTime"}


def test_what_somebody_else_changed_since_is_theirs() -> None:
    changed = job("14", tag=f"{TAG[:-4]};g=n1:1", per_node="gres/gpu:2", wanted_nodes="n7")
    back = restore(changed, NEW, NOW)
    assert back is not None
    assert set(back.fields) == {"AdminComment"}


def test_an_array_task_is_named_with_its_task() -> None:
    back = restore(job("6_2", tag=TAG, eligible_s=NOW + 10), NEW, NOW)
    assert back is not None
    assert back.key == "6_2"


def test_a_guest_goes_ahead_of_the_queue_and_its_own_nice_value_comes_back() -> None:
    waiting = job("14", tag=TAG, nice=7, eligible_s=NOW + 20)
    change = place(waiting, Card("n1", 1), "v100_1", 1, NEW, NOW, guest=True)
    assert change is not None
    assert int(change.fields["Nice"]) < -100_000
    placed = job(
        "14", tag=change.fields["AdminComment"], per_node="gres/shard:v100_1:1", wanted_nodes="n1", nice=-1_000_000
    )
    again = place(placed, Card("n1", 0), "v100_0", 1, NEW, NOW, guest=True)
    assert again is not None
    assert "n=7" in again.fields["AdminComment"], "the value to restore is the user's, not ours"
    back = restore(placed, NEW, NOW)
    assert back is not None
    assert back.fields["Nice"] == "7"
    assert "n=" not in back.fields["AdminComment"]


def test_a_successor_goes_ahead_like_a_guest_and_its_tag_says_what_it_is() -> None:
    change = place(job("14", tag=TAG), Card("n1", 1), "v100_1", 1, NEW, NOW, heir=True)
    assert change is not None
    assert int(change.fields["Nice"]) < -100_000
    assert change.fields["AdminComment"].endswith(";h=1")
    placed = job("14", tag=change.fields["AdminComment"], per_node="gres/shard:v100_1:1", wanted_nodes="n1")
    for undone in (restore(placed, NEW, NOW), place(placed, Card("n1", 0), "v100_0", 1, NEW, NOW, guest=True)):
        assert undone is not None
        assert "h=1" not in undone.fields["AdminComment"]


def test_a_job_alone_on_a_card_keeps_its_place_in_the_queue() -> None:
    change = place(job("14", tag=TAG), Card("n1", 1), "v100_1", 1, NEW, NOW)
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
