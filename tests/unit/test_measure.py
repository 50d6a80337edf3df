"""Measuring pairs on purpose."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from slurm_gpushare.cli.kb import kb
from slurm_gpushare.knowledge.learning import LearnedKnowledge
from slurm_gpushare.knowledge.pair_trials import rates_of, read_candidates, widest_first
from slurm_gpushare.knowledge.tables import read_pairs
from slurm_gpushare.protocol.errors import BadInput, GpushareError
from slurm_gpushare.store import Store
from slurm_gpushare.store.sharing import Observation


def test_rates_from_ends_by_hand() -> None:
    # a ends at 20 s; b ends at 35 s, so it did its last 15 s of work alone and the other 15 in the first 20 s
    assert rates_of(10, 30, 20, 35) == pytest.approx((0.5, 0.75))
    assert rates_of(10, 10, 10, 10) == (1.0, 1.0)
    assert rates_of(30, 10, 35, 20) == pytest.approx((0.75, 0.5))


def test_least_known_pairs_come_first() -> None:
    knowledge = LearnedKnowledge()
    for _ in range(5):
        for pair in (("a", "b"), ("b", "a"), ("a", "a"), ("b", "b")):
            knowledge.observe(*pair, 0.7)
    order = widest_first(["a", "b", "c"], knowledge)
    assert len(order) == 6
    assert order[0] == ("c", "c")
    assert set(order[:3]) == {("c", "c"), ("a", "c"), ("b", "c")}


@pytest.mark.slow
def test_commands_are_run_and_rates_written(tmp_path: Path) -> None:
    (tmp_path / "w.csv").write_text("token,command\ngs-a,sleep 0.4\ngs-b,sleep 0.5\n")
    command = ["measure", str(tmp_path / "w.csv"), "--pairs", "9", "--out", str(tmp_path / "pairs.csv")]
    result = CliRunner().invoke(kb, command, catch_exceptions=False)
    assert "3 pairs" in result.output
    pairs = read_pairs(tmp_path / "pairs.csv")
    assert set(pairs.names) == {"gs-a", "gs-b"}
    assert pairs.rate_a.min() > 0.5, "sleeping disturbs nobody"
    assert "sleep" not in (tmp_path / "pairs.csv").read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("token,command\n", "no workloads"),
        ("token,command\ngs-a,\n", "w.csv:2: command is empty"),
        ("token,command\ngs-a,true\ngs-a,true\n", "a token twice"),
    ],
)
def test_bad_lists_are_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "w.csv").write_text(text)
    with pytest.raises(BadInput, match=message):
        read_candidates(tmp_path / "w.csv")


def test_a_command_that_fails_alone_stops_the_measurement(tmp_path: Path) -> None:
    (tmp_path / "w.csv").write_text("token,command\ngs-a,false\n")
    with pytest.raises(GpushareError, match="gs-a: its command ended with 1"):
        CliRunner().invoke(
            kb, ["measure", str(tmp_path / "w.csv"), "--out", str(tmp_path / "p.csv")], catch_exceptions=False
        )
    assert not (tmp_path / "p.csv").exists()


@pytest.mark.slow
def test_two_that_fail_only_together_are_a_finding(tmp_path: Path) -> None:
    (tmp_path / "alone.sh").write_text("mkdir $1 && sleep 1 && rmdir $1\n")  # as with memory that suffices for one
    (tmp_path / "w.csv").write_text(
        f"token,command\ngs-a,sh {tmp_path}/alone.sh {tmp_path}/card\ngs-b,sh {tmp_path}/alone.sh {tmp_path}/card\n"
    )
    command = ["measure", str(tmp_path / "w.csv"), "--pairs", "9", "--out", str(tmp_path / "pairs.csv")]
    result = CliRunner().invoke(kb, command, catch_exceptions=False)
    assert "do not fit together" in result.output
    pairs = read_pairs(tmp_path / "pairs.csv")
    assert len(pairs.feasible) == 3
    assert not pairs.feasible.any()


def test_the_stores_knowledge_says_where_to_look_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = [f"gs-{letter * 20}" for letter in "abc"]
    url = f"sqlite:///{tmp_path}/store.sqlite"
    with Store.create(url) as store:
        known = [
            Observation(f"{a}{b}{n}", "V100", a, b, 0.7, 1.0, 1)
            for n in range(5)
            for a in tokens[:2]
            for b in tokens[:2]
        ]
        store.observations.add(known)
    (tmp_path / "gpushare.conf").write_text(f"StoreUrl={url}\n")
    monkeypatch.setenv("GPUSHARE_CONF", str(tmp_path / "gpushare.conf"))
    (tmp_path / "w.csv").write_text("token,command\n" + "".join(f"{token},sleep 0.1\n" for token in tokens))
    command = ["measure", str(tmp_path / "w.csv"), "--pairs", "1", "--out", str(tmp_path / "pairs.csv")]
    CliRunner().invoke(kb, command, catch_exceptions=False)
    assert set(read_pairs(tmp_path / "pairs.csv").names) == {tokens[2]}
