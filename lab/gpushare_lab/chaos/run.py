"""A chaos run: the stream goes on while one fault follows the other; then the books are read."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from gpushare_lab.chaos.books import (
    SHORTEST_S,
    Books,
    SlurmsDoing,
    TimeOnCard,
    forgotten_at_kills,
    grown,
    jobs_by_fault,
    over_committed,
    stays,
    without_end,
)
from gpushare_lab.chaos.fault import Fault
from gpushare_lab.chaos.site import ChaosSite, Vitals
from gpushare_lab.chaos.slurm_faults import heal_nodes
from gpushare_lab.chaos.stream import KINDS, MEAN_S, Stream
from gpushare_lab.known_profiles import enter_profiles
from gpushare_lab.testbed.processes import wait_until
from gpushare_lab.testbed.reset import reset
from gpushare_lab.testbed.testbed import Testbed
from slurm_gpushare.protocol.errors import GpushareError, SlurmError
from slurm_gpushare.slurm.accounting import AccountedJob, AccountingQuery
from slurm_gpushare.store import Store
from slurm_gpushare.store.hookfile import HookFile
from slurm_gpushare.store.intake import waiting_jobs

SETTINGS = {"SampleSeconds": "0.5", "InterimSeconds": "5", "LeaseSeconds": "10", "HeartbeatSeconds": "20"}
FINISH_S = 600.0
"""Longest wait for the jobs that are left at the end."""
LAST_WORD_S = 150.0
"""Longest wait for accounting's last word, and again for the helper's: a sampler tries for two minutes to be heard."""
RECOVER_S = 120.0
"""After a fault the helper must have finished a tick within this."""
AFTER_S = 30.0
"""So long after a node went down or a prolog died Slurm may still end a job because of it."""
CLOSE_S = 15.0
"""What a record's length and accounting's may differ by: the sampler starts after the job, and its machine is busy."""


@dataclass(frozen=True, slots=True)
class ChaosProgress:
    """What the display shows."""

    fault: str
    number: int
    total: int
    submitted: int
    queue: Counter[str] | None
    """None: slurmctld does not answer."""
    alive: bool
    elapsed_s: float


Tell = Callable[[ChaosProgress], None]


@dataclass
class Chaos:
    """One run."""

    testbed: Testbed
    faults: Collection[Fault]
    every_s: float
    """Time between two submissions."""
    least_jobs: int
    tell: Tell
    kinds: Sequence[str] = KINDS
    """Of jobs, in turn."""
    mean_s: float = MEAN_S
    """How long a job works."""
    pace: float = 1.0
    """How much longer every fault lasts than it should; less than 1 for a quick look."""
    sharing: bool = True
    seed: int = 1
    minutes: float = 28.0
    """No fault begins later than this."""
    enough: bool = False
    """Set it to end early: faults that have not begun are left out, and the books are of the others."""

    def run(self) -> tuple[Books, list[Vitals]]:
        """All faults, one after the other."""
        reset(self.testbed)
        self.testbed.configure(slurm={"MaxJobCount": "60000"}, gpushare=SETTINGS)
        self._site = ChaosSite(self.testbed, self.sharing)
        self._stream = Stream(self.testbed, self.seed, self.mean_s, self.kinds, tokens=self.sharing)
        self._begun, self._next_s, self._told_s = time.monotonic(), 0.0, 0.0
        self._fault, self._number = "", 0
        self._killing: list[tuple[float, float]] = []
        with Store.create(self._site.config.store_url) as store:
            enter_profiles(store, self._stream.profiles)
            store.observations.add(self._stream.observations)
            HookFile(self._site.config.hook_file).sync(store, 0)
        self._give_to_slurm_user()
        self._site.start_helper()
        self._site.wait_alive()
        watch = self._site.watch()
        errors, took_s, back_s = {}, {}, {}
        try:
            for number, fault in enumerate(self.faults, start=1):
                if self.enough or time.monotonic() - self._begun > 60 * self.minutes:
                    break
                self._fault, self._number, begun = fault.name, number, time.monotonic()
                self._stream.kinds = fault.kinds or self.kinds
                try:
                    fault.inject(self._site, lambda seconds: self._go_on(self.pace * seconds))
                    back_s[fault.name] = self._recover()
                except (GpushareError, AssertionError, OSError) as error:
                    errors[fault.name] = str(error)
                took_s[fault.name] = time.monotonic() - begun
                if fault.kills:
                    now_s = time.time()
                    self._killing.append((now_s - took_s[fault.name] - 1, now_s + AFTER_S))
            while len(self._stream.submitted) < self.least_jobs and not self.enough:
                self._go_on(1)
            self._finish()
        finally:
            self._site.end_watch(watch)
            self._site.stop_helper()
        books = self._books()
        books.lines = [line for line in books.lines if line.fault in took_s]
        for line in books.lines:
            line.error, line.took_s = errors.get(line.fault, ""), round(took_s[line.fault], 1)
            line.back_s = round(back_s.get(line.fault, 0.0), 1)
        return books, self._site.vitals

    def _give_to_slurm_user(self) -> None:
        for path in self._site.store_path.parent.iterdir():
            owner = self._site.store_path.parent.stat()
            if path.is_file():
                os.chown(path, owner.st_uid, owner.st_gid)

    def _go_on(self, seconds: float) -> None:
        """Let time pass: submit what is due, and tell."""
        end = time.monotonic() + seconds
        while True:
            now = time.monotonic()
            if now >= self._next_s:
                self._stream.submit(self._fault)
                self._next_s = max(now, self._next_s + self.every_s)
            if now - self._told_s > 2:
                self._told_s = now
                self._tell()
            if time.monotonic() >= end:
                return
            time.sleep(min(0.2, max(0.01, end - time.monotonic())))

    def _recover(self) -> float:
        """Until the helper has beaten anew: the next fault must not hide this one. How long that took, in seconds."""
        begun, since_s = time.monotonic(), time.time()
        while self.sharing and not self._site.is_alive(since_s):
            if time.monotonic() > begun + RECOVER_S:
                raise GpushareError("the helper did not recover within two minutes")
            self._site.revive_helper()
            self._go_on(0.5)
        return time.monotonic() - begun

    def _tell(self) -> None:
        try:
            queue: Counter[str] | None = Counter(job.state for job in self._site.slurm.jobs())
        except SlurmError:
            queue = None
        passed_s = time.monotonic() - self._begun
        alive = self._site.is_alive()
        self.tell(
            ChaosProgress(
                self._fault, self._number, len(self.faults), len(self._stream.submitted), queue, alive, passed_s
            )
        )

    def _finish(self) -> None:
        """Until the queue is empty, accounting has heard of every end, and the helper has taken in all there is."""
        self._fault, self._number = "the rest", len(self.faults)

        def empty() -> bool:
            self._tell()
            heal_nodes(self._site)
            self._cancel_forgotten()
            time.sleep(1)
            return not self._site.slurm.jobs()

        wait_until(empty, FINISH_S)
        wait_until(self._accounting_heard_all, LAST_WORD_S)
        if self.sharing:
            wait_until(self._helper_took_all_in, LAST_WORD_S)
            since_s = time.time()
            wait_until(lambda: self._site.is_alive(since_s), RECOVER_S)  # a whole tick with nothing left to do

    def _accounting_heard_all(self) -> bool:
        time.sleep(0.5)  # every question is a process
        try:
            accounted = self._accounted()
        except SlurmError:
            return False
        slurms = SlurmsDoing(crashes=self._site.crashes)
        return not without_end(self._stream.submitted, accounted, self._stream.marks(), slurms)

    def _helper_took_all_in(self) -> bool:
        """No sampler has a record to write, none lies in the spool or waits for its job, and no span is open."""
        time.sleep(0.5)
        if self._site.processes("node.sampler") or any(self._site.config.spool_dir.glob("[in]*/*.rec")):
            return False
        known = {job.raw_id for job in self._accounted().values()}
        with Store(self._site.config.store_url) as store:
            return not known.intersection(waiting_jobs(store.database)) and not store.sharing.open()

    def _cancel_forgotten(self) -> None:
        """What an administrator does with jobs whose end a killed slurmctld forgot: they would last to their limits."""
        slurms = SlurmsDoing(crashes=self._site.crashes)
        last = {mark.job_id: mark for mark in self._stream.marks()}
        over = [mark for mark in last.values() if mark.what == "end" and slurms.forgot([mark.at_s])]
        ended = {mark.job_id for mark in over if time.time() - mark.at_s > AFTER_S}
        if forgotten := [job.key for job in self._site.slurm.jobs() if job.running and job.raw_id in ended]:
            self._site.shell(f"scancel {' '.join(forgotten)}")

    # -- the books -------------------------------------------------------------------------------
    def _books(self) -> Books:
        accounted = self._accounted()
        marks = self._stream.marks()
        slurms = SlurmsDoing(self._killing, self._site.crashes)
        lines, lost = jobs_by_fault(self.faults, self._stream.submitted, accounted, marks, slurms)
        there = stays(marks, self._sacct(duplicates=True), self._site.crashes)
        books = Books(lines, over_committed=over_committed(there), leaked=self._leaked(), lost_jobs=lost)
        books.grew = grown(self._site.vitals)
        books.kills = forgotten_at_kills(self._stream.submitted, accounted, marks, slurms)
        books.suspended = sum(job.stands_still for job in self._site.slurm.jobs())
        if self.sharing:
            forgotten = {mark.job_id for mark in marks if slurms.forgot([mark.at_s])}
            self._read_store(books, accounted, there, forgotten)
        return books

    def _accounted(self) -> dict[str, AccountedJob]:
        return {job.key: job for job in self._sacct(duplicates=False)}

    def _sacct(self, duplicates: bool) -> list[AccountedJob]:
        wanted = {job.raw.partition("_")[0] for job in self._stream.submitted}
        return list(self._site.slurm.accounting(AccountingQuery(jobs=sorted(wanted), duplicates=duplicates)))

    def _leaked(self) -> list[str]:
        found = self.testbed.run(["scontrol", "show", "node", "-o"]).stdout.splitlines()
        return [line.split()[0] for line in found if "gres/" in line.partition(" AllocTRES=")[2].partition(" ")[0]]

    def _read_store(
        self, books: Books, accounted: dict[str, AccountedJob], there: Collection[TimeOnCard], forgotten: set[int]
    ) -> None:
        with Store(self._site.config.store_url) as store:
            books.open_spans = len(store.sharing.open())
            books.spans = sum(1 for _ in store.sharing.between(0, 2**33))
            books.pauses = sum(decision.kind == "paused" for decision in store.decisions.between(0, 2**33))
            runs = [run for run in store.runs.between(0, 2**33) if run.by_node]
            interim = set(store.live.of_jobs({job.raw_id for job in accounted.values()}))
        counted = Counter((run.job_id, run.gpu_index, round(run.start_s)) for run in runs)
        books.records = len(runs)
        books.records_twice = sorted({job for (job, _, _), count in counted.items() if count > 1})
        last = {run.job_id: run for run in sorted(runs, key=lambda run: run.end_s)}
        own_s = {stay.job_id: stay.end_s - stay.begin_s for stay in there}
        by_fault = {line.fault: line for line in books.lines}
        for job in self._stream.submitted:
            found = accounted.get(job.raw)
            if job.token is None or found is None or found.state != "COMPLETED" or found.elapsed_s < SHORTEST_S:
                continue
            if found.raw_id in forgotten:
                continue
            run = last.get(found.raw_id)
            if run is None and found.raw_id not in interim and found.raw_id in own_s:
                by_fault[job.fault].records_lost += 1
                books.lost_records.append(found.raw_id)
            elif run is not None:
                took_s = run.end_s - run.start_s
                # While slurmctld is away a job ends for accounting only when it is back; the job itself knows better.
                true_s = [found.elapsed_s, own_s.get(found.raw_id, found.elapsed_s)]
                if min(abs(took_s - truth_s) for truth_s in true_s) > CLOSE_S:
                    books.disagree.append(f"{found.raw_id}: {took_s:.0f} and {found.elapsed_s:.0f} s")
