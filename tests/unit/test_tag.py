from __future__ import annotations

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_gpushare.protocol.tag import Paused, Tag, parse_tag, with_tag
from slurm_gpushare.protocol.tokens import TOKEN

WORD = st.text("abcdefghijklmnopqrstuvwxyz0123456789:_,[]-", min_size=1, max_size=20)
FIELDS = {
    "probe": st.booleans(),
    "cluster": st.none() | st.integers(0, 99),
    "token": st.none() | WORD,
    "original": st.none() | WORD,
    "nodes": st.none() | WORD,
    "lease": st.booleans(),
    "max_isd_pct": st.none() | st.integers(0, 999),
    "placed": st.none() | WORD,
    "nice": st.none() | st.integers(-10_000, 10_000),
    "successor": st.booleans(),
    "given_min": st.integers(0, 9999),
    "paused": st.none() | st.builds(Paused, st.integers(0, 2_000_000_000), st.booleans()),
    "paused_before_s": st.integers(0, 99_999),
    "stopped_before_s": st.integers(0, 99_999),
    "requeue": st.booleans(),
    "gang": st.none() | st.integers(2, 64),
    "extra": st.dictionaries(st.sampled_from(["z", "y9"]), WORD),
}
TAGS = st.builds(Tag, **FIELDS)


def test_every_field_of_a_tag_is_tried() -> None:
    assert FIELDS.keys() == {field.name for field in fields(Tag)}


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


def test_a_tag_is_short_and_leaves_out_what_does_not_apply() -> None:
    tag = Tag(cluster=2, token="gs-a", original="gpu:1", lease=True)
    assert str(tag) == "GS1:c=2;t=gs-a;o=gpu:1;l=1"


@pytest.mark.parametrize("bad", ["gs-", "gs-short", "gs-" + "A" * 20, "gs-" + "a" * 33, "gs-aaaaaaaaaaaaaaa1"])
def test_tokens_have_a_strict_form(bad: str) -> None:
    assert not TOKEN.fullmatch(bad)
    assert TOKEN.fullmatch("gs-" + "k3v7" * 5)
