"""One line an event class a tick: counts in place of copies."""

from __future__ import annotations

import logging

import pytest

from slurm_gpushare.helper import log


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "gpushare")
    return caplog


def test_a_single_event_is_written_as_it_is(lines: pytest.LogCaptureFixture) -> None:
    log.noted("place", job="14", outcome="done", gpu="n1:2", why=None)
    assert lines.messages == []
    log.flush()
    assert lines.messages == ["event=place job=14 outcome=done gpu=n1:2"]
    log.flush()
    assert len(lines.messages) == 1


def test_five_hundred_of_a_kind_are_one_line(lines: pytest.LogCaptureFixture) -> None:
    for task in range(500):
        log.noted("wait", job=f"6_{task}", outcome="done", why="memory" if task % 4 else "promise")
        log.noted("place", job=f"7_{task}", outcome="done", gpu=f"n{task}:0", how="alone", ms=task)
    log.noted("wait", job="9", outcome="moved-on")
    log.flush()
    first = ",".join(f"6_{task}" for task in range(8))
    assert lines.messages == [
        f"event=wait count=500 outcome=done why=promise:125,memory:375 jobs={first},...",
        f"event=place count=500 outcome=done how=alone jobs={first.replace('6_', '7_')},...",
        "event=wait job=9 outcome=moved-on",
    ]
