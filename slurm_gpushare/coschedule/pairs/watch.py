"""Is sharing what it was promised to be? Pairs are looked at while they last: measure, judge, act, learn."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from slurm_gpushare.config import Config
from slurm_gpushare.coschedule.durations import given_done
from slurm_gpushare.coschedule.pairs.judging import Standing
from slurm_gpushare.coschedule.pairs.keeping import Judged, Keeper
from slurm_gpushare.coschedule.pairs.ledger import Ledger, Pair, Turn
from slurm_gpushare.coschedule.pairs.measured_pairs import PairMeasurements, SeenPair
from slurm_gpushare.coschedule.pairs.memory import MemoryWatch
from slurm_gpushare.coschedule.pairs.past_profile import unlike_profile
from slurm_gpushare.coschedule.view.observe import View, expectation
from slurm_gpushare.coschedule.view.queue_facts import SharingCost, TokenFacts
from slurm_gpushare.coschedule.view.store_facts import token_facts
from slurm_gpushare.coschedule.view.taking_part import token_of
from slurm_gpushare.slurm.interface import Slurm
from slurm_gpushare.slurm.queue import Job
from slurm_gpushare.store import Store
from slurm_gpushare.store.conduct import BrokenPromise
from slurm_gpushare.store.decisions import Decision
from slurm_gpushare.store.workloads import Profile


class Watch:
    """Follows the pairs that share."""

    def __init__(self, config: Config, store: Store, slurm: Slurm, ledger: Ledger) -> None:
        self._store = store
        self._ledger = ledger
        self._promises = config.promises
        self._measured = PairMeasurements(store)
        self.keeper = Keeper(config, slurm)
        self._memory = MemoryWatch(config, store, slurm, self.keeper)
        self._started = False
        self._entered: set[tuple[int, int]] = set()

    def look(self, turn: Turn, view: View) -> list[Decision]:
        """Compare, act, learn; returns what was decided about jobs."""
        now_s, pairs = view.now_s, list(turn.now.values())
        if not self._started:
            self.keeper.forgotten.recall(self._store, view.jobs.values())
        # A helper that has just started lets everybody go on, and then judges anew.
        decisions = self.keeper.tidy(view, {pair.guest.raw_id for pair in pairs} if self._started else set())
        self._started = True
        jobs = {job.raw_id for pair in pairs for job in (pair.resident, pair.guest)}
        records = self._store.live.of_jobs(jobs) if jobs else {}
        by_model = self._store.profiles.by_model({token for pair in pairs for token in pair.tokens}) if pairs else {}
        for pair in pairs:
            seen = self._measured.take(pair, records, by_model.get(pair.gpu_model, {}))
            self._ledger.measured(pair.key, seen.rate(pair.resident), seen.rate(pair.guest))
        costs = self._ledger.sharing() if pairs else {}
        anew = self._store.conduct.to_measure() if pairs else frozenset()
        for pair in (self._ledger.pairs[pair.key] for pair in pairs if pair.key in self._ledger.pairs):
            seen, profiles = self._measured.of(pair), by_model.get(pair.gpu_model, {})
            judged = self._judge(pair, seen, profiles, costs, anew, now_s)
            self._note_broken(judged, now_s)
            decisions += self._memory.look(pair, seen.records, profiles, view)
            decisions += self.keeper.keep(judged, view)
        self._measured.learn(pairs, now_s)
        ended = self._measured.finish(turn.ended, now_s)
        return decisions + self._memory.ended(ended, now_s)

    def _note_broken(self, judged: Judged, now_s: float) -> None:
        """Keep the two apart from now on, and enter each broken promise once into the audit trail."""
        pair = judged.pair
        for (job, by), standing in zip(pair.sides, judged.standings, strict=True):
            if not standing.broken:
                continue
            self._store.sharing.ban(*pair.tokens, now_s)
            if (job.raw_id, by.raw_id) not in self._entered:
                self._entered.add((job.raw_id, by.raw_id))
                entry = BrokenPromise(
                    int(now_s), job.raw_id, job.uid, by.raw_id, by.uid, pair.card.node, pair.card.index,
                    round(standing.promise_pct, 1), round(standing.slowed_pct, 1),
                )  # fmt: skip
                self._store.conduct.broke([entry])

    def measured(self, raw_id: int) -> bool:
        """Whether a running job's rate was measured, not only predicted."""
        return self._measured.has(raw_id)

    def _judge(
        self,
        pair: Pair,
        seen: SeenPair,
        profiles: Mapping[str, Profile],
        costs: Mapping[int, SharingCost],
        anew: Collection[str],
        now_s: float,
    ) -> Judged:
        def standing(job: Job, rate: float) -> Standing:
            cost, measured = costs.get(job.raw_id, SharingCost()), seen.rates.get(job.raw_id)
            profile = profiles.get(token_of(job) or "")
            return Standing(
                promise_pct=self._promises.of(guest=cost.joined, own_pct=job.tag.max_isd_pct if job.tag else None),
                run_s=run_low_s(job, cost.lost_s, token_facts(profile) if profile else TokenFacts(), now_s),
                lost_s=cost.lost_s + job.paused_s(now_s),
                shared_s=self._ledger.shared_s(pair.key),
                loss=1.0 - min(1.0, rate),
                error=measured.error if measured else 0.0,
                measured=measured is not None,
            )

        true = [
            token_of(job) not in anew
            and not unlike_profile(seen.records.get(job.raw_id), profiles.get(token_of(job) or ""))
            for job in (pair.resident, pair.guest)
        ]
        return Judged(
            pair,
            standing(pair.resident, pair.resident_rate),
            standing(pair.guest, pair.guest_rate),
            guest_first=true[1] and not true[0],
        )


def run_low_s(job: Job, lost_s: float, facts: TokenFacts, now_s: float) -> float:
    """Alone-time of a running job's whole run if that is short: at least what it has done."""
    elapsed_s = max(0.0, now_s - (job.start_s or now_s) - job.paused_s(now_s))
    limit_s = float("inf") if job.limit_s is None else job.limit_s - job.given_s
    expected = expectation(job, facts)
    numbers = (expected.middle_s, expected.spread, limit_s, max(0.0, elapsed_s - lost_s))
    return float(given_done(*(np.array([number]) for number in numbers)).low_s[0])
