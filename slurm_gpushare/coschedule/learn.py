"""What the helper knows of rates: brought up to date from the store after each ingest."""

from __future__ import annotations

from slurm_gpushare.config import Config
from slurm_gpushare.knowledge.learning import LearnedKnowledge
from slurm_gpushare.store import Store


class Learner:
    """Keeps `knowledge` in step with the observations in the store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._last_id = 0
        self.knowledge = LearnedKnowledge()

    def catch_up(self, config: Config) -> int:
        """Take in what is new; returns how many observations."""
        count = 0
        while new := self._store.observations.after(self._last_id):
            for item in new:
                self.knowledge.observe(item.victim, item.neighbour, item.rate, item.weight)
            self._last_id = new[-1].id
            count += len(new)
        return count
