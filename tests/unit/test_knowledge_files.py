"""Reading profiles and pairs: what is accepted, and what each mistake is called."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from slurm_gpushare.knowledge.tables import read_pairs, read_profiles, write_rows
from slurm_gpushare.protocol.errors import BadInput

PROFILES = "profile,gpu_model,gpu_util_mean_pct,mem_used_mib,mem_total_mib\n"
PAIRS = "profile_a,profile_b,gpu_model,feasible,rate_a,rate_b\n"


def file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "input.csv"
    path.write_text(text)
    return path


def test_columns_in_any_order_with_extras_and_gaps(tmp_path: Path) -> None:
    path = file(tmp_path, "extra,mgup,gpu_model,profile\nx,50,V100,a\ny,,V100,b\n")
    profiles = read_profiles(path)
    assert profiles.names == ("a", "b")
    assert profiles.gpu_model == "V100"
    assert profiles.column("mgup") == pytest.approx(np.array([50, np.nan]), nan_ok=True)
    assert set(profiles.columns) == {"mgup"}
    assert np.isnan(profiles.column("mem_used_mib")).all()
    assert profiles.take([1]).names == ("b",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty file"),
        ("profile,mgup\na,5\n", "no column gpu_model"),
        (PROFILES, "no profiles"),
        (PROFILES + "a,V100,101,1,2\n", "input.csv:2: gpu_util_mean_pct is 101"),
        (PROFILES + "a,V100,-1,1,2\n", "must be between 0 and 100"),
        (PROFILES + "a,V100,nan,1,2\n", "not a number"),
        (PROFILES + "a,V100,fast,1,2\n", "not a number"),
        (PROFILES + "a,V100,5,3,2\n", "more than mem_total_mib"),
        (PROFILES + "a,V100,5,1,2\na,V100,6,1,2\n", "input.csv:3: 'a' again, first on line 2"),
        (PROFILES + "a,V100,5,1,2\nb,A100,6,1,2\n", "GPU models mixed: A100, V100"),
        (PROFILES + "a,V100,5\n", "not 5 cells"),
        (PROFILES + ",V100,5,1,2\n", "profile is empty"),
        ("profile,profile,gpu_model\na,b,c\n", "named twice"),
    ],
)
def test_bad_profiles_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        read_profiles(file(tmp_path, text))


def test_one_model_of_a_mixed_file_can_be_chosen(tmp_path: Path) -> None:
    path = file(tmp_path, PROFILES + "a,V100,5,1,2\nb,A100,6,1,2\n")
    assert read_profiles(path, gpu_model="A100").names == ("b",)
    with pytest.raises(BadInput, match="nothing of GPU model H100"):
        read_profiles(path, gpu_model="H100")


def test_pairs_keep_infeasible_rows_and_clip_noise(tmp_path: Path) -> None:
    path = file(tmp_path, PAIRS + "a,b,V100,1,0.5,1.2\na,a,V100,0,,\nb,b,V100,,,\nc,c,V100,0,0.5,0.5\n")
    pairs = read_pairs(path)
    assert pairs.feasible.tolist() == [True, False, False, False]
    assert pairs.rate_b[0] == 1.0
    assert np.isnan(pairs.rate_a[1:]).all()
    assert pairs.names == ["a", "b", "c"]
    assert read_pairs(path, clip=False).rate_b[0] == 1.2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("profile_a,profile_b,gpu_model,rate_a\n", "no column rate_b"),
        (PAIRS, "no pairs"),
        (PAIRS + "a,x,V100,1,0.5,0.5\n", "input.csv:2: unknown profile 'x'"),
        (PAIRS + "a,b,V100,1,0,0.5\n", "a rate of 0"),
        (PAIRS + "a,b,V100,1,50,50\n", "rate_a is 50"),
        (PAIRS + "a,b,V100,1,0.5,\n", "one rate is missing"),
        (PAIRS + "a,b,V100,yes,0.5,0.5\n", "feasible is 'yes'"),
        (PAIRS + "a,b,V100,1,0.5,0.5\nb,a,V100,1,0.5,0.5\n", "'a beside b' again"),
        (PAIRS + "a,b,V100,1,0.5,0.5\na,a,T4,1,0.5,0.5\n", "GPU models mixed"),
    ],
)
def test_bad_pairs_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        read_pairs(file(tmp_path, text), profiles=["a", "b"])


def test_observations_may_repeat(tmp_path: Path) -> None:
    path = file(tmp_path, PAIRS + "a,b,V100,1,0.5,0.5\nb,a,V100,1,0.6,0.4\n")
    assert len(read_pairs(path, repeats=True)) == 2


def test_missing_file_and_directory_are_said(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be read: No such file"):
        read_pairs(tmp_path / "none.csv")
    with pytest.raises(BadInput, match="no directory"):
        write_rows(tmp_path / "none" / "out.csv", ["a"], [])


def test_written_files_are_whole(tmp_path: Path) -> None:
    write_rows(tmp_path / "out.csv", ["a", "b"], [(1, 2.5)])
    assert (tmp_path / "out.csv").read_text() == "a,b\n1,2.5\n"
    assert [path.name for path in tmp_path.iterdir()] == ["out.csv"]
