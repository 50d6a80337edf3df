"""The helper on a testbed, in this process: known workloads, ticks, jobs that opted in."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

from gpushare_lab.experiment.submitting import submit
from gpushare_lab.known_profiles import KnownProfile, enter_profiles
from gpushare_lab.testbed.processes import wait_until
from gpushare_lab.testbed.testbed import Testbed

from slurm_gpushare.helper.changes import place
from slurm_gpushare.helper.daemon import Daemon
from slurm_gpushare.helper.occupancy import GpuAddress, placed_card
from slurm_gpushare.helper.tick import TickReport
from slurm_gpushare.protocol.settings import Config, load_config
from slurm_gpushare.slurm.commands import connect
from slurm_gpushare.slurm.queue import Job
from slurm_gpushare.slurm.values import type_index
from slurm_gpushare.store import Store
from slurm_gpushare.store.hookfile import HookFile

TOKENS = [f"gs-{letter * 20}" for letter in "abcdefghijklmnopqrstuvwxyz"]
SLEEP = "exec sleep 600"


class Site:
    """A testbed whose users' workloads are known, with a helper that ticks when told to."""

    def __init__(self, testbed: Testbed, duration_s: float = 600.0, owners: Mapping[int, int] | None = None) -> None:
        """`owners` are the users whose tokens are not root's, by number of the token."""
        self.testbed = testbed
        self.config: Config = load_config(testbed.layout.etc / "gpushare.conf")
        self.store = Store.create(self.config.store_url)
        profiles = [
            KnownProfile(t, (owners or {}).get(i, 0), "V100", 2000, 16384, i % 3, duration_s)
            for i, t in enumerate(TOKENS)
        ]
        enter_profiles(self.store, profiles)
        self.beat()

    def configure(self, **keys: str) -> None:
        """Other settings for hook and helper."""
        self.testbed.configure(gpushare=keys)
        self.config = load_config(self.config.source)

    def index(self, job: str) -> int:
        """A GPU index that the job can be sent to: before 23.11 the one that it was given at submission."""
        with self.environment():
            (found,) = connect().jobs([job])
        return type_index(found.shard.type) or 0 if found.shard else 1

    def block(self, cards: Iterable[GpuAddress]) -> None:
        """Strangers take these cards whole."""
        strangers = [self.plain(f"--gres=gpu:v100_{card.index}:1", f"--nodelist={card.node}") for card in cards]
        self.wait_running(strangers)

    def beat(self) -> None:
        """Say that a helper is alive, so that the hook makes jobs shareable."""
        HookFile(self.config.hook_file, self.config.gpu_models).sync(self.store)

    @contextmanager
    def environment(self) -> Iterator[None]:
        """Slurm commands of this process go to the testbed, as SlurmUser."""
        path = f"{self._commands()}:{self.testbed.env['PATH']}"
        with patch.dict(os.environ, {**self.testbed.env, "PATH": path}):
            yield

    def _commands(self) -> Path:
        """A directory with Slurm's commands as SlurmUser runs them."""
        directory = self.testbed.dir / "bin-slurm-user"
        if not directory.exists():
            directory.mkdir()
            for name in ("scontrol", "squeue", "sinfo", "sacct", "sacctmgr", "sdiag", "scancel", "sprio"):
                argv, _ = self.testbed.command([f"/usr/bin/{name}"], user=self.testbed.slurm_user)
                (directory / name).write_text(f'#!/bin/sh\nexec {shlex.join(argv)} "$@"\n')
                (directory / name).chmod(0o755)
        return directory

    def daemon(self, policy: str | None = None, **settings: object) -> Daemon:
        config = replace(self.config, **settings)  # type: ignore[arg-type]
        with self.environment():
            return Daemon(config, connect(), self.store, policy=policy)

    def tick(self, policy: str | None = None, **settings: object) -> TickReport:
        """One tick of a helper that was just started."""
        daemon = self.daemon(policy, **settings)
        with self.environment():
            return daemon.once()

    def jobs(self) -> dict[str, Job]:
        with self.environment():
            return {job.key: job for job in connect().jobs()}

    def ended(self, keys: Sequence[str]) -> dict[str, Job]:
        """Jobs that may have ended, with their times."""
        with self.environment():
            return {job.key: job for job in connect().jobs(keys)}

    def submit(
        self, token: int, *options: str, script: str = SLEEP, gres: str = "--gres=gpu:1", user: str | None = None
    ) -> str:
        """A job that opted in, by the number of its token."""
        common = (gres, "--mem=100", "--output=/dev/null", f"--comment=gpushare:{TOKENS[token]}")
        return str(submit(self.testbed, script, *common, *options, user=user, cwd=Path("/") if user else None))

    def plain(self, *options: str, script: str = SLEEP) -> str:
        """A job that did not."""
        return str(submit(self.testbed, script, "--mem=100", "--output=/dev/null", *options))

    def wait_running(self, keys: Sequence[str], timeout_s: float = 60) -> None:
        def running() -> bool:
            jobs = self.jobs()
            return all(key in jobs and jobs[key].running for key in keys)

        assert wait_until(running, timeout_s), self.picture()

    def picture(self) -> str:
        """Queue and nodes, for a failed assertion."""
        columns = "jobid:6,state:11,reason:24,tres-per-node:0 ,reqnodes:0 ,nodelist:0 ,admin_comment:0"
        asked = (["squeue", "-a", "-O", columns], ["sinfo", "-N", "-O", "nodelist:8,statecomplete:24,gresused:0"])
        return "\n".join(self.testbed.run(command).stdout for command in asked)

    @contextmanager
    def process(self, *options: str, works: bool = True) -> Iterator[subprocess.Popen[bytes]]:
        """``gpushare backfill`` as a process of its own; unless it need not work, it has when this begins."""
        HookFile(self.config.hook_file).beat(0)
        command = [sys.executable, "-m", "slurm_gpushare", "backfill", *options]
        with (self.testbed.dir / "log" / "backfill.log").open("ab") as log:
            argv, env = self.testbed.command(command, user=self.testbed.slurm_user)
            process = subprocess.Popen(argv, env=env, stderr=log, stdout=log)
        try:
            assert not works or wait_until(self.alive, 60), "the helper does not come up"
            if works:  # the hook may have the file open that this helper has replaced: it opens it anew every 2 s
                came_s = time.monotonic()
                assert wait_until(lambda: time.monotonic() > came_s + 3, 10)
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait(60)

    def alive(self) -> bool:
        return time.time() - (HookFile(self.config.hook_file).heartbeat_s() or 0) < 30


def pin(site: Site, job: str, card: GpuAddress) -> None:
    """Put a pending job on a card as the helper would, by its own means."""
    with site.environment():
        slurm = connect()
        (found,) = slurm.jobs([job])
        change = place(found, card, f"v100_{card.index}", 1, slurm.release, time.time())
        assert change is not None
        slurm.update_job(change.key, change.fields)
    assert placed_card(site.jobs()[job]) == card


def original(job: Job) -> bool:
    """Whether a pending job is as its owner asked for it."""
    if job.tag is None or job.tag.original is None:
        return False
    asked = [str(gres) for gres in job.gres if gres.count]
    return asked == [job.tag.original] and not job.tag.placed and job.wanted_nodes == (job.tag.nodes or "")
