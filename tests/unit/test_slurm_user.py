"""Who runs slurmctld, as Slurm's configuration says."""

from __future__ import annotations

import pytest

from slurm_gpushare.slurm.nodes import SlurmUser, slurm_user


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ("slurm(64030)", ("slurm", 64030)),
        ("root(0)", ("root", 0)),
        ("slurm", ("slurm", None)),
        ("a.b(x)", ("a.b", None)),
    ],
)
def test_name_and_uid_are_told_apart(said: str, found: tuple[str, int | None]) -> None:
    assert slurm_user({"SlurmUser": said}) == SlurmUser(*found)


def test_without_a_word_it_is_slurm() -> None:
    assert slurm_user({}) == SlurmUser("slurm", None)
