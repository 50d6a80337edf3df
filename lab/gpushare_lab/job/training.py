"""The emulated training loop: advance, publish, save, sleep until something is due."""

from __future__ import annotations

import random
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from gpushare_lab.emulator.card import Demand, EmulatedCard, Seat, now_us
from gpushare_lab.job import checkpoint, load
from gpushare_lab.job.progress import RateOf, Step, advance
from slurm_gpushare.protocol.errors import GpushareError

TICK_S = 0.25  # how often load is published; accuracy does not depend on it
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
SIGNALS = (*STOP_SIGNALS, signal.SIGCONT)
SHORTEST_SAMPLE_US = 100_000
NEARLY_S = 1e-6  # work that is left only by rounding


@dataclass(frozen=True)
class EmulatedJob:
    """What to run."""

    demand: Demand
    work_s: float
    epochs: int
    seed: int
    mem_grow_mib: int = 0  # allocated on top, halfway
    checkpoint: Path | None = None
    resume: bool = False
    epoch_file: Path | None = None
    clashes: frozenset[str] = frozenset()  # profiles that do not fit beside it, whatever their memory says

    @property
    def epoch_s(self) -> float:
        return self.work_s / self.epochs


class Stopped(Exception):
    """A signal asked the job to end; its progress is saved."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def train(job: EmulatedJob, card: EmulatedCard, rate_of: RateOf) -> None:
    """Run the job to its end, or raise Stopped, or OutOfMemory; the seat is free again in any case."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # they end our sleep instead of interrupting a step
    begun_s = checkpoint.load(job.checkpoint, job.work_s, job.epochs) if job.checkpoint and job.resume else 0.0
    seat = card.join(job.demand, job.clashes)
    training = _Training(job, card, seat, rate_of, begun_s)
    try:
        training.run()
    finally:
        seat.leave(training.at_us)
    if job.checkpoint:
        job.checkpoint.unlink(missing_ok=True)


class _Training:
    """Where a running job is: `done_s` of its work at the time `at_us`."""

    def __init__(self, job: EmulatedJob, card: EmulatedCard, seat: Seat, rate_of: RateOf, begun_s: float) -> None:
        self.job, self.card, self.seat, self.rate_of = job, card, seat, rate_of
        self.begun_s = self.done_s = self.epoch_begun_s = begun_s
        self.at_us = self.epoch_at_us = self.published_us = seat.joined_us
        self.published_s = begun_s
        self.epoch = min(int((begun_s + NEARLY_S) / job.epoch_s), job.epochs)
        self.first_epoch = self.epoch
        self.noise = random.Random(job.seed)
        self.to_grow_mib = job.mem_grow_mib

    def run(self) -> None:
        info = self.card.info
        _say(f"training on GPU {info.index} ({info.name}): {self.job.epochs} epochs, {self.job.work_s:g} s alone")
        if self.begun_s:
            _say(f"resumed after {self.begun_s:.3f} s of work, in epoch {self.epoch + 1}")
        self._publish(1.0)
        wait_s = self._left_in_epoch_s()
        while self.epoch < self.job.epochs:
            step = self._advance(signal.sigtimedwait(SIGNALS, max(0.0, min(wait_s, TICK_S))))
            if self.to_grow_mib and self.done_s >= self.job.work_s / 2:
                self.seat.grow(self.to_grow_mib)
                self.to_grow_mib = 0
            if self._left_in_epoch_s() <= NEARLY_S:
                self._end_epoch()
            if self.at_us - self.published_us >= SHORTEST_SAMPLE_US:
                self._publish((self.done_s - self.published_s) / ((self.at_us - self.published_us) / 1e6))
            self._burn()
            wait_s = self._left_in_epoch_s() / step.rate - (now_us() - self.at_us) / 1e6
        self._report("done")

    def _advance(self, got: signal.struct_siginfo | None) -> Step:
        look_us = max(now_us(), self.at_us)
        if got and got.si_signo == signal.SIGCONT and look_us - self.at_us > 2e6 * TICK_S:
            self.at_us = self.published_us = look_us  # it was suspended: that time was not worked
            self.published_s = self.done_s
        others = [stay for stay in self.card.occupants(self.at_us) if stay.slot != self.seat.slot]
        step = advance(self.at_us, look_us, self._left_in_epoch_s(), others, self.rate_of)
        self.done_s, self.at_us = self.done_s + step.work_s, step.until_us
        if got and got.si_signo in STOP_SIGNALS:
            self._save()
            self._report("stopped")
            raise Stopped(got.si_signo)
        return step

    def _publish(self, rate: float) -> None:
        """Show the mean load since the last time, as NVML's samples do."""
        begin, end = self.published_s / self.job.epoch_s, self.done_s / self.job.epoch_s
        self.seat.publish(load.sample(self.job.demand, begin, end, rate, self.at_us, self.noise))
        self.published_s, self.published_us = self.done_s, self.at_us

    def _left_in_epoch_s(self) -> float:
        return (self.epoch + 1) * self.job.epoch_s - self.done_s

    def _end_epoch(self) -> None:
        spent_s = max((self.at_us - self.epoch_at_us) / 1e6, NEARLY_S)
        speed = (self.done_s - self.epoch_begun_s) / spent_s
        self.epoch, self.epoch_at_us, self.epoch_begun_s = self.epoch + 1, self.at_us, self.done_s
        loss = 2.3 * 0.8**self.epoch * (1 + self.noise.uniform(-0.03, 0.03))
        _say(f"epoch {self.epoch}/{self.job.epochs} loss={loss:.4f} time_s={spent_s:.3f} rate={speed:.4f}")
        if self.epoch == self.first_epoch + 1 and self.job.epoch_file:
            _touch(self.job.epoch_file)
        if self.epoch < self.job.epochs:
            self._save()

    def _report(self, how: str) -> None:
        worked_s = self.done_s - self.begun_s
        time_s = max((self.at_us - self.seat.joined_us) / 1e6, NEARLY_S)
        isd = f"{100 * (time_s / worked_s - 1):.2f}" if worked_s > NEARLY_S else "---"
        _say(f"{how} work_s={worked_s:.3f} time_s={time_s:.3f} rate={worked_s / time_s:.4f} isd_pct={isd}")

    def _save(self) -> None:
        if self.job.checkpoint:
            try:
                saved = checkpoint.Checkpoint(self.job.work_s, self.job.epochs, self.done_s)
                checkpoint.save(self.job.checkpoint, saved)
            except GpushareError as error:
                _warn(str(error))  # the training itself goes on

    def _burn(self) -> None:
        """Use the CPU for real, so that the host's counters show the job's share."""
        due_s = self.job.demand.cpu_pct / 100 * (self.at_us - self.seat.joined_us) / 1e6
        until = time.monotonic() + TICK_S  # a machine that is too busy must not keep us from publishing
        while time.process_time() < due_s and time.monotonic() < until:
            pass


def _touch(path: Path) -> None:
    try:
        path.touch()
    except OSError as error:
        _warn(f"cannot touch GPUSHARE_EPOCH_FILE: {error}")


def _say(line: str) -> None:
    print(line, flush=True)


def _warn(line: str) -> None:
    print(f"workload: warning: {line}", file=sys.stderr, flush=True)
