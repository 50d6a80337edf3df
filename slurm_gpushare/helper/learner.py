"""What the helper knows of rates: brought up to date from the store after each ingest, rebuilt from it at the start."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from slurm_gpushare.helper import log
from slurm_gpushare.helper.cluster_assignment import (
    NewProfiles,
    assign_new,
    in_force,
)
from slurm_gpushare.helper.log import lower_priority
from slurm_gpushare.helper.pair_speeds import ACTIVITY_MEAN, CARD, Beside, is_believed, lessons, rates_of_run
from slurm_gpushare.knowledge.cells import Cell, balanced_partners, believed_cells, isd_matrix, ps_matrix
from slurm_gpushare.knowledge.interference import GANG_DOUBT, Telemetry
from slurm_gpushare.knowledge.kb import KnowledgeBase, default_kb
from slurm_gpushare.knowledge.learning import LearnedKnowledge, Refit
from slurm_gpushare.knowledge.rates import UNIT_SD, Knowledge, KnowledgeByModel
from slurm_gpushare.protocol.history import Span
from slurm_gpushare.protocol.record import UNDER_MPS, Record
from slurm_gpushare.store.refine import GPUS
from slurm_gpushare.store.sharing import Observation
from slurm_gpushare.store.store import Store
from slurm_gpushare.store.stored_jobs import StoredRun
from slurm_gpushare.store.workloads import Profile, models_of


class SiteKnowledge(KnowledgeByModel):
    """The learners of the site's models, by the cards' own names of them."""

    def __init__(self, store: Store, site_models: Sequence[str], *, writes: bool = True) -> None:
        """`writes`: False for a dry run, in which nothing is added to the store."""
        self._store = store
        self._writes = writes
        self._learners: dict[str, Learner] = {}
        self.site_models = site_models

    @property
    def learners(self) -> list[Learner]:
        """Of the site's models, in the order of gpushare.conf, and of those of them that were met under MPS."""
        models = models_of(self._store.database, self.site_models).values()
        return [self._learner(model) for model in dict.fromkeys((*models, *self._learners))]

    @property
    def titles(self) -> str:
        """The knowledge bases from which they start."""
        return "; ".join(f"{learner.gpu_model}: {learner.base.title}" for learner in self.learners)

    def take_bases(self) -> bool:
        """Start anew from the knowledge bases that were put in force since (``kb use``); whether there was one.

        What was learned of tokens is in the store, and is learned again on top of the new base.
        """
        bases = {model: base_in_force(self._store, model) for model in self._learners}
        changed = [model for model, base in bases.items() if base.to_json() != self._learners[model].base.to_json()]
        for model in changed:
            del self._learners[model]
        return bool(changed)

    def on(self, gpu_model: str) -> Knowledge:
        return self._learner(gpu_model).knowledge

    def catch_up(self, for_s: float = math.inf) -> int:
        """Take in new profiles and what was observed since; returns how many observations. As `Learner.catch_up`."""
        new = assign_new(self._store) if self._writes else ([], [])
        return sum(learner.catch_up(new, for_s) for learner in self.learners)

    @property
    def behind(self) -> bool:
        """Whether a learner had no time for all."""
        return any(learner.behind for learner in self._learners.values())

    def _learner(self, gpu_model: str) -> Learner:
        """The model's learner; one that nobody asked for until now has read all that there is."""
        if gpu_model not in self._learners:
            self._learners[gpu_model] = Learner(self._store, gpu_model, writes=self._writes)
            self._learners[gpu_model].catch_up(for_s=0.0)
        return self._learners[gpu_model]


# The paper's figure 5: what clusters do to each other, as this site has seen it and as the base in force has it.


@dataclass(frozen=True, slots=True)
class ClusterPairs:
    """ISD and PS by cluster, with the evidence."""

    gpu_model: str
    source: str
    clusters_from: str
    k: int
    cells: Sequence[Cell]
    evidence: int
    """A cell with fewer rates seen is left blank."""

    @property
    def title(self) -> str:
        return f"{self.gpu_model}, {self.source}"

    def isd(self) -> NDArray[np.float64]:
        return isd_matrix(self.cells, self.k, self.evidence)

    def ps(self) -> NDArray[np.float64]:
        return ps_matrix(self.cells, self.k, self.evidence)


def of_base(base: KnowledgeBase) -> ClusterPairs:
    """As a knowledge base has it."""
    return ClusterPairs(base.gpu_model, base.source or "of unknown source", base.clusters_from, base.k, base.cells, 1)


def of_site(store: Store, gpu_model: str) -> list[ClusterPairs]:
    """As this site's tokens have it, where there are any, and then as the base has it that they started from."""
    learner = Learner(store, gpu_model, writes=False)
    learner.catch_up()
    base = of_base(learner.base)
    if not learner.clusters:
        return [base]
    model = in_force(store, gpu_model)
    cells = believed_cells(model.model.k, learner.clusters, learner.knowledge)
    source = f"this site: {learner.knowledge.observations} observations of {len(learner.clusters)} tokens"
    how = "k-means on telemetry, " + (f"model {model.version}" if model.version else "the shipped model")
    return [ClusterPairs(gpu_model, source, how, model.model.k, cells, 0), base]


DURATION_SD = 0.1
"""How far two runs of the same job differ, relative: what an observation from elapsed times is worth."""
FULL_OBSERVATIONS = 200
"""A user whose jobs are watched more often than that has said what there is to say; others are to be heard too."""
REFIT_AFTER = 6
REFIT_SHARE = 0.1
"""All is solved anew after so many observations, and after this share of all of them."""
PROGRESS = "learner"
"""Under which name the store keeps how far runs were turned into observations."""
MOST_WAITING = 1000
"""So many jobs that still run are waited for, to know whom a run that ended was beside."""


def base_name(gpu_model: str) -> str:
    """Under which name the store keeps the knowledge base that is in force for a GPU model."""
    return f"kb/{gpu_model.upper()}"


def base_in_force(store: Store, gpu_model: str) -> KnowledgeBase:
    """The knowledge base that was put in force for a GPU model (``kb use``), else the shipped one."""
    body = store.knowledge.get(base_name(gpu_model))
    return default_kb() if body is None else KnowledgeBase.from_json(body, f"the knowledge base of {gpu_model}")


class Learner:
    """Keeps `knowledge` in step with the profiles and observations in the store."""

    def __init__(self, store: Store, gpu_model: str = "V100", *, writes: bool = True) -> None:
        """`writes`: False for a dry run, in which nothing is added to the store."""
        self._store = store
        self._writes = writes
        self.gpu_model = gpu_model
        self._card_model = gpu_model.removesuffix(UNDER_MPS)
        self.base = base_in_force(store, gpu_model)
        self.knowledge = self.base.knowledge()
        self.clusters: dict[str, int] = {}
        self._last_observation = 0
        self._progress = f"{PROGRESS}/{gpu_model}"
        progress = store.knowledge.get(self._progress) or {}
        self._last_run = int(progress.get("last_run", 0))
        self._new: deque[StoredRun] = deque()
        """Runs that were read and not yet learned from."""
        self.behind = False
        """Whether the last `catch_up` had no time for all runs that have ended."""
        self._waiting: dict[int, list[StoredRun]] = {}  # by the job whose own run will tell its token
        self._by_user: Counter[int] = Counter()
        self._background = BackgroundRefit(self.knowledge)
        self._started = False

    @property
    def partners(self) -> tuple[int, ...]:
        """For each cluster the one that it sits beside under the policy `paper`, by the base in force."""
        return balanced_partners(self.base.cells, self.base.k)

    def catch_up(self, new_profiles: NewProfiles | None = None, for_s: float = math.inf) -> int:
        """Take in new profiles and what was observed since, on this GPU model; returns how many observations.

        `new_profiles` is what `assign_new` said, where somebody has asked it for several models. After `for_s` seconds
        runs that have ended are left for the next call.
        """
        if not self._started:
            self._know(list(self._store.profiles.all(self._card_model)))
        if self._writes:
            changed, assigned = assign_new(self._store) if new_profiles is None else new_profiles
            self._know([profile for profile in changed if profile.gpu_model == self._card_model])
            here = (item for item in assigned if item.gpu_model == self._card_model)
            self.clusters.update({item.token: item.cluster for item in here})
            self._runs_ended(for_s)
        count = 0
        while batch := self._store.observations.after(self._last_observation):
            self._last_observation = batch[-1].id
            new = [item for item in batch if item.gpu_model.upper() == self.gpu_model]
            rows = self._weighed([item for item in new if item.victim and item.neighbour])
            if self._started:
                for row in rows:
                    self.knowledge.observe(*row)
            else:
                self.knowledge.recall(rows)
            count += len(new)
        if self._started:
            self._background.look()
        elif count:
            self.knowledge.refit()
        self._started = True
        return count

    def _weighed(self, new: Collection[Observation]) -> list[tuple[str, str, float, float]]:
        """Observations with what they count: of one user's jobs those beyond `FULL_OBSERVATIONS` ever less."""
        owners = self._store.workloads.owners_by_token({item.victim for item in new})
        rows = []
        for item in new:
            uid = owners.get(item.victim, -1)
            self._by_user[uid] += 1
            share = min(1.0, FULL_OBSERVATIONS / self._by_user[uid])
            rows.append((item.victim, item.neighbour, item.rate, item.weight * share))
        return rows

    def _know(self, profiles: Collection[Profile]) -> None:
        self.clusters.update({profile.token: profile.cluster for profile in profiles if profile.cluster is not None})
        if profiles:
            self.knowledge.profiled([profile.token for profile in profiles], telemetry_of(profiles))

    def _runs_ended(self, for_s: float) -> None:
        """Turn runs that ended into observations, those too that waited for the end of a neighbour's."""
        before, until_s = self._last_run, time.monotonic() + for_s
        while self._read_runs() and time.monotonic() < until_s:
            ended = self._new.popleft()
            for run in (ended, *self._waiting.pop(ended.job_id, ())):
                if run.by_node and run.shared_s > 0.0 and run.gpu_model == self._card_model:
                    self._learn_from(run)
            if not self._new or self._new[0].settled_seq > ended.settled_seq:
                self._last_run = ended.settled_seq
        if self._last_run != before:
            self._store.knowledge.put({self._progress: {"last_run": self._last_run}})

    def _read_runs(self) -> bool:
        """Read the next ones, unless some are left; whether there are any."""
        if not self._new:
            self._new.extend(self._store.runs.after(self._last_run))
        self.behind = bool(self._new)
        return self.behind

    def _learn_from(self, run: StoredRun) -> None:
        record, profile = self._store.runs.record(run.id), self._store.profiles.get(run.token, run.gpu_model)
        if record is None or (record.mps is not None) is not self.gpu_model.endswith(UNDER_MPS):
            return
        # Those of this run: a job that was requeued keeps its id.
        mine = self._store.sharing.of_jobs({run.job_id: [(run.start_s, run.end_s)]})
        spans = {span.side_of(run.job_id).neighbour: span for span in mine}
        beside = dict(self._beside(run, record, spans))
        alone_pct = profile.features.get(ACTIVITY_MEAN) if profile else None
        found = lessons(record, alone_pct, beside)
        new = [
            Observation(
                f"activity:{run.job_id}:{job}:{record.run_id}", self.gpu_model, run.token, beside[job].token,
                lesson.rate, lesson.weight, int(run.end_s),
            )
            for job, lesson in found.items()
        ]  # fmt: skip
        if profile is not None:
            new += (replace(item, gpu_model=self.gpu_model) for item in elapsed_observations(record, profile, beside))
        self._store.observations.add(new)
        rates = {job: lesson.rate for job, lesson in found.items()} | rates_of_run(record, alone_pct, beside)
        seen = [(span, rates.get(span.side_of(run.job_id).neighbour)) for span in mine]
        told = [(span, rate) for span, rate in seen if rate is not None]
        self._store.sharing.seen(
            {span.id: rate for span, rate in told if span.resident_job == run.job_id},
            {span.id: rate for span, rate in told if span.guest_job == run.job_id},
        )

    def _beside(self, run: StoredRun, record: Record, spans: dict[int, Span]) -> Iterator[tuple[int, Beside]]:
        """The job's neighbours whose tokens are known, by job."""
        for neighbour in record.neighbours:
            span = spans.get(neighbour.job_id)
            if span is not None:
                side = span.side_of(run.job_id)
                token, measured = side.neighbour_token, side.seen
            else:
                tokens = {
                    other.token
                    for other in self._store.runs.of_job(neighbour.job_id, [(run.start_s, float("inf"))])
                    if other.start_s <= run.end_s
                }
                token, measured = (tokens.pop() if len(tokens) == 1 else ""), None
            if not token:
                self._wait_for(neighbour.job_id, run)
            else:
                expected = float(self.knowledge.rates([run.token], [token]).mean[0, 0])
                yield neighbour.job_id, Beside(token, neighbour.seconds, expected, measured)

    def _wait_for(self, job_id: int, run: StoredRun) -> None:
        """Look at `run` again when its neighbour's own run has ended: no tick saw the two together."""
        while len(self._waiting) >= MOST_WAITING:  # a job without a token never has a run here
            del self._waiting[next(iter(self._waiting))]
        self._waiting.setdefault(job_id, []).append(run)


class BackgroundRefit:
    """Solves all that was observed jointly, in a thread of low priority, when enough is new."""

    def __init__(self, knowledge: LearnedKnowledge) -> None:
        self._knowledge = knowledge
        self._refit: Refit | None = None
        self._thread: threading.Thread | None = None
        self._at = 0

    def look(self) -> None:
        """Put a solution in force that is ready, and begin the next one when it is time."""
        if self._thread is not None:
            if self._thread.is_alive() or self._refit is None:
                return
            self._refit.install()
            self._thread = None
        seen = self._knowledge.observations
        if seen - self._at >= max(REFIT_AFTER, REFIT_SHARE * self._at):
            self._at = seen
            self._refit = Refit(self._knowledge)
            self._thread = threading.Thread(target=self._run, args=(self._refit,), name="refit", daemon=True)
            self._thread.start()

    @staticmethod
    def _run(refit: Refit) -> None:
        lower_priority()
        try:
            refit.run()
        except (np.linalg.LinAlgError, ValueError, FloatingPointError) as error:
            log.info("refit", error=str(error), kept="what was learned step by step")


def telemetry_of(profiles: Collection[Profile]) -> Telemetry:
    """The shares of time and memory of profiles; where only a maximum is known it stands in for the mean."""

    def column(*names: str) -> list[float]:
        found = (next((p.features[name] for name in names if name in p.features), np.nan) for p in profiles)
        return [value / 100.0 for value in found]

    filled = [p.mem_used_mib / p.mem_total_mib if p.mem_total_mib else np.nan for p in profiles]
    busy, access = column("gpu_util_mean_pct", "mgup"), column("mem_access_mean_pct", "mgtsamp")
    doubt = [GANG_DOUBT if p.features.get(GPUS, 1) > 1 else 1.0 for p in profiles]
    return Telemetry(*(np.array(values, dtype=np.float64) for values in (busy, access, filled, doubt)))


def elapsed_observations(record: Record, profile: Profile, beside: dict[int, Beside]) -> list[Observation]:
    """What a shared run's elapsed time says, given how long the token takes alone.

    alone + rate x shared = time alone. Only runs with one neighbour tell whose doing it was; a job that was stopped
    early would seem to have run faster than alone, and tells nothing.
    """
    if profile.duration_s is None or len(record.neighbours) != 1 or len(beside) != 1:
        return []
    if record.shared_s < 0.2 * profile.duration_s:
        return []
    rate = (profile.duration_s - record.alone_s) / record.shared_s
    if not 0.05 < rate <= 1.2:
        return []
    (other,) = beside.values()
    card = record.shared.stats.get(CARD)
    if not is_believed(rate, other.expected, card.mean if card else None):
        return []
    error = DURATION_SD * profile.duration_s / record.shared_s / rate
    weight = min(1.0, (UNIT_SD / error) ** 2)
    source, at_s = f"elapsed:{record.run_id}", int(record.end_s)
    return [Observation(source, profile.gpu_model, profile.token, other.token, min(rate, 1.0), weight, at_s)]
