"""How well jobs are paired by what the knowledge predicts, and how fast it is.

Pairings: batches of 20 jobs are matched by maximum weight of the predicted packing saving. The score is the share of
the way from random pairing to the oracle that knows the measured rates, for PS and for the worse job's ISD, of the
means over all batches. No model is fitted on a family that it is scored on, and spreads are learned inside each fit.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_matrix

from slurm_gpushare.knowledge.cells import packing_saving_pct
from slurm_gpushare.knowledge.fitting import fit
from slurm_gpushare.knowledge.interference import Telemetry
from slurm_gpushare.knowledge.kb import KnowledgeBase, default_kb, default_model, feature, telemetry
from slurm_gpushare.knowledge.rates import UNIT_SD, RateTable
from slurm_gpushare.knowledge.tables import PairTable, ProfileTable, read_pairs, read_profiles

Floats = NDArray[np.float64]

BATCHES = 150
BATCH = 20
DRAWS = 3
"""So many ways of choosing which pairings were observed; scores are their mean, with the standard deviation."""
REFIT = 30
"""Observations between two joint refits of the online learner."""
NO_SAVING = 0.5
"""The rate of pairs that do not fit together: they run one after the other and save nothing."""


def matching(weight: Floats) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """The perfect matching of greatest weight."""
    first, second = np.triu_indices(len(weight), 1)
    edges = np.arange(len(first))
    degree = csr_matrix((np.ones(2 * len(first)), (np.r_[first, second], np.r_[edges, edges])))
    chosen = milp(
        -weight[first, second],
        constraints=LinearConstraint(degree, 1, 1),
        integrality=np.ones(len(first)),
        bounds=Bounds(0, 1),
    ).x
    return first[chosen > 0.5], second[chosen > 0.5]


class CardHandovers:
    """Random batches of jobs, and how well a table of weights pairs them."""

    def __init__(self, rates: Floats, batches: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.batches = [rng.integers(len(rates), size=BATCH) for _ in range(batches)]
        self._ps = packing_saving_pct(rates, rates.T)
        self._isd = (1.0 / np.minimum(rates, rates.T) - 1.0) * 100.0  # of the job that suffers more
        everyone = [np.ix_(batch, batch) for batch in self.batches]
        upper = np.triu_indices(BATCH, 1)
        self.random = np.array([[self._ps[at][upper].mean(), self._isd[at][upper].mean()] for at in everyone]).mean(0)
        self.oracle = self.outcome(self._ps)

    def score(self, weight: Floats) -> Floats:
        share: Floats = (self.outcome(weight) - self.random) / (self.oracle - self.random)
        return share

    def outcome(self, weight: Floats) -> Floats:
        found = []
        for batch in self.batches:
            i, j = matching(weight[np.ix_(batch, batch)])
            found.append([self._ps[batch[i], batch[j]].mean(), self._isd[batch[i], batch[j]].mean()])
        return np.array(found).mean(axis=0)


def rate_table(pairs: PairTable, names: tuple[str, ...]) -> Floats:
    place = {name: at for at, name in enumerate(names)}
    rates = np.full((len(names), len(names)), np.nan)
    for a, b, rate_a, rate_b in zip(pairs.profile_a, pairs.profile_b, pairs.rate_a, pairs.rate_b, strict=True):
        i, j = place[a], place[b]
        rates[i, j], rates[j, i] = (rate_a, rate_b) if i != j else ((rate_a + rate_b) / 2,) * 2
    return np.minimum(rates, 1.0)


def among(pairs: PairTable, names: set[str], chosen: set[tuple[str, str]] | None = None) -> PairTable:
    """The pairs of these profiles only, or of these pairs only."""
    both = list(zip(pairs.profile_a, pairs.profile_b, strict=True))
    rows = [
        at
        for at, (a, b) in enumerate(both)
        if a in names and b in names and (chosen is None or (a, b) in chosen or (b, a) in chosen)
    ]
    return PairTable(
        tuple(both[at][0] for at in rows),
        tuple(both[at][1] for at in rows),
        pairs.gpu_model,
        pairs.feasible[rows],
        pairs.rate_a[rows],
        pairs.rate_b[rows],
    )


def partners(names: tuple[str, ...], count: int, rng: np.random.Generator) -> set[tuple[str, str]]:
    """Random pairings of which every job is in about `count`: each draws half as many partners, itself among them."""
    draws = min((count + 1) // 2, len(names))
    return {(name, names[at]) for name in names for at in rng.choice(len(names), draws, replace=False)}


def ridge_rates(old: ProfileTable, measured: PairTable, new: ProfileTable) -> Floats:
    """Ridge regression of the log slow-down on both jobs' telemetry and its products."""
    from sklearn.linear_model import RidgeCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    rates = rate_table(measured, old.names)
    known = np.isfinite(rates).ravel()
    model = make_pipeline(StandardScaler(), RidgeCV(np.logspace(-2, 3, 11)))
    model.fit(_both(old)[known], -np.log(rates.ravel()[known]))
    return np.exp(-np.maximum(model.predict(_both(new)), 0.0)).reshape(len(new), len(new))


def _both(profiles: ProfileTable) -> Floats:
    columns = [profiles.column(name) / 100.0 for name in ("gpu_util_mean_pct", "mem_access_mean_pct")]
    columns.append(profiles.column("mem_used_mib") / profiles.column("mem_total_mib"))
    costs = [np.repeat(column, len(column)) for column in columns]
    costs += [np.tile(column, len(column)) for column in columns]
    costs += [np.outer(column, column).ravel() for column in columns]
    return np.column_stack(costs)


def cell_rates(base: KnowledgeBase, new: ProfileTable) -> Floats:
    """The rates of the K-means clusters that the jobs fall in, and nothing else."""
    assert base.model is not None
    clusters = base.model.assign(np.column_stack([feature(new, name) for name in base.model.features]))
    rates = np.ones((base.k, base.k))
    for cell in base.cells:
        rates[cell.victim, cell.neighbour] = cell.rate
    return rates[np.ix_(clusters, clusters)]


def shipped(new: ProfileTable) -> RateTable:
    """What the shipped V100 prior says of these jobs, by their telemetry alone."""
    knowledge = default_kb().knowledge()
    knowledge.profiled(new.names, telemetry(new))
    return knowledge.rates(new.names, new.names)


def online(base: KnowledgeBase, new: ProfileTable, told: PairTable, seed: int) -> RateTable:
    """As the helper learns: one observation after the other in random order, a joint refit every `REFIT` of them."""
    knowledge = base.knowledge()
    knowledge.profiled(new.names, telemetry(new))
    weight = (UNIT_SD / base.interference.spread.noise) ** 2
    rows = [(told.profile_a[at], told.profile_b[at], float(told.rate_a[at])) for at in range(len(told))]
    rows += [(told.profile_b[at], told.profile_a[at], float(told.rate_b[at])) for at in range(len(told))]
    for number, at in enumerate(np.random.default_rng(seed).permutation(len(rows)).tolist(), start=1):
        knowledge.observe(*rows[at], weight)
        if number % REFIT == 0:
            knowledge.refit()
    return knowledge.rates(new.names, new.names)


def leave_groups_out(profiles: ProfileTable, pairs: PairTable, out: int, say: Callable[[str], None]) -> None:
    """Print the score of every way of predicting, on `out` families that were held back at a time."""
    gained: dict[str, list[Floats]] = {}
    possible: list[Floats] = []
    covered: list[float] = []
    held_back = list(combinations(sorted(set(profiles.groups)), out))
    for number, families in enumerate(held_back):
        known = [at for at, group in enumerate(profiles.groups) if group not in families]
        held = [at for at, group in enumerate(profiles.groups) if group in families]
        old, new = profiles.take(known), profiles.take(held)
        measured, hidden = among(pairs, set(old.names)), among(pairs, set(new.names))
        rates = rate_table(hidden, new.names)
        handovers = CardHandovers(rates, BATCHES // len(held_back), seed=number)
        possible.append(handovers.oracle - handovers.random)
        busy, access = new.column("gpu_util_mean_pct"), new.column("mem_access_mean_pct")
        base = fit(old, measured)
        cold = base.predict(new)
        covered.append(float(np.mean(rates >= cold.low)))
        tables = {
            "ridge regression": ridge_rates(old, measured, new),
            "K-means cells": cell_rates(base, new),
            "kb, cold": cold.mean,
            "shipped V100 prior, cold": shipped(new).mean,
        }
        for count in (5, 10) if out > 1 else ():
            for draw in range(DRAWS):
                drawn = partners(new.names, count, np.random.default_rng([number, count, draw]))
                told = among(hidden, set(new.names), drawn)
                tables[f"kb, {count} observed pairings a job#{draw}"] = base.predict(new, told).mean
                tables[f"{count} observed, learned online#{draw}"] = online(base, new, told, draw).mean
        weights = {
            "product of GPU utilisations": -np.outer(busy, busy),
            "product of memory accesses": -np.outer(access, access),
        } | {name: packing_saving_pct(table, table.T) for name, table in tables.items()}
        for name, weight in weights.items():
            gained.setdefault(name, []).append(handovers.outcome(weight) - handovers.random)
    say(f"{out} of {len(set(profiles.groups))} families held back, {len(held_back)} ways: share of the way to oracle")
    say(f"{'':36s} {'PS':>6s} {'ISD':>6s}")
    shares: dict[str, list[Floats]] = {}
    for name, found in gained.items():
        shares.setdefault(name.partition("#")[0], []).append(np.sum(found, axis=0) / np.sum(possible, axis=0))
    for name, draws in shares.items():
        say(f"{name:36s} {scored(draws)}")
    say(f"true rates above the cold predictions' low end: {np.mean(covered):.3f} (meant: 0.900)")
    if out > 1:
        say("observed: each job draws half as many partners at random as it is then seen with; both rates are told")


def scored(draws: Sequence[Floats]) -> str:
    """The mean score over draws, PS and ISD, and how far draws differ where there are several."""
    (ps, isd), (ps_sd, isd_sd) = np.mean(draws, axis=0), np.std(draws, axis=0)
    return f"{ps:6.2f} {isd:6.2f}" + (f"   +- {ps_sd:.2f} {isd_sd:.2f}" if len(draws) > 1 else "")


def v100_structure(pairs: PairTable, say: Callable[[str], None]) -> None:
    """How much of the log slow-down a product of two effects explains, and a sum of them."""
    log = -np.log(rate_table(pairs, tuple(pairs.names)))
    known = np.isfinite(log)
    left = {"sum": log - np.nanmean(log), "product": log}
    victim, neighbour = np.zeros(len(log)), np.zeros(len(log))
    for _ in range(100):
        victim = np.nanmean(left["sum"] - neighbour[None, :], axis=1)
        neighbour = np.nanmean(left["sum"] - victim[:, None], axis=0)
    left["sum"] = left["sum"] - victim[:, None] - neighbour[None, :]
    s, h = np.ones(len(log)), np.ones(len(log))
    for _ in range(100):
        s = np.nansum(log * h[None, :], axis=1) / np.sum(known * np.square(h)[None, :], axis=1)
        h = np.nansum(log * s[:, None], axis=0) / np.sum(known * np.square(s)[:, None], axis=0)
    left["product"] = log - np.outer(s, h)
    for name, rest in left.items():
        share = 1.0 - np.nansum(np.square(rest)) / np.nansum(np.square(log - np.nanmean(log)))
        say(f"V100: a {name} of victim and neighbour effects explains {share:.1%} of the variance of log slow-down")


def v100_observed(profiles: ProfileTable, pairs: PairTable, say: Callable[[str], None]) -> None:
    """`kb predict` on V100 jobs of held-back families, where nothing but observed pairings can tell."""
    families = list(combinations(sorted(set(profiles.groups)), 3))
    ways = [(0, 0), *((count, draw) for count in (5, 10) for draw in range(DRAWS))]
    gained: dict[tuple[int, int], list[Floats]] = {way: [] for way in ways}
    possible = []
    for number, held in enumerate(families[:: len(families) // 6]):
        old = profiles.take([at for at, group in enumerate(profiles.groups) if group not in held])
        new = profiles.take([at for at, group in enumerate(profiles.groups) if group in held])
        hidden = among(pairs, set(new.names))
        rates = rate_table(hidden, new.names)
        fits = np.isfinite(rates)
        handovers = CardHandovers(np.where(fits, rates, NO_SAVING), BATCHES // 6, seed=number)
        possible.append(handovers.oracle - handovers.random)
        base = fit(old, among(pairs, set(old.names)))
        for (count, draw), found in gained.items():
            drawn = partners(new.names, count, np.random.default_rng([number, count, draw]))
            table = base.predict(new, among(hidden, set(new.names), drawn)).mean if count else base.predict(new).mean
            table = np.where(fits, table, NO_SAVING)
            found.append(handovers.outcome(packing_saving_pct(table, table.T)) - handovers.random)
    say("V100, 3 families held back, no telemetry: share of the way to oracle (PS, ISD)")
    for count in (0, 5, 10):
        draws = [np.sum(gained[way], axis=0) / np.sum(possible, axis=0) for way in ways if way[0] == count]
        say(f"kb, {count:2d} observed pairings a job         {scored(draws)}")


def v100_learning(pairs: PairTable, say: Callable[[str], None]) -> None:
    """The same on the V100 pairs, where there is no telemetry and all must be learned from observations."""
    rates = rate_table(pairs, tuple(pairs.names))
    known = np.isfinite(rates)
    filled = np.where(known, rates, NO_SAVING)
    handovers = CardHandovers(filled, 60)
    rng = np.random.default_rng(0)
    base = default_kb().knowledge()
    places = np.argwhere(known)
    say("V100, learned online from the shipped prior (5 % noise): observations, PS, ISD, coverage of low")
    done = 0
    for target in (0, 130, 260, 520, 2000):
        for i, j in places[rng.integers(len(places), size=target - done)]:
            base.observe(pairs.names[i], pairs.names[j], float(rates[i, j] * np.exp(0.05 * rng.standard_normal())))
        done = target
        if done:
            base.refit()
        table = base.rates(pairs.names, pairs.names)
        mean = np.where(known, table.mean, NO_SAVING)
        ps, isd = handovers.score(packing_saving_pct(mean, mean.T))
        say(f"  {done:5d} {ps:6.2f} {isd:6.2f} {np.mean(rates[known] >= table.low[known]):6.3f}")


def speed(say: Callable[[str], None]) -> None:
    rng = np.random.default_rng(0)
    values = rng.uniform(0, 100, (100_000, 3))
    jobs = Telemetry(*(rng.uniform(0, 1, 1000) for _ in range(3)))
    model, knowledge = default_model(), default_kb().knowledge()
    thousand = [f"t{number}" for number in range(1000)]
    knowledge.profiled(thousand, jobs)
    say(f"assign 100,000 profiles: {best(lambda: model.assign(values)):.3f} s (limit 0.2)")
    say(f"predict 1,000,000 pairs: {best(lambda: knowledge.rates(thousand, thousand)):.3f} s (limit 1)")
    names = [f"t{number}" for number in range(200)]
    for total in (1_000, 10_000, 100_000):
        while knowledge.observations < total:
            i, j = rng.integers(200, size=2)
            knowledge.observe(names[i], names[j], 0.7)
        start = time.process_time()
        for number in range(1000):
            knowledge.observe(names[number % 200], names[number % 7], 0.7)
        say(f"one learning update after {total:7,d}: {(time.process_time() - start) * 1000:.1f} us (limit 200)")
    many = [f"m{number}" for number in range(10_000)]
    knowledge.profiled(many, Telemetry(*(rng.uniform(0, 1, len(many)) for _ in range(3))))
    for _ in range(2000):
        knowledge.observe(*(many[at] for at in rng.integers(len(many), size=2)), 0.7)
    start = time.process_time()
    knowledge.refit()
    say(f"one joint refit, {len(knowledge):,d} tokens, {len(knowledge.evidence()):,d} pairs: "
        f"{time.process_time() - start:.1f} s of CPU")  # fmt: skip


def best(call: Callable[[], object], times: int = 3) -> float:
    found = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return min(found)


def main(out: Path) -> None:
    lines: list[str] = []

    def say(line: str) -> None:
        print(line, flush=True)
        lines.append(line)

    data = Path(os.environ.get("GPUSHARE_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
    if data.is_dir():
        profiles = read_profiles(data / "rtx3090_profiles.csv")
        pairs = read_pairs(data / "rtx3090_pairs.csv", profiles.names, clip=False)
        say(f"pairings of held-back jobs, {BATCHES} batches of {BATCH}")
        leave_groups_out(profiles, pairs, 1, say)
        leave_groups_out(profiles, pairs, 3, say)
        v100 = read_pairs(data / "v100_pairs.csv")
        v100_structure(v100, say)
        v100_observed(read_profiles(data / "v100_profiles.csv"), v100, say)
        v100_learning(v100, say)
    else:
        say(f"no measured data in {data}: set GPUSHARE_DATA to score pairings")
    speed(say)
    (out / "knowledge.txt").write_text("\n".join(lines) + "\n")
