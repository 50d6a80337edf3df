"""Sensitivity times pressure: what telemetry and observations tell of rates."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from slurm_gpushare.knowledge.beliefs import Beliefs, Posterior
from slurm_gpushare.knowledge.empirical import adapt, fit, measured_noise
from slurm_gpushare.knowledge.interference import PESSIMISM, Interference, Observed, Spread, Telemetry, expected
from slurm_gpushare.knowledge.rates import RateTable

Floats = NDArray[np.float64]


def jobs(count: int, seed: int = 0) -> Telemetry:
    rng = np.random.default_rng(seed)
    busy = rng.uniform(0.05, 1.0, count)
    return Telemetry(busy, busy * rng.uniform(0.2, 0.8, count), np.full(count, 0.2))


def truth(telemetry: Telemetry, seed: int = 1, scale: float = 1.0) -> Floats:
    """Rates of a world that the model describes, with tokens that differ from what telemetry says."""
    rng = np.random.default_rng(seed)
    s = np.sqrt(telemetry.busy * telemetry.access) * np.exp(rng.normal(0, 0.25, len(telemetry)))
    h = telemetry.busy**1.5 * np.exp(rng.normal(0, 0.25, len(telemetry)))
    rates: Floats = np.exp(-scale * np.outer(s, h))
    return rates


def seen(rates: Floats, pairs: list[tuple[int, int]]) -> Observed:
    victim, neighbour = (np.array(side, dtype=np.intp) for side in zip(*pairs, strict=True))
    return Observed(victim, neighbour, rates[victim, neighbour], np.full(len(pairs), 0.012))


def cold(general: Interference, victims: Telemetry, neighbours: Telemetry | None = None) -> RateTable:
    """Rates of jobs that were never observed."""
    others = victims if neighbours is None else neighbours
    both = Telemetry(*(np.concatenate(pair) for pair in zip(columns(victims), columns(others), strict=True)))
    rows = np.arange(len(victims)), len(victims) + np.arange(len(others))
    return expected(*Beliefs(general, both).table(*rows), PESSIMISM)


def warm(general: Interference, jobs: Telemetry, observed: Observed) -> RateTable:
    """Rates after joint observations."""
    everyone = np.arange(len(jobs))
    return expected(*Posterior(general, jobs, observed).beliefs().table(everyone, everyone), PESSIMISM)


def columns(jobs: Telemetry) -> tuple[Floats, Floats, Floats]:
    return jobs.busy, jobs.access, jobs.filled


def everything(count: int) -> list[tuple[int, int]]:
    return [(i, j) for i in range(count) for j in range(count)]


def error(predicted: Floats, rates: Floats) -> float:
    return float(np.sqrt(np.mean((np.log(predicted) - np.log(rates)) ** 2)))


def test_busier_neighbours_are_predicted_to_slow_more() -> None:
    victim = Telemetry(np.array([0.6]), np.array([0.3]), np.array([np.nan]))
    ladder = Telemetry(np.array([0.1, 0.4, 0.7, 1.0]), np.array([0.05, 0.2, 0.35, 0.5]), np.full(4, np.nan))
    rates = cold(Interference(), victim, ladder)
    assert np.all(np.diff(rates.mean[0]) < 0)
    assert np.all(rates.low <= rates.mean)
    assert np.all((rates.mean > 0) & (rates.mean <= 1))


@pytest.mark.parametrize("scale", [0.4, 2.5])
@pytest.mark.slow
def test_fit_brings_cold_predictions_of_other_jobs_nearer(scale: float) -> None:
    """On a card where jobs disturb each other less, or more, than the priors say."""
    known, new = jobs(15), jobs(12, seed=7)
    fitted = fit(Interference(), known, seen(truth(known, scale=scale), everything(15)))
    rates = truth(new, seed=8, scale=scale)
    assert error(cold(fitted, new).mean, rates) < 0.7 * error(cold(Interference(), new).mean, rates)
    assert np.all(np.diag(fitted.coefficients.covariance) <= np.diag(Interference().coefficients.covariance) + 1e-12)


def test_each_observation_helps_unseen_pairs_too() -> None:
    new = jobs(12)
    rates = truth(new)
    pairs = [(i, (i + step) % 12) for step in range(1, 6) for i in range(12)]
    unseen = np.ones((12, 12), bool)
    for i, j in pairs:
        unseen[i, j] = False
    errors = []
    for count in (0, 24, 60):
        observed = seen(rates, pairs[:count]) if count else Observed(*(np.zeros(0, np.intp),) * 2, *(np.zeros(0),) * 2)
        errors.append(error(warm(Interference(), new, observed).mean[unseen], rates[unseen]))
    assert errors[0] > errors[1] > errors[2]


def test_observed_pairs_come_back() -> None:
    new = jobs(8)
    rates = truth(new)
    predicted = warm(Interference(), new, seen(rates, everything(8))).mean
    assert predicted == pytest.approx(rates, abs=0.03)


@pytest.mark.slow
def test_nine_of_ten_true_rates_lie_above_the_low_end() -> None:
    rates, low = [], []
    for seed in range(12):
        new = jobs(14, seed)
        rates.append(truth(new, seed + 50))
        low.append(cold(fit(Interference(), new, seen(rates[-1], everything(14))), new).low)
    assert 0.85 <= np.mean(np.array(rates) >= np.array(low)) <= 0.99


def test_one_bad_measurement_does_not_poison_a_job() -> None:
    new = jobs(10)
    rates = truth(new)
    pairs = [(i, j) for i, j in everything(10) if (i + j) % 2]
    spoilt = rates.copy()
    spoilt[3, 4] = 0.05
    clean = warm(Interference(), new, seen(rates, pairs)).mean
    dirty = warm(Interference(), new, seen(spoilt, pairs)).mean
    others = [j for j in range(10) if j != 4]
    assert np.abs(np.log(dirty[3, others]) - np.log(clean[3, others])).max() < 0.1


def test_jobs_without_telemetry_get_wide_intervals_and_learn() -> None:
    blank = Telemetry(*(np.full(6, np.nan),) * 3)
    before = cold(Interference(), blank)
    assert np.ptp(before.mean) < 1e-9
    rates = np.tile(np.array([0.95, 0.9, 0.8, 0.6, 0.5, 0.4]), (6, 1))
    pairs = [(i, j) for i, j in everything(6) if i != j and (i + j) % 3]
    after = warm(Interference(), blank, seen(rates, pairs))
    assert error(after.mean, rates) < 0.5 * error(before.mean, rates)


@pytest.mark.slow
def test_spreads_are_learned_from_the_pairs() -> None:
    """A world in which telemetry says all of a job, and one in which it says little."""
    known = jobs(14)
    exact = np.exp(-np.outer(np.sqrt(known.busy * known.access), known.busy))
    rng = np.random.default_rng(3)
    wild = exact ** np.exp(rng.normal(0, 0.8, 14))[:, None]
    told, untold = (fit(Interference(), known, seen(rates, everything(14))).spread for rates in (exact, wild))
    assert told.sensitivity < 0.6 * Spread().sensitivity
    assert untold.sensitivity > 1.3 * Spread().sensitivity
    assert told.noise == Spread().noise


def test_a_few_pairs_hardly_move_the_spreads() -> None:
    known = jobs(4)
    spread = adapt(Interference(), known, seen(truth(known), [(0, 1), (1, 0)])).spread
    assert spread.sensitivity == pytest.approx(Spread().sensitivity, rel=0.3)
    assert adapt(Interference(), known, seen(truth(known), [(0, 1)]).take(np.zeros(0, np.intp))).spread == Spread()


@pytest.mark.slow
def test_jobs_of_one_family_make_the_coefficients_less_certain_than_strangers() -> None:
    known = jobs(12)
    observed = seen(truth(known), everything(12))
    strangers = fit(Interference(), known, observed, np.arange(12))
    kin = fit(Interference(), known, observed, np.arange(12) // 6)
    assert np.trace(kin.coefficients.covariance) > np.trace(strangers.coefficients.covariance)


def test_noise_is_measured_where_rates_were_measured_twice() -> None:
    rng = np.random.default_rng(0)
    twice = [0.7 * np.exp(rng.normal(0, 0.03, 2)) for _ in range(200)]
    assert measured_noise(twice) == pytest.approx(0.03, rel=0.25)
    assert measured_noise([np.array([0.5])]) == Spread().noise


def test_a_full_card_is_learned_to_cost_something() -> None:
    """Jobs that differ only in how much memory they fill, and in what any neighbour costs them."""
    filled = np.linspace(0.05, 0.45, 9)
    known = Telemetry(np.full(9, 0.1), np.full(9, 0.05), filled)
    rates = np.exp(-0.02 - 0.3 * filled)[:, None] * np.ones(9)
    mean = cold(fit(Interference(), known, seen(rates, everything(9))), known).mean
    assert np.all(np.diff(mean[:, 0]) < 0)
    assert mean[0, 0] - mean[-1, 0] > 0.05


def test_what_a_job_costs_any_neighbour_alike_is_learned() -> None:
    """Neighbours that cost the sensitive and the insensitive the same: no product of the two tells that."""
    rng = np.random.default_rng(2)
    blank = Telemetry(*(np.full(12, np.nan),) * 3)
    s, h, e = np.exp(rng.normal(-1, 0.8, 12)), np.exp(rng.normal(-0.5, 0.5, 12)), rng.uniform(0.0, 0.5, 12)
    rates = np.exp(-np.outer(s, h) - e)
    pairs = [(i, j) for i, j in everything(12) if (i + j) % 3]
    unseen = np.array([(i + j) % 3 == 0 for i, j in everything(12)]).reshape(12, 12)
    alike, never = Interference(), Interference(spread=Spread(burden=1e-4))
    with_it, without = (
        warm(adapt(general, blank, seen(rates, pairs)), blank, seen(rates, pairs)).mean[unseen]
        for general in (alike, never)
    )
    assert error(with_it, rates[unseen]) < 0.6 * error(without, rates[unseen])


def test_wild_rates_do_not_stop_the_search_for_spreads() -> None:
    """Jobs of which some press a hundred times harder: a step too far makes the covariance singular."""
    rng = np.random.default_rng(12)
    pairs = [pair for pair, kept in zip(everything(12), rng.random(144) < 0.5, strict=True) if kept]
    log = np.outer(np.exp(rng.normal(0, 1.5, 12)), np.exp(rng.normal(0, 1.5, 12)))
    observed = replace(seen(np.exp(-np.minimum(log, 3.9)), pairs), noise=np.full(len(pairs), 1e-3))
    spread = adapt(Interference(), Telemetry(*(np.full(12, np.nan),) * 3), observed).spread
    assert spread.unknown > Spread().unknown
