"""Which errors make a card one that takes no guest: those that no program causes, and that nothing corrects."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from slurm_gpushare.node import nvml
from slurm_gpushare.node.nvml import Cards, NvmlCard


class Driver:
    """What a card answers; everything else it does not support."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ecc, self.xids = 0, list[int]()
        self.lost = False

        def ask(function: Any, *arguments: Any) -> Any:
            if self.lost:
                error = pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
                raise nvml.NvmlError(str(error)) from error
            answers = {
                "nvmlDeviceGetTotalEccErrors": lambda: self.ecc,
                "nvmlEventSetCreate": lambda: "events",
                "nvmlEventSetWait_v2": lambda: SimpleNamespace(eventData=self.xids.pop()) if self.xids else None,
            }
            return answers.get(function.__name__, lambda: None)()

        monkeypatch.setattr(nvml, "_ask", ask)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return Driver(monkeypatch)


def is_unsound(card: NvmlCard) -> bool:
    card.read(everything=True)
    return card.unsound


def test_a_card_without_errors_is_sound(driver: Driver) -> None:
    assert not is_unsound(NvmlCard("handle"))


def test_memory_errors_that_were_not_corrected_count_until_the_driver_forgets_them(driver: Driver) -> None:
    driver.ecc = 2
    assert is_unsound(NvmlCard("handle"))


@pytest.mark.parametrize(("xid", "unsound"), [(13, False), (31, False), (43, False), (48, True), (79, True)])
def test_an_error_of_a_program_is_none_of_the_card(driver: Driver, xid: int, unsound: bool) -> None:
    card = NvmlCard("handle")
    driver.xids = [xid]
    assert is_unsound(card) is unsound
    assert is_unsound(card) is unsound, "it is not forgotten by the next look"


def test_a_card_that_fell_off_the_bus_is_lost_until_it_answers(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "open_cards", lambda indices: {index: NvmlCard("handle") for index in indices})
    monkeypatch.setattr(nvml, "_NVML_RETRY_S", 0.0)
    said: list[str] = []
    cards = Cards([0], said.append)
    assert cards.read(everything=True)
    driver.lost = True
    assert cards.read(everything=True) == {}
    assert cards.lost
    driver.lost = False
    assert cards.read(everything=True)
    assert not cards.lost
