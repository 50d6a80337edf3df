"""What the store knows that the snapshot needs, and where it keeps what the helper learns of pairs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from slurm_gpushare.coschedule.ledger import Ledger, Turn
from slurm_gpushare.coschedule.observe import Facts, Workload, whose
from slurm_gpushare.slurm.queue import Job
from slurm_gpushare.store.store import Store
from slurm_gpushare.store.workloads import LOG_DURATION


def tokens_in(jobs: Iterable[Job]) -> set[str]:
    """Tokens of the jobs that take part in sharing."""
    return {token for job in jobs if (token := whose(job)) is not None}


class StoreFacts:
    """Reads facts from the store once a tick."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._card_mem_mib: dict[str, int] = {}
        self._records_since_s = 0.0

    def read(self, jobs: Collection[Job], ledger: Ledger, avoid: Mapping[str, frozenset[str]], now_s: float) -> Facts:
        """Facts about the jobs that are in the queue now."""
        profiles = self._store.profiles.of(tokens_in(jobs))
        for record in self._store.live.since(self._records_since_s):
            if record.features.mem_total_mib:
                self._card_mem_mib[record.node] = int(record.features.mem_total_mib)
        self._records_since_s = now_s - 120.0
        return Facts(
            workloads={
                token: Workload(
                    profile.cluster, profile.mem_used_mib, profile.duration_s, profile.scatter.get(LOG_DURATION)
                )
                for token, profile in profiles.items()
            },
            sharing=ledger.sharing(),
            card_mem_mib=dict(self._card_mem_mib),
            # Where a node has not told yet, the smallest card on which any of these jobs was seen.
            default_card_mem_mib=min((profile.mem_total_mib for profile in profiles.values()), default=0),
            never_together=self._store.sharing.forbidden(),
            avoid=avoid,
        )

    def keep(self, turn: Turn, gpu_model: str, now_s: float) -> None:
        """Write begun and ended pairs to the store."""
        if turn.begun:
            self._store.sharing.begin([pair.span(gpu_model) for pair in turn.begun])
        if turn.ended:
            gone = {pair.key for pair in turn.ended}
            ids = {
                span.id: int(now_s)
                for span in self._store.sharing.open()
                if (span.resident_job, span.guest_job) in gone
            }
            self._store.sharing.end(ids)
