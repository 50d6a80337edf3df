"""The sampler of one job on one node: started by the prolog, ended by the epilog, in nobody's way.

    python -m slurm_gpushare.telemetry.sampler JOB NODE GPUS

It writes an interim record every InterimSeconds and a final one at the end. Whatever fails here (NVML, munge,
a full disk) costs numbers, never the job.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence

from slurm_gpushare.config import Config, load_config
from slurm_gpushare.errors import GpushareError
from slurm_gpushare.telemetry.measure import AFTER_PROFILE, Measurement
from slurm_gpushare.telemetry.node_state import NodeState
from slurm_gpushare.telemetry.processes import Members, cgroup_lister, scontrol_lister
from slurm_gpushare.telemetry.record import Closed, Kind
from slurm_gpushare.telemetry.run import Identity
from slurm_gpushare.telemetry.spool import SpoolError, send_record

_END = (signal.SIGTERM, signal.SIGINT)
_GONE_S = 300.0  # no process of the job for so long: its epilog has been missed
_INTERIM_TO_STORE_S = 300.0
_RETRY_S = 5.0
_RETRIES = 24  # a final record waits two minutes for a spool that is full or away


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
        self._state = NodeState.of(config.state_dir, node)
        self._measurement = Measurement(
            [Identity(job_id, node, gpu) for gpu in gpus],
            Members(lambda: (cgroup_lister(job_id) or scontrol_lister(job_id, node))()),
            limit_s=config.probe_s,
            neighbours=lambda gpu: self._state.neighbours(job_id, gpu),
            log=self._log,
        )

    def _log(self, message: str) -> None:
        log(f"job {self._job_id}: {message}")

    def run(self) -> None:
        """Sample until the epilog's signal, or until the job's processes have been gone for long."""
        measurement, config = self._measurement, self._config
        self._wait_for_pid_file()
        # A record that goes straight to the database costs half a second of CPU, so those that can wait are fewer.
        interim_s = config.interim_s if config.records_to == "spool" else max(config.interim_s, _INTERIM_TO_STORE_S)
        last_seen = time.monotonic()
        next_record = last_seen + interim_s
        while self._state.is_wanted(self._job_id):
            began = time.monotonic()
            measurement.step()
            if measurement.members.processes:
                last_seen = began
            elif began - last_seen > _GONE_S:
                self._log("its processes are gone and no epilog came: ending")
                self._state.forget(self._job_id)
                break
            if measurement.profiling and self._state.epoch_is_over(self._job_id):
                measurement.close_profile(Closed.EPOCH)
            if began >= next_record:
                next_record = began + interim_s
                self._write(Kind.INTERIM)
            period = config.sample_s * (1 if measurement.profiling else AFTER_PROFILE)
            pause = began + min(period, config.interim_s) - time.monotonic()
            if signal.sigtimedwait(_END, max(0.001, pause)):
                break
        self._finish()

    def _wait_for_pid_file(self) -> None:
        """The prolog writes it just after starting us; if it does not come, the epilog was even faster."""
        for _ in range(40):
            if self._state.is_wanted(self._job_id):
                return
            time.sleep(0.05)

    def _write(self, kind: Kind) -> bool:
        """Spool a record for each card; False, and a line in the log, if one could not be."""
        try:
            for record in self._measurement.records(kind):
                send_record(record, self._config)
        except SpoolError as error:
            self._log(str(error))
            return False
        return True

    def _finish(self) -> None:
        for _ in range(_RETRIES):
            if self._write(Kind.FINAL):
                return
            if signal.sigtimedwait(_END, _RETRY_S):
                break
        self._log("the final record is lost")


def main(arguments: Sequence[str]) -> None:
    """Run for ``JOB NODE GPUS`` (``4711 n7 0,2``)."""
    # Before any thread: they inherit it, and so every signal waits for the loop. The prolog has us ignore SIGTERM
    # until here, lest an epilog that comes early kill a record; the missing pid file then says that it came.
    signal.pthread_sigmask(signal.SIG_BLOCK, _END)
    for number in _END:
        signal.signal(number, signal.SIG_DFL)
    try:
        job, node, gpus = arguments
        Sampler(load_config(), int(job), node, [int(gpu) for gpu in gpus.split(",")]).run()
    except GpushareError as error:
        log(str(error))
    except Exception as error:  # noqa: BLE001 - the last line of defence: a bug must leave a trace and nothing else
        log(f"{type(error).__name__}: {error}")
    os._exit(0)  # a thread that hangs inside the driver must not keep the process


if __name__ == "__main__":
    main(sys.argv[1:])
