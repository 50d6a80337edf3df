"""The helper beside an experiment: the real ``gpushare backfill``, from its first heartbeat to the experiment's end."""

from __future__ import annotations

import signal
import subprocess
import sys
from types import TracebackType

from gpushare_lab.testbed.daemons import last_lines
from gpushare_lab.testbed.processes import wait_until
from gpushare_lab.testbed.testbed import Testbed
from slurm_gpushare.protocol.errors import GpushareError
from slurm_gpushare.protocol.settings import load_config
from slurm_gpushare.store.hookfile import HookFile


class HelperProcess:
    """A helper as a process of its own, while a block runs."""

    COMMAND = (sys.executable, "-m", "slurm_gpushare")

    def __init__(self, testbed: Testbed, policy: str) -> None:
        self._testbed, self._policy = testbed, policy
        self.start()

    def start(self) -> None:
        """Start it, and wait for its first heartbeat."""
        testbed, policy = self._testbed, self._policy
        config = load_config(testbed.layout.gpushare_conf)
        log = testbed.layout.log / f"backfill-{policy}.log"
        with log.open("ab") as file:
            argv, env = testbed.command([*self.COMMAND, "backfill", f"--policy={policy}"], user=testbed.slurm_user)
            self._process = subprocess.Popen(argv, env=env, stdout=file, stderr=file)
        hook = HookFile(config.hook_file)
        before_s = hook.heartbeat_s() or 0.0
        up = wait_until(lambda: (hook.heartbeat_s() or 0.0) > before_s or self._process.poll() is not None, 180)
        if not up or self._process.poll():
            self.stop()
            raise GpushareError(f"the helper does not start: {last_lines(log)}")

    def stop(self) -> None:
        """Finish the tick that is under way, and end."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(60)

    def reload(self) -> None:
        """SIGHUP: it reads its settings anew."""
        self._process.send_signal(signal.SIGHUP)

    def kill(self) -> None:
        """SIGKILL, as in a crash."""
        self._process.kill()
        self._process.wait(60)

    def __enter__(self) -> HelperProcess:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _value: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.stop()
