"""When a sampler says that its job ended, and which cards it looks at."""

from __future__ import annotations

import fcntl
from pathlib import Path
from types import SimpleNamespace

import pytest

from slurm_gpushare.node import nvml, sampler
from slurm_gpushare.node.delivery import SpoolError
from slurm_gpushare.node.measure import Identity, RunSoFar
from slurm_gpushare.node.nvml import CardSearch, NvmlError
from slurm_gpushare.node.sampler import Sampler, map_job
from slurm_gpushare.protocol.record import Record, RecordKind
from slurm_gpushare.protocol.settings import Config, parse_config

JOB, START_S = 7, 1_800_000_000.0


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setenv("GPUSHARE_LAST_GOOD", str(tmp_path / "last-good"))
    return parse_config(f"StateDir={tmp_path}/state\nSpoolDir={tmp_path}/spool\n")


class Clock:
    """Time that passes only in waits, for the sampler."""

    def __init__(self) -> None:
        self.now = 0.0

    def time(self) -> float:
        return START_S + self.now

    def monotonic(self) -> float:
        return self.now

    def strftime(self, layout: str) -> str:
        return layout

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(sampler, "time", clock)
    return clock


class FewProcesses:
    """A job's processes, which end after some time."""

    def __init__(self, clock: Clock, until_s: float) -> None:
        self._clock, self._until_s = clock, until_s

    @property
    def processes(self) -> tuple[int, ...]:
        return (1,) if self._clock.now < self._until_s else ()


def record(end_s: float) -> Record:
    return RunSoFar(Identity(JOB, "n0", 0), START_S).record(RecordKind.INTERIM, end_s)


def run_sampler(
    config: Config,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    processes_s: float,
    epilog_s: float,
    spool_s: float,
) -> Record:
    """The final record of a job whose processes live `processes_s`; its epilog and the spool come when they come."""
    written: list[Record] = []

    def wait(signals: object, seconds: float) -> bool:
        clock.sleep(seconds)
        return clock.now >= epilog_s and not written and clock.now < epilog_s + seconds

    def send(record: Record, _: Config) -> None:
        if clock.now < spool_s:
            raise SpoolError("spool: no space")
        written.append(record)

    measurement = SimpleNamespace(
        step=lambda stopped: None, profiling=False, close_profile=lambda why: None, has_news=False, worked=False,
        has_neighbours=False, begins_to_share=False,
    )  # fmt: skip
    measurement.records = lambda kind, end_s=None: [record(clock.time() if end_s is None else end_s)]
    monkeypatch.setattr(sampler.signal, "sigtimedwait", wait)
    monkeypatch.setattr(sampler, "send_record", send)
    under_test = Sampler(config, JOB, "n0", [0])
    measurement.members = FewProcesses(clock, processes_s)
    monkeypatch.setattr(under_test, "_measure", lambda gpus: measurement)
    monkeypatch.setattr(type(under_test._state), "is_wanted", lambda self, job: clock.now < epilog_s)
    under_test.run()
    return written[-1]


@pytest.mark.parametrize(
    ("processes_s", "epilog_s", "spool_s", "ended_s"),
    [(60, 61, 0, 61), (60, 61, 100, 61), (60, 400, 0, 60), (60, 10_000, 0, 60)],
    ids=["as usual", "a spool that is away", "an epilog that comes late", "no epilog at all"],
)
def test_a_record_ends_when_its_job_did(
    config: Config, clock: Clock, monkeypatch: pytest.MonkeyPatch, processes_s: float, epilog_s: float, spool_s: float,
    ended_s: float,
) -> None:  # fmt: skip
    found = run_sampler(config, clock, monkeypatch, processes_s, epilog_s, spool_s)
    assert found.end_s - START_S == pytest.approx(ended_s, abs=5.0)


class Owner:
    """A job whose processes are 11 and 12."""

    def refresh(self) -> None: ...

    def owns(self, pid: int) -> bool:
        return pid in {11, 12}


def test_a_job_is_found_on_the_cards_that_its_processes_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "processes_by_card", lambda: {0: [5], 1: [12, 5], 2: [], 3: [11]})
    assert CardSearch(Owner()).look() == (1, 3)  # type: ignore[arg-type]


def test_a_card_search_outlives_a_driver_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> dict[int, list[int]]:
        raise NvmlError("GPU is lost")

    monkeypatch.setattr(nvml, "processes_by_card", broken)
    assert CardSearch(Owner()).look() == ()  # type: ignore[arg-type]


def test_dcgm_hears_of_every_card_of_a_job_and_of_none_after_its_end(tmp_path: Path) -> None:
    (tmp_path / "1").write_text("4242\n")
    assert map_job(tmp_path, 7, {1, 2}, lambda: True)
    assert map_job(tmp_path, 7, {1}, lambda: True)
    assert ((tmp_path / "1").read_text(), (tmp_path / "2").read_text()) == ("4242\n7\n", "7\n")
    assert (tmp_path / "2").stat().st_mode & 0o777 == 0o644
    assert map_job(tmp_path, 8, {1}, lambda: False), "its epilog was faster, and takes nothing away any more"
    assert (tmp_path / "1").read_text() == "4242\n7\n"


def test_dcgm_s_files_wait_for_an_epilog_that_writes_them(tmp_path: Path) -> None:
    with (tmp_path / ".gpushare.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert not map_job(tmp_path, 7, {1}, lambda: True)
    assert not (tmp_path / "1").exists()
    assert map_job(tmp_path, 7, {1}, lambda: True)
