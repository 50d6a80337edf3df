"""The sampler of one job on one node: started by the prolog, ended by the epilog, in nobody's way.

    python -m slurm_gpushare.node.sampler JOB NODE GPUS

GPUS may be empty where Slurm did not say: the sampler then looks for the job's processes on the node's cards.
It writes an interim record every InterimSeconds and a final one at the end, and keeps the job standing still while the
helper's order says so. Whatever fails here (NVML, munge, a full disk) costs numbers, never the job.
"""

from __future__ import annotations

import fcntl
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from slurm_gpushare.node.delivery import OrderRelay, SpoolError, Undelivered, send_record
from slurm_gpushare.node.measure import AFTER_PROFILE, Identity, Measurement
from slurm_gpushare.node.mps import MpsError, end_clients, in_fault
from slurm_gpushare.node.nvml import Bounded, CardSearch, Stuck
from slurm_gpushare.node.processes import JobStop, Members, cgroup_lister, scontrol_lister
from slurm_gpushare.node.shares import Neighbours
from slurm_gpushare.protocol.errors import GpushareError
from slurm_gpushare.protocol.files import make_open_dir
from slurm_gpushare.protocol.record import Closed, Mps, Record, RecordKind
from slurm_gpushare.protocol.settings import Config
from slurm_gpushare.protocol.settings_in_force import settings_in_force
from slurm_gpushare.protocol.stop_orders import BelievedOrder, StopOrder, order_file, read_order

_END = (signal.SIGTERM, signal.SIGINT)
_GONE_S = 300.0  # no process of the job for so long: its epilog has been missed
_LATE_S = 10.0  # an epilog that comes so long after the last process: the job ended when that did
_SEARCH_S = 120.0  # a job whose processes have been on no card for so long uses none
_INTERIM_TO_STORE_S = 300.0
_SEARCH_LOCK = 9  # the prolog's: so many samplers may search at once
_BETWEEN_LOOKS_S = 1.0
_BETWEEN_MAPPINGS_S = 5.0
_BETWEEN_ASKS_S = 10.0
_GROWTH_S = 1.0  # between two records that tell of growing memory
_RETRY_S = 5.0
_ORDER_LIMIT_S = 2.0  # a file system that does not answer has no order for us
_SEND_LIMIT_S = 10.0  # ... and must not keep a job standing still
_ASK_LIMIT_S = 5.0  # a daemon that does not answer serves nobody
_RETRIES = 24  # so often; then the record waits for the next sampler


def log(message: str) -> None:
    """One line with the time; a log that cannot be written is no reason to stop."""
    try:
        print(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} sampler[{os.getpid()}] {message}", file=sys.stderr, flush=True)
    except OSError:
        return


class Sampler:
    """Measures one job until it is told to stop."""

    def __init__(self, config: Config, job_id: int, node: str, gpus: Sequence[int]) -> None:
        self._config = config
        self._job_id = job_id
        self._node = node
        self._state = NodeState.of(config.state_dir, node)

        def lister() -> set[int]:
            return (cgroup_lister(job_id) or scontrol_lister(job_id, node))()

        self._members = Members(lister)
        self._stop = JobStop(lambda: lister() | self._measurement.pids)
        self._order = BelievedOrder()
        self._order_file = order_file(config.spool_dir, node)
        self._relay: OrderRelay | None = None
        if config.records_to == "store":
            self._order_file = self._state.root / "stops"
            self._relay = OrderRelay(node, self._order_file)
        self._orders, self._deliveries, self._asking = Bounded(), Bounded(), Bounded()
        self._pipe = self._state.mps_pipe(job_id)
        self._mps_fault, self._mps_silent, self._next_ask_s = False, False, 0.0
        self._undelivered = Undelivered()
        self._stopped_before: frozenset[int] = frozenset()
        self._gpus = gpus
        self._mapped: set[int] = set()
        self._started_s = time.time()
        self._last_seen_s: float | None = None
        """When a process of the job was last seen; None if none was yet."""

    def _log(self, message: str) -> None:
        log(f"job {self._job_id}: {message}")

    def run(self) -> None:
        """Sample until the epilog's signal, or until the job's processes have been gone for long."""
        self._wait_for_pid_file()
        gpus = self._gpus or self._find_cards()
        if not self._gpus:
            with suppress(OSError):  # started by hand
                os.close(_SEARCH_LOCK)
        if gpus:
            self._measurement = self._measure(gpus)
            try:
                self._sample()
            finally:
                self._stop.close()
                if self._relay is not None:
                    self._relay.close()
            self._finish(self._ended_s())

    def _measure(self, gpus: Sequence[int]) -> Measurement:
        return Measurement(
            self._identities(gpus),
            self._members,
            limit_s=self._config.probe_s,
            start_s=self._started_s,
            neighbours=lambda gpu: self._state.neighbours(self._job_id, gpu),
            owner_uid=self._state.owner_uid(self._job_id, gpus[0]),
            log=self._log,
        )

    def _identities(self, gpus: Sequence[int]) -> list[Identity]:
        """One for each card; one for all of them where the job has all of the node's and gangs may share."""
        if self._config.share_gangs and len(gpus) == self._config.gpus_per_node > 1:
            return [Identity(self._job_id, self._node, gpus[0], others=tuple(gpus[1:]))]
        return [Identity(self._job_id, self._node, gpu) for gpu in gpus]

    def _find_cards(self) -> Sequence[int]:
        """The job's cards, where Slurm did not say; empty if the job has none, or has ended."""
        search, since = CardSearch(self._members), None
        while self._state.is_wanted(self._job_id):
            if search.look():
                signal.sigtimedwait(_END, _BETWEEN_LOOKS_S)  # a job of several cards opens them one after the other
                gpus = search.look()
                self._state.register(self._job_id, gpus)
                self._log(f"Slurm did not say which GPUs it has: found on {', '.join(map(str, gpus)) or 'none'}")
                return gpus
            now = time.monotonic()
            since = since or (now if self._members.processes else None)
            if (since and now - since > _SEARCH_S) or signal.sigtimedwait(_END, _BETWEEN_LOOKS_S):
                break
        return ()

    def _ended_s(self) -> float:
        """When the job ended: now, unless its processes have been gone for long."""
        now_s, seen_s = time.time(), self._last_seen_s
        return seen_s if seen_s is not None and now_s - seen_s > _LATE_S else now_s

    def _sample(self) -> None:
        measurement, config = self._measurement, self._config
        # A record that goes straight to the database costs half a second of CPU, so those that can wait are fewer.
        interim_s = config.interim_s if config.records_to == "spool" else max(config.interim_s, _INTERIM_TO_STORE_S)
        last_seen = last_record = time.monotonic()
        next_record = last_seen + interim_s
        search, next_look, look_until = CardSearch(self._members), last_seen, last_seen + _SEARCH_S
        while self._state.is_wanted(self._job_id):
            began = time.monotonic()
            turned = self._obey()
            if measurement.members.processes:
                last_seen, self._last_seen_s = began, time.time()
            elif began - last_seen > _GONE_S:
                self._log("its processes are gone and no epilog came: ending")
                self._state.forget(self._job_id)
                break
            if began >= next_look:
                next_look = began + _BETWEEN_MAPPINGS_S
                self._map_cards(search, look=began < look_until)
            if measurement.profiling and self._state.epoch_is_over(self._job_id):
                measurement.close_profile(Closed.EPOCH)
            # Nothing fences memory: when it grows the helper must know at once whether the two still fit.
            news = turned or self._asks_mps(began) or (began - last_record >= _GROWTH_S and measurement.has_news)
            if began >= next_record or news:
                sent = self._send(self._records(RecordKind.INTERIM))
                last_record, next_record = began, began + (interim_s if sent else self._config.interim_s)
            if signal.sigtimedwait(_END, max(0.001, began + self._until_next_look_s() - time.monotonic())):
                break

    def _until_next_look_s(self) -> float:
        """Nobody can tell when a look comes, or a job could stand still for it."""
        often = self._measurement.profiling or self._measurement.begins_to_share
        period_s = min(self._config.sample_s * (1 if often else AFTER_PROFILE), self._config.interim_s)
        return period_s * random.uniform(0.5, 1.5)

    def _obey(self) -> bool:
        """Take a look, and stand still or go on as the helper has ordered. Whether the job has stopped or gone on."""
        before = self._stop.holds, self._stop.woken
        stopped: frozenset[int] = frozenset()
        listens = self._stop.holds or self._measurement.has_neighbours
        if self._relay is not None:
            self._relay.keep(listens)
        if not listens:
            self._order.forget()
        elif self._relay is None or self._order_file.exists():
            order = self._order.believed(self._read_order())
            stopped = order.jobs
            if self._job_id in order.dying and (ended := self._ask_mps(partial(end_clients, owns=self._members.owns))):
                self._log(f"the MPS server has ended {ended} clients of it, which Slurm is about to kill")
        self._measurement.step(stopped | self._stopped_before)
        self._stop.look(self._job_id in stopped, self._order.renewals, self._measurement.worked)
        self._stopped_before = stopped
        after = self._stop.holds, self._stop.woken
        if before != after:
            self._log(f"{'stands still' if after[0] else 'goes on'}, {after[1]} times woken by others")
        return before != after

    def _read_order(self) -> StopOrder | None:
        path, user = self._order_file, self._config.slurm_user
        try:
            return self._orders.call(lambda: read_order(path, user), _ORDER_LIMIT_S)
        except Stuck:
            return None

    def _map_cards(self, search: CardSearch, look: bool) -> None:
        """Tell DCGM of the job's cards; with `look` of those too of which Slurm said nothing, where it named one."""
        directory = self._config.dcgm_job_mapping_dir
        if directory is None:
            return
        wanted = set(self._gpus) - self._mapped
        if look and len(self._gpus) == 1 and self._config.gpus_per_node > 1:
            wanted = {*self._gpus, *search.look()} - self._mapped
        try:
            if wanted and map_job(directory, self._job_id, wanted, lambda: self._state.is_wanted(self._job_id)):
                self._mapped |= wanted
        except OSError as why:
            self._log(f"DCGM's job mapping: {why}")
            self._mapped |= wanted  # said once

    def _wait_for_pid_file(self) -> None:
        """The prolog writes it just after starting us; if it does not come, the epilog was even faster."""
        for _ in range(40):
            if self._state.is_wanted(self._job_id):
                return
            time.sleep(0.05)

    def _records(self, kind: RecordKind, end_s: float | None = None) -> list[Record]:
        """One for each card, as they are now."""
        stopped_s, woken = round(self._stop.stopped_s, 3), self._stop.woken
        return [
            replace(it, stopped_s=stopped_s, woken=woken, mps=Mps.NOBODY if self._mps_fault else it.mps)
            for it in self._measurement.records(kind, end_s)
        ]

    def _send(self, records: Sequence[Record]) -> bool:
        """Leave them, and what waits of earlier jobs; False, and a line in the log, if they could not be left."""
        sent = False
        try:
            for record in records:
                self._deliveries.call(partial(send_record, record, self._config), _SEND_LIMIT_S)
            sent = True
            self._deliveries.call(partial(self._undelivered.deliver, self._config), _SEND_LIMIT_S)
        except (SpoolError, OSError) as error:
            self._log(str(error))
        except Stuck:
            self._log(f"no record can be left: {self._config.records_to} has not answered for {_SEND_LIMIT_S:g} s")
        return sent

    def _ask_mps(self, question: Callable[[Path], int]) -> int | None:
        """The answer of the daemon of its card; None if it is no client of one, or if that does not answer."""
        try:
            return None if self._pipe is None else self._asking.call(partial(question, self._pipe), _ASK_LIMIT_S)
        except (MpsError, Stuck):
            return None

    def _asks_mps(self, now: float) -> bool:
        """Whether it is news that its MPS server takes nobody any more, or that it does again."""
        if self._pipe is None or now < self._next_ask_s:
            return False
        self._next_ask_s, before = now + _BETWEEN_ASKS_S, self._mps_fault
        answer = self._ask_mps(in_fault)
        self._mps_fault = bool(answer) or (answer is None and self._mps_silent)  # a busy node may be slow once
        self._mps_silent = answer is None
        if self._mps_fault and not before:
            self._log("its MPS server is in FAULT or does not answer: nobody joins it there")
        return self._mps_fault is not before

    def _finish(self, ended_s: float) -> None:
        records = self._records(RecordKind.FINAL, ended_s)
        if self._send(records):
            return
        try:
            for record in records:
                self._undelivered.keep(record)
        except OSError as why:
            self._log(f"the final record cannot be kept: {why}")
        for _ in range(_RETRIES):
            if signal.sigtimedwait(_END, _RETRY_S):
                break
            if self._send(records):
                for record in records:
                    self._undelivered.drop(record)
                return
        self._log("the final record waits for the next sampler of this node")


def main(arguments: Sequence[str]) -> None:
    """Run for ``JOB NODE GPUS`` (``4711 n7 0,2``)."""
    # Before any thread: they inherit it, and so every signal waits for the loop. The prolog has us ignore SIGTERM
    # until here, so that an early epilog does not end us before a record is written; the missing pid file then tells us
    # that it came.
    signal.pthread_sigmask(signal.SIG_BLOCK, _END)
    for number in _END:
        signal.signal(number, signal.SIG_DFL)
    try:
        job, node, gpus = arguments
        Sampler(settings_in_force(), int(job), node, [int(gpu) for gpu in gpus.split(",") if gpu]).run()
    except GpushareError as error:
        log(str(error))
    except Exception as error:  # noqa: BLE001 - the last line of defence: a bug must leave a trace and nothing else
        log(f"{type(error).__name__}: {error}")
    os._exit(0)  # a thread that hangs inside the driver must not keep the process


# What prolog, epilog and sampler leave each other under StateDir (the shell's half is in prolog/).
#
#     nodes/NODE/jobs/JOB      pid and start time of the job's sampler
#     nodes/NODE/gpus/N/JOB    the job was given GPU N; its owner's uid
#     nodes/NODE/epoch/JOB     GPUSHARE_EPOCH_FILE: a null device that the job's user may touch, and no more
#     nodes/NODE/tokens/JOB    the job carries a token
#     nodes/NODE/mps/JOB       it is a client of MPS, with this pipe directory
#     nodes/NODE/holds         the epilogs' holds of the last minute: begin, end (ms), helper's beat, answered or not,
# job
#     nodes/NODE/stops         who is to stand still, where the database says so (RecordsTo=store)
#     nodes/NODE/search.N      held by one of the samplers that look for their jobs' GPUs
#     nodes/NODE/sampler.log   what the samplers had to say
#
# By node, since several slurmd may run on one machine.


@dataclass(frozen=True, slots=True)
class NodeState:
    """One node's directory."""

    root: Path

    @classmethod
    def of(cls, state_dir: Path, node: str) -> NodeState:
        return cls(state_dir / "nodes" / node)

    def is_wanted(self, job_id: int) -> bool:
        """Whether the job's pid file still names this process: the epilog takes it away."""
        try:
            words = (self.root / "jobs" / str(job_id)).read_text().split()
        except OSError:
            return False
        return words[:1] == [str(os.getpid())]

    def epoch_is_over(self, job_id: int) -> bool:
        """Whether the job has touched its epoch file, whose time the prolog set to 1970."""
        try:
            return (self.root / "epoch" / str(job_id)).lstat().st_mtime >= 1.0
        except OSError:
            return False

    def mps_pipe(self, job_id: int) -> Path | None:
        """The pipe directory of the MPS daemon whose client the job is; None if it is none."""
        try:
            return Path((self.root / "mps" / str(job_id)).read_text(encoding="ascii").strip())
        except (OSError, ValueError):
            return None

    def neighbours(self, job_id: int, gpu_index: int) -> Neighbours:
        """The other jobs that were given this GPU, with their owners' uids."""
        found: dict[int, int | None] = {}
        for path in (self.root / "gpus" / str(gpu_index)).glob("[0-9]*"):
            try:
                if path.name != str(job_id):
                    found[int(path.name)] = int(path.read_text())
            except OSError:
                continue  # it has just ended
            except ValueError:
                found[int(path.name)] = None
        return found

    def owner_uid(self, job_id: int, gpu_index: int) -> int | None:
        """Of a job that was given this GPU; None where the prolog did not say."""
        try:
            return int((self.root / "gpus" / str(gpu_index) / str(job_id)).read_text())
        except (OSError, ValueError):
            return None

    def register(self, job_id: int, gpus: Collection[int]) -> None:
        """Say that the job was given these GPUs: what the prolog does where it knows them."""
        for gpu in gpus:
            path = self.root / "gpus" / str(gpu) / str(job_id)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()

    def forget(self, job_id: int) -> None:
        """Remove what a job left whose epilog never came."""
        for path in (*self.root.glob(f"[je]*/{job_id}"), *self.root.glob(f"gpus/*/{job_id}")):
            path.unlink(missing_ok=True)


# DCGM's job mapping: a file for each card, a line for each job on it. The epilog takes the job's lines away.
#
# A prolog is not told all cards of a job that has several whole ones: where each card has a type of its own, Slurm from
# 23.11 on sets SLURM_JOB_GPUS to those of the last type. The sampler sees on which cards the job's processes are.


_MAPPING_LOCK = ".gpushare.lock"  # the epilog's too


def map_job(directory: Path, job_id: int, gpus: Collection[int], runs: Callable[[], bool]) -> bool:
    """Add the job to the files of these cards; False if another writer was in the way, and it should be tried again.

    `runs`: whether the epilog has not come yet. It says so before it takes the job's lines away, under the same lock.
    """
    make_open_dir(directory)
    with os.fdopen(os.open(directory / _MAPPING_LOCK, os.O_WRONLY | os.O_CREAT, 0o600), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        if not runs():
            return True
        for gpu in gpus:
            path = directory / str(gpu)
            lines = path.read_text().splitlines() if path.exists() else []
            if str(job_id) not in lines:
                # In place, and readable: exporters watch the file itself.
                path.write_text("".join(f"{line}\n" for line in [*lines, str(job_id)]))
                path.chmod(0o644)
    return True


if __name__ == "__main__":
    main(sys.argv[1:])
