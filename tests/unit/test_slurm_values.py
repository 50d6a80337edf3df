"""How Slurm writes things down, and what we make of it."""

from __future__ import annotations

import pytest

from slurm_gpushare.protocol.errors import SlurmError
from slurm_gpushare.protocol.release import Release, parse_release
from slurm_gpushare.slurm import values
from slurm_gpushare.slurm.runner import format_option, rows
from slurm_gpushare.slurm.values import Gres, expand, parse_gres, parse_used, retarget, typed_shards

OLD, NEW = Release(22, 5, 8), Release(24, 11, 5)


@pytest.mark.parametrize(
    ("written", "seconds"),
    [("1-02:00:00", 93600), ("5:00", 300), ("2:00:00", 7200), ("30", 30), ("UNLIMITED", None), ("", None)],
)
def test_durations(written: str, seconds: int | None) -> None:
    assert values.duration_s(written) == seconds


@pytest.mark.parametrize(
    ("written", "mib"), [("100M", 100), ("62.50G", 64000), ("2000", 2000), ("512K", 0), ("0", 0), ("N/A", None)]
)
def test_memory(written: str, mib: int | None) -> None:
    assert values.memory_mib(written) == mib


@pytest.mark.parametrize(
    ("expression", "names"),
    [
        ("gpu[0-2,7],login", ("gpu0", "gpu1", "gpu2", "gpu7", "login")),
        ("n[08-10]", ("n08", "n09", "n10")),
        ("r[1-2]n[1-2]", ("r1n1", "r1n2", "r2n1", "r2n2")),
        ("", ()),
    ],
)
def test_host_lists(expression: str, names: tuple[str, ...]) -> None:
    assert expand(expression) == names


@pytest.mark.parametrize("written", ["slurm-wlm 22.05.8", "slurm 22.05.8", "22.05.8"])
def test_release_from_what_sinfo_prints(written: str) -> None:
    assert parse_release(written) == OLD
    assert str(OLD) == "22.05.8"


def test_a_text_without_version_is_an_error() -> None:
    with pytest.raises(SlurmError, match="not a Slurm version"):
        parse_release("command not found")


def test_releases_differ_in_what_matters_to_sharing() -> None:
    assert not OLD.can("counts_shards_per_gpu")
    assert NEW.can("counts_shards_per_gpu")
    assert Release(23, 11, 4).can("keeps_whole_gpus_apart") is False
    assert Release(23, 11, 5).can("keeps_whole_gpus_apart") is True


@pytest.mark.parametrize(
    ("written", "parsed"),
    [
        ("gres:gpu:v100_0:1", [Gres("gpu", "v100_0", 1)]),
        ("gres/shard:2", [Gres("shard", "", 2)]),
        ("gres/gpu=3", [Gres("gpu", "", 3)]),
        ("gpu", [Gres("gpu", "", 1)]),
        ("gpu:a100:2(S:0-1),shard:8(S:0)", [Gres("gpu", "a100", 2), Gres("shard", "", 8)]),
        ("N/A", []),
        ("(null)", []),
    ],
)
def test_gres(written: str, parsed: list[Gres]) -> None:
    assert list(parse_gres(written)) == parsed


def test_only_one_typed_shard_request_names_a_gpu() -> None:
    assert typed_shards("gres:shard:v100_2:1") == Gres("shard", "v100_2", 1)
    assert typed_shards("gres/shard:v100_0:0,gres/shard:v100_3:2") == Gres("shard", "v100_3", 2)
    assert typed_shards("gres/shard:1") is None
    assert typed_shards("gres/gpu:v100_1:1") is None


def test_22_05_counts_gpus_where_later_releases_count_shards() -> None:
    old = parse_used(
        "gpu:v100_0:1(IDX:0),gpu:v100_1:0(IDX:N/A),shard:v100_0:0(IDX:N/A),shard:v100_1:1(IDX:1)", exact=False
    )
    assert old.whole == {0}
    assert old.shards == {1: 1}
    new = parse_used(
        "gpu:v100_0:0(IDX:N/A),gpu:v100_1:0(IDX:N/A),shard:v100_0:2(2/2,0/2),shard:v100_1:0(0/2,0/2)", exact=True
    )
    assert new.whole == frozenset()
    assert new.shards == {0: 2}


class TestRetarget:
    """From the table of what each release accepts."""

    def test_typed_shards_move_by_zeroing_the_old_type(self) -> None:
        assert retarget("gres/shard:v100_0:2", "shard:v100_2:1", NEW) == "shard:v100_0:0,shard:v100_2:1"

    def test_22_05_would_leak_a_shard_of_the_old_type(self) -> None:
        assert retarget("gres:shard:v100_0:2", "shard:v100_2:1", OLD) is None

    def test_same_type_needs_no_zero(self) -> None:
        assert retarget("gres:shard:v100_2:2", "shard:v100_2:1", OLD) == "shard:v100_2:1"

    def test_22_05_cannot_turn_a_gpu_into_shards(self) -> None:
        assert retarget("gres:gpu:1", "shard:v100_2:1", OLD) is None
        assert retarget("gres:shard:1", "shard:v100_2:1", OLD) is None
        assert retarget("gres:shard:v100_2:1", "gpu:1", OLD) is None

    def test_later_releases_replace_the_request(self) -> None:
        assert retarget("gres/gpu:1", "shard:v100_2:1", NEW) == "shard:v100_2:1"
        assert retarget("gres/shard:v100_2:1", "gpu:1", NEW) == "gpu:1"


def test_no_comment_can_shift_a_column() -> None:
    columns, delimiter = ("jobid", "comment"), "~4f1c~"
    output = f"1{delimiter}evil\n2~4f1d~forged|,{delimiter}\n3{delimiter}{delimiter}\n"
    assert [row["jobid"] for row in rows(output, columns, delimiter)] == ["1", "3"]
    assert format_option(columns, delimiter) == "jobid:0~4f1c~,comment:0~4f1c~"


def test_a_value_may_begin_and_end_with_line_breaks() -> None:
    output = "1~x~\nevil\n~x~\n2~x~~x~\n3~x~\n~x~"  # as a comment may
    assert [row["b"] for row in rows(output, ("a", "b"), "~x~")] == ["\nevil\n", "", "\n"]


def test_an_answer_of_another_shape_is_an_error() -> None:
    with pytest.raises(SlurmError, match="no row of 2 fields in '1 2 3'"):
        list(rows("1~x~2~x~3~x~\n", ("a", "b"), "~x~"))
