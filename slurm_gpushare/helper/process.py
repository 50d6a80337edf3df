"""The helper from start to end: one at a time, with the lease, and a `Daemon` anew for another store."""

from __future__ import annotations

import gc
import sys
import time
from contextlib import ExitStack

from slurm_gpushare.helper import log
from slurm_gpushare.helper.daemon import Daemon
from slurm_gpushare.helper.lease import Lease, Lock, stand_by
from slurm_gpushare.helper.loop import retry_s
from slurm_gpushare.helper.tick import TickReport
from slurm_gpushare.protocol.errors import GpushareError
from slurm_gpushare.protocol.settings import Config
from slurm_gpushare.protocol.settings_in_force import remember
from slurm_gpushare.slurm.commands import Slurm
from slurm_gpushare.store import Store


def set_up_python() -> None:
    """Let Python look for cyclic garbage seldom, and change threads often.

    A tick of a large site makes and drops 100,000 objects, none of them in cycles: looking took a third of the tick.
    An answer to a node waits for Slurm, files and the loop a dozen times, and each time anew, as long as Python lets
    a thread go on, for the tick that is worked out beside it: 5 ms by default.
    """
    gc.set_threshold(100_000, 10, 10)
    sys.setswitchinterval(0.0005)


def backfill(config: Config, slurm: Slurm, *, once: bool, dry_run: bool, policy: str | None) -> TickReport | None:
    """Run the helper: one tick, or until it is told to stop. A dry run changes nothing and may run beside it."""
    with ExitStack() as stack:
        lock = None if dry_run else stack.enter_context(Lock(config.state_dir))
        set_up_python()
        lease: Lease | None = None
        tries, at_start, told_to_stop = 0, True, False
        while not told_to_stop:
            if not dry_run:
                lease = stand_by(config, slurm, lease, patient=not once)
                slurm.before_change = lease.renew_and_check if once else lease.check
            try:
                store = Store(config.store_url) if dry_run else Store.create(config.store_url)
                daemon = Daemon(config, slurm, store, policy=policy, dry_run=dry_run)
            except GpushareError as error:
                if at_start:
                    raise
                log.warning("store", error=str(error))
                tries += 1
                time.sleep(retry_s(tries))
                continue
            tries, at_start = 0, False
            if not dry_run:
                remember(config)
            with store:
                if store.is_new:
                    made = "there was none: it is made anew, and every workload is measured again"
                    log.warning("store", path=store.database.where, message=made)
                if once:
                    try:
                        return daemon.once()
                    finally:
                        if lease is not None:
                            lease.give_back()
                told_to_stop = daemon.run(lock, lease)
                config = daemon.config
        if lease is not None:
            lease.give_back()
        return None
