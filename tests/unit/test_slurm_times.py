from __future__ import annotations

from datetime import datetime

import pytest

from slurm_gpushare.protocol.errors import BadInput
from slurm_gpushare.slurm.values import parse_time

NOW = datetime(2026, 11, 16, 14, 30, 15)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-11-01", datetime(2026, 11, 1)),
        ("2026-11-01T08:05", datetime(2026, 11, 1, 8, 5)),
        ("2026-11-01T08:05:09", datetime(2026, 11, 1, 8, 5, 9)),
        ("08:05", datetime(2026, 11, 16, 8, 5)),
        ("11/01", datetime(2026, 11, 1)),
        ("1101", datetime(2026, 11, 1)),
        ("11/01/25", datetime(2025, 11, 1)),
        ("today", datetime(2026, 11, 16)),
        ("Noon", datetime(2026, 11, 16, 12)),
        ("now", NOW),
        ("now-2hours", datetime(2026, 11, 16, 12, 30, 15)),
        ("now-1day", datetime(2026, 11, 15, 14, 30, 15)),
        ("now-30", datetime(2026, 11, 16, 14, 29, 45)),
    ],
)
def test_times_mean_what_they_mean_to_sacct(text: str, expected: datetime) -> None:
    assert parse_time(text, NOW) == expected


@pytest.mark.parametrize("text", ["", "soon", "2026-13-01", "25:00", "now-3moons", "31/12"])
def test_what_is_no_time_is_refused_with_examples(text: str) -> None:
    with pytest.raises(BadInput, match=r"is not a time.*YYYY-MM-DD"):
        parse_time(text, NOW)
