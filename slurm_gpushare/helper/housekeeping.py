"""Looking after the store between ticks: what is old is forgotten, and damage is looked for.

Damage shows itself only where somebody reads. Until then records would be taken into a file that a copy must replace,
and be lost with it; in the spool they are safe.
"""

from __future__ import annotations

import time

from slurm_gpushare.helper import log
from slurm_gpushare.protocol.errors import ConfigError, GpushareError
from slurm_gpushare.protocol.files import uid_of
from slurm_gpushare.protocol.record import gpu_model
from slurm_gpushare.protocol.settings import Config
from slurm_gpushare.slurm.accounting import JobTokens
from slurm_gpushare.store import Store
from slurm_gpushare.store.credential import opener
from slurm_gpushare.store.ingest import Ingest
from slurm_gpushare.store.maintenance import damage, prune
from slurm_gpushare.store.statements import PRUNED_BEFORE

DAY_S = 86_400.0
LOOK_EVERY_S = 3600.0
"""At most so often is all of the store read,"""
LOOK_SHARE = 1e-5
"""and at most this share of the time is spent on it: not a second a day."""


class Housekeeping:
    """One store's: it runs in a worker, and remembers when it did what."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._forgot_at_s = float("-inf")
        self._look_at_s = 0.0
        """By the monotonic clock. At once after a start: the machine may have crashed."""

    def look_after(self, keep_days: int, now_s: float) -> None:
        """Do what is due. Nothing is forgotten while all of it is read: that would wait for the reader."""
        self.forget_old(keep_days, now_s)
        self.look_for_damage()

    def forget_old(self, keep_days: int, now_s: float) -> None:
        """Once a day: what the store has kept for KeepDays. A failure costs nothing but room until tomorrow."""
        before_s = now_s - DAY_S * keep_days
        if now_s - self._forgot_at_s < DAY_S and now_s >= self._forgot_at_s:
            return
        self._forgot_at_s = now_s
        try:
            if before_s - self._store.counters.all().get(PRUNED_BEFORE, 0) >= DAY_S:
                removed = prune(self._store, before_s)
                log.info("prune", older_than_days=keep_days, **removed)
        except GpushareError as error:
            log.warning("prune", error=str(error))

    def look_for_damage(self) -> None:
        """Read all of the store, if it is time. Where it is damaged, ticks fail from now on."""
        if time.monotonic() < self._look_at_s or not self._store.database.is_sqlite:  # a server looks itself
            return
        begun_s = time.monotonic()
        try:
            if found := damage(self._store.database):
                self._store.database.condemn(found)
        except GpushareError as error:  # it is locked, or away: ticks find that too
            log.warning("store", error=str(error))
        finally:
            done_s = time.monotonic()
            self._look_at_s = done_s + max(LOOK_EVERY_S, (done_s - begun_s) / LOOK_SHARE)


# Ingest as the helper and ``gpushare db ingest`` run it: the store's, with tokens from Slurm's tags.


def make_ingest(config: Config, store: Store, tags: JobTokens, *, known_users_only: bool = False) -> Ingest:
    """Takes records from the site's spool directory into `store`.

    ConfigError for a user in NodeUsers whom this machine does not know. For a helper that starts, `known_users_only`
    leaves such a name out and says so: then nobody's records but that user's are refused.
    """
    uids = {name: uid_of(name) for name in config.node_users}
    if unknown := [name for name, uid in uids.items() if uid is None]:
        error = ConfigError(f"NodeUsers: there is no user '{unknown[0]}'")
        if not known_users_only:
            raise error
        log.warning("settings", error=str(error), message="left out")
    return Ingest(
        store,
        config.spool_dir,
        opener(config.munge_socket),
        tags.resolve,
        node_uids=[uid for uid in uids.values() if uid is not None],
        gpu_models=[model for name in config.gpu_models if (model := gpu_model(name))],
    )
