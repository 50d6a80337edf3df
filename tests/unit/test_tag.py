from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_gpushare.slurm.tag import TOKEN, Tag, lease_ended, parse_tag, with_tag

WORD = st.text("abcdefghijklmnopqrstuvwxyz0123456789:_,[]-", min_size=1, max_size=20)
TAGS = st.builds(
    Tag,
    probe=st.booleans(),
    cluster=st.none() | st.integers(0, 99),
    token=st.none() | WORD,
    original=st.none() | WORD,
    nodes=st.none() | WORD,
    lease=st.booleans(),
    max_isd_pct=st.none() | st.integers(0, 999),
    placed=st.none() | WORD,
    heir=st.booleans(),
    extra=st.dictionaries(st.sampled_from(["x", "y9"]), WORD),
)


@given(TAGS, st.text())
def test_a_tag_survives_being_written_into_any_comment(tag: Tag, comment: str) -> None:
    if "GS1:" in comment:
        return
    assert parse_tag(with_tag(comment, tag)) == tag


@given(st.text())
def test_no_comment_makes_the_parser_raise(comment: str) -> None:
    parse_tag(comment)
    parse_tag("GS1:" + comment)


def test_the_rest_of_the_comment_is_kept() -> None:
    before = "billed by hand GS1:probe;t=gs-a checked"
    after = with_tag(before, Tag(cluster=1, token="gs-a"))
    assert after == "billed by hand GS1:c=1;t=gs-a checked"


def test_a_comment_without_a_tag_has_none() -> None:
    assert parse_tag("") is None
    assert parse_tag("xGS1:c=2") is None


def test_ending_the_lease_changes_nothing_else() -> None:
    tag = Tag(cluster=2, token="gs-a", original="gpu:1", lease=True)
    assert str(tag) == "GS1:c=2;t=gs-a;o=gpu:1;l=1"
    assert str(lease_ended(tag)) == "GS1:c=2;t=gs-a;o=gpu:1"


@pytest.mark.parametrize("bad", ["gs-", "gs-short", "gs-" + "A" * 20, "gs-" + "a" * 33, "gs-aaaaaaaaaaaaaaa1"])
def test_tokens_have_a_strict_form(bad: str) -> None:
    assert not TOKEN.fullmatch(bad)
    assert TOKEN.fullmatch("gs-" + "k3v7" * 5)
