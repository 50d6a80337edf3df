"""Empirical Bayes: coefficients and spreads of the interference model from the pairs that were measured.

Linearised at its solution (`beliefs.py`) the model is Gaussian, and its covariance is a sum of known matrices, each
times the square of one spread. The spreads are those of the greatest marginal likelihood times a wide log-normal prior
around where they started, so that few pairs move them little. Effects that a family of jobs has in common are part of
it: otherwise jobs of a few families would make the telemetry look more certain of other families than it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from slurm_gpushare.knowledge.beliefs import Posterior, kinship
from slurm_gpushare.knowledge.interference import Interference, Observed, Spread, Telemetry, jobs_known
from slurm_gpushare.knowledge.rates import Floats, Index

SPREADS = ("sensitivity", "pressure", "unknown", "offset", "burden", "pair_relative", "pair")
LOG_SD = 0.5
"""Of a spread about where it started, as a logarithm: two standard deviations are a factor of e."""
LOGIT_SD = 1.0
"""Of the family's share about where it started, as a logit."""
FURTHEST = 5.0
"""No spread is looked for further than so many of these from its start: beyond, matrices become singular."""
MAX_OBSERVATIONS = 600
"""Spreads are learned from at most so many rates: they are few, and the time grows with the cube."""
NOISE_WORTH = 5.0
"""How many repeated measurements the assumed noise is worth against the estimated one."""
_ROUNDS = 3


def fit(general: Interference, jobs: Telemetry, observed: Observed, families: Index | None = None) -> Interference:
    """Coefficients and spreads after these measurements; the jobs' own effects are integrated out."""
    known = jobs_known(jobs)
    busy, access, filled = general.typical
    if known.any():
        busy, access = general.design(jobs.take(known))[:, 1:].mean(axis=0).tolist()
    if not np.isnan(jobs.filled).all():
        filled = float(np.nanmean(jobs.filled))
    general = replace(general, typical=(busy, access, filled))
    general = adapt(general, jobs, observed, families)
    return replace(general, coefficients=Posterior(general, jobs, observed, families).coefficients)


def adapt(general: Interference, jobs: Telemetry, observed: Observed, families: Index | None = None) -> Interference:
    """The same coefficients with the spreads that these measurements make most likely."""
    from scipy.optimize import minimize  # here, so that reading a knowledge base does not pay for scipy

    if len(observed.rate) > MAX_OBSERVATIONS:
        observed = observed.take(np.linspace(0, len(observed.rate) - 1, MAX_OBSERVATIONS).astype(np.intp))
    start, wide = _free(general.spread), np.array([LOG_SD] * len(SPREADS) + [LOGIT_SD])
    bounds = list(zip(start - FURTHEST * wide, start + FURTHEST * wide, strict=True))
    for _ in range(_ROUNDS if len(observed.rate) else 0):
        evidence = _Evidence(Posterior(general, jobs, observed, families), families)

        def loss(free: Floats, evidence: _Evidence = evidence) -> tuple[float, Floats]:
            value, slope = evidence.loss(free)
            off = (free - start) / wide
            return value + 0.5 * float(off @ off), slope + off / wide

        at, options = _free(general.spread), {"maxiter": 15}
        found = minimize(loss, at, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
        general = replace(general, spread=_spread(general.spread, found.x))
    return general


def measured_noise(rates: Sequence[Floats]) -> float:
    """Relative error of one rate, from rates that were measured more than once (a job beside its own kind counts).

    The median is used, since a few measurements that went wrong are dealt with one by one.
    """
    assumed = Spread().noise
    differences = np.concatenate([np.abs(np.diff(np.log(each))) for each in rates if len(each) > 1] or [np.zeros(0)])
    if not len(differences):
        return assumed
    sd = float(np.median(differences)) / 0.6745 / np.sqrt(2.0)
    worth = len(differences)
    return float(np.sqrt((worth * sd**2 + NOISE_WORTH * assumed**2) / (worth + NOISE_WORTH)))


class _Evidence:
    """Minus the log density of the observations as a function of the spreads, at a fixed linearisation."""

    def __init__(self, posterior: Posterior, families: Index | None) -> None:
        seen, known = posterior.observed, jobs_known(posterior.jobs)
        victim, neighbour = seen.victim, seen.neighbour
        scale = np.outer(posterior.product, posterior.product)
        same_victim = (victim[:, None] == victim).astype(np.float64)
        same_neighbour = (neighbour[:, None] == neighbour).astype(np.float64)
        same = same_victim * same_neighbour
        kin = np.eye(len(posterior.jobs)) if families is None else kinship(families, 1.0)
        by_victim = kin[np.ix_(victim, victim)] * scale
        by_neighbour = kin[np.ix_(neighbour, neighbour)] * scale
        self._kin = [
            by_victim * np.outer(known[victim], known[victim]),
            by_neighbour * np.outer(known[neighbour], known[neighbour]),
            by_victim * np.outer(~known[victim], ~known[victim])
            + by_neighbour * np.outer(~known[neighbour], ~known[neighbour]),
        ]
        self._own = [self._kin[0] * same_victim, self._kin[1] * same_neighbour]
        blank = scale * (same_victim * ~known[victim] + same_neighbour * ~known[neighbour])
        self._own.append(blank)
        self._rest = [same_victim, same_neighbour, same * scale, same]
        prior = posterior.general.coefficients.covariance
        noise = np.diag(seen.noise**2 + 1e-8)
        self._fixed = posterior.jacobian @ prior @ posterior.jacobian.T + noise
        self._residual = posterior.residual

    def loss(self, free: Floats) -> tuple[float, Floats]:
        """Value and gradient by log spread, and by the logit of the family's share."""
        variances, share = np.exp(2.0 * free[:-1]), float(1.0 / (1.0 + np.exp(-free[-1])))
        mixed = [share * kin + (1.0 - share) * own for kin, own in zip(self._kin, self._own, strict=True)]
        parts = mixed + self._rest
        kernel = self._fixed + sum(variance * part for variance, part in zip(variances, parts, strict=True))
        inverse = np.linalg.inv(kernel)
        weights = inverse @ self._residual
        value = 0.5 * float(self._residual @ weights) + 0.5 * float(np.linalg.slogdet(kernel)[1])

        def slope(change: Floats) -> float:
            return 0.5 * float(np.sum(inverse * change)) - 0.5 * float(weights @ change @ weights)

        slopes = [2.0 * variance * slope(part) for variance, part in zip(variances, parts, strict=True)]
        towards = sum(v * (kin - own) for v, kin, own in zip(variances, self._kin, self._own, strict=False))
        slopes.append(share * (1.0 - share) * slope(np.asarray(towards)))
        return value, np.array(slopes)


def _free(spread: Spread) -> Floats:
    return np.array([*(np.log(getattr(spread, name)) for name in SPREADS), np.log(spread.family / (1 - spread.family))])


def _spread(spread: Spread, free: Floats) -> Spread:
    learned = {name: float(np.exp(value)) for name, value in zip(SPREADS, free, strict=False)}
    return replace(spread, **learned, family=float(1.0 / (1.0 + np.exp(-free[-1]))))
