"""What ``gpushare job`` tells."""

from __future__ import annotations

from slurm_gpushare.report.story import Known, tell
from slurm_gpushare.slurm.tag import parse_tag
from slurm_gpushare.store.decisions import Decision
from slurm_gpushare.store.sharing import Span

TOKEN = "gs-" + "a" * 20


def known(tag: str, state: str = "PENDING") -> Known:
    return Known("14", 14, state, "Priority", "gpu", (), parse_tag(tag))


def test_a_user_learns_from_the_tag_alone() -> None:
    lines = tell(known(f"GS1:c=2;t={TOKEN};o=gpu:1;g=n1:3"), (), ())
    assert lines[0] == "Job 14: PENDING (Priority), partition gpu"
    assert "  Workload: cluster 2 (heavy)" in lines
    assert "  It goes to GPU 3 of n1" in lines


def test_jobs_outside_sharing_and_probes_are_told_so() -> None:
    assert "no part in sharing" in tell(known(""), (), ())[1]
    assert "measured" in tell(known(f"GS1:probe;t={TOKEN}"), (), ())[1]


def test_decisions_come_with_their_reasons_and_only_the_latest_of_a_kind() -> None:
    decisions = [
        Decision(14, 100, "waits", reasons={"key": "14", "why": "all cards are full"}),
        Decision(14, 200, "waits", reasons={"key": "14", "why": "no resident goes with it"}),
        Decision(14, 300, "waits", reasons={"key": "15_1", "why": "of another task"}),
        Decision(14, 400, "beside", "n1", 3, 12, reasons={"key": "14", "guest_isd_pct": 21.0, "resident_isd_pct": 8.4}),
    ]
    text = "\n".join(tell(known(f"GS1:c=2;t={TOKEN};o=gpu:1"), decisions, ()))
    assert "no resident goes with it" in text
    assert "all cards are full" not in text
    assert "of another task" not in text
    assert "placed beside job 12 (GPU 3 of n1): expected to run 21 % slower" in text
    assert "its neighbour loses 8 % of its run" in text


def test_a_successor_learns_why_it_is_beside_somebody() -> None:
    reasons = {"key": "14", "guest_isd_pct": 0.6, "resident_isd_pct": 4.2, "resident_budget_pct": 50.0, "wait_s": 200.0}
    placed = Decision(14, 400, "succeeds", "n1", 3, 12, reasons=reasons)
    text = "\n".join(tell(known(f"GS1:c=2;t={TOKEN};o=gpu:1;g=n1:3;h=1"), [placed], ()))
    assert (
        "placed beside job 12, which ends soon, to have the card after it (GPU 3 of n1): expected to run 1 % longer "
        "in all; its neighbour loses 4 % of its run of 50 % allowed; a whole GPU was expected in 200 s"
    ) in text


def test_a_stay_beside_a_neighbour_is_told_from_the_jobs_own_side() -> None:
    span = Span(12, 14, TOKEN, TOKEN, "n1", 3, "V100", 500, 900, 0.9, 0.8, None, 0.5)
    text = "\n".join(tell(known(f"GS1:c=2;t={TOKEN};o=gpu:1", "RUNNING"), (), [span]))
    assert "with job 12" in text
    assert "expected 25 %, measured 100 %" in text
