"""What is believed of the coefficients, of every token and of every pair that was seen; by number, not by name.

Given the coefficients, tokens and pairs are taken as independent of each other:

    (z, w, c, e) of a token | coefficients  ~  Normal(own + follow (coefficients - prior mean), variance)

and p of a pair likewise. So an observation changes the coefficients, which all tokens follow, and its own two tokens
and their pair. It is a Kalman step of the model in `interference.py`, linearised at the current estimate, and takes
the same time however much was seen before. `beliefs.py` solves many observations at once and loses nothing.
"""

from __future__ import annotations

import math

import numpy as np

from slurm_gpushare.knowledge.interference import (
    COEFFICIENTS,
    LEAST_LOG,
    MOST_LOG,
    C,
    Coefficients,
    E,
    Interference,
    Observed,
    Telemetry,
    W,
    Z,
    blank_telemetry,
)
from slurm_gpushare.knowledge.rates import Floats, Index

OUTLIER_SD = 2.5
"""An observation further off than this many standard deviations counts only as if it were this far (Huber)."""

_LINEARISED = 3
"""A step is linearised at most so often, each time nearer to where it leads."""
_NEAR = 0.1


class Beliefs:
    """Arrays by token and by pair. The last row of the tokens' is always that of a token of which nothing is known."""

    def __init__(self, general: Interference, jobs: Telemetry | None = None) -> None:
        self.general = general
        self.mean = general.coefficients.mean.copy()
        self.covariance = general.coefficients.covariance.copy()
        blank = blank_telemetry(1)
        self.load, self.start = general.loads(blank), general.starts(blank)
        self.own = np.zeros((1, 4))
        self.follow = np.zeros((1, 4, COEFFICIENTS))
        self.variance = _diagonals(self.start)
        self.pairs: dict[tuple[int, int], int] = {}
        self.pair_at = np.zeros((0, 2), np.intp)
        self.pair_own = np.zeros(0)
        self.pair_follow = np.zeros((0, COEFFICIENTS))
        self.pair_variance = np.zeros(0)
        if jobs is not None:
            self.describe(np.arange(len(jobs)), jobs)

    def reserve(self, tokens: int) -> None:
        """Make room for so many tokens."""
        if tokens < len(self.own):
            return
        more = max(16, tokens, len(self.own))
        for name in ("load", "start", "own", "follow", "variance"):
            array = getattr(self, name)
            setattr(self, name, np.concatenate([array, np.repeat(array[-1:], more, axis=0)]))

    def describe(self, rows: Index, jobs: Telemetry) -> None:
        """Take in the telemetry of tokens. What was learned of them stays believed, as far as it was learned."""
        self.reserve(int(rows.max(initial=-1)) + 1)
        load, start = self.general.loads(jobs), self.general.starts(jobs)
        left = np.diagonal(self.variance[rows], axis1=1, axis2=2) / self.start[rows]
        self.own[rows] += (1.0 - left) * ((self.load[rows] - load) @ self.mean)
        scale = np.sqrt(start / self.start[rows])
        self.variance[rows] *= scale[:, :, None] * scale[:, None, :]
        self.load[rows], self.start[rows] = load, start

    def logs(self, rows: Index) -> Floats:
        """(log s, log h, c, e) of tokens, with what is due to their memory in c and e."""
        moved = self.follow[rows] @ (self.mean - self.general.coefficients.mean)
        return np.asarray(self.load[rows] @ self.mean + self.own[rows] + moved, dtype=np.float64)

    def pair(self, victim: int, neighbour: int) -> int:
        """The row of a pair, made where it was never seen."""
        place = self.pairs.setdefault((victim, neighbour), len(self.pairs))
        if place == len(self.pair_own):
            more = max(16, place)
            self.pair_at = np.concatenate([self.pair_at, np.full((more, 2), -1, np.intp)])
            self.pair_own = np.concatenate([self.pair_own, np.zeros(more)])
            self.pair_follow = np.concatenate([self.pair_follow, np.zeros((more, COEFFICIENTS))])
            self.pair_variance = np.concatenate([self.pair_variance, np.full(more, np.nan)])
        if self.pair_at[place, 0] < 0:
            self.pair_at[place] = victim, neighbour
        return place

    def step(self, i: int, j: int, seen: float, noise: float, fade: float = 0.0) -> float:
        """Take in that token i had the log slow-down `seen` beside j, with the variance `noise`.

        `fade` is the share by which old evidence of both tokens counts less. Returns how many standard deviations
        from what was expected it was.
        """
        pair, moved = self.pair(i, j), self.mean - self.general.coefficients.mean
        by_i, by_j = self.load[i] + self.follow[i], self.load[j] + self.follow[j]
        at_i = self.load[i] @ self.mean + self.own[i] + self.follow[i] @ moved
        at_j = self.load[j] @ self.mean + self.own[j] + self.follow[j] @ moved
        by_pair, by_logs, flat = self.pair_follow[pair], by_i[Z] + by_j[W], by_i[C] + by_j[E]
        rest = float(at_i[C] + at_j[E] + self.pair_own[pair] + by_pair @ moved)
        logs = float(at_i[Z] + at_j[W])
        variances = {token: self._faded(token, fade) for token in (i, j)}
        at = min(max(logs, LEAST_LOG), MOST_LOG)
        for _ in range(_LINEARISED):
            product = math.exp(at)
            p = self._pair_variance(pair, product, fade)
            slope = product * by_logs + flat + by_pair
            slopes = {i: np.array([product, 0.0, 1.0, 0.0])}
            slopes[j] = slopes.get(j, 0.0) + np.array([0.0, product, 0.0, 1.0])
            pulls = {token: variances[token] @ by_token for token, by_token in slopes.items()}
            given = p + noise + sum(float(pulls[token] @ by_token) for token, by_token in slopes.items())
            common = self.covariance @ slope
            total = given + float(slope @ common)
            off = seen - product * (1.0 + logs - at) - rest
            surprise = off / math.sqrt(total)
            if abs(surprise) > OUTLIER_SD:  # a larger noise, so that the shift stays bounded
                extra = total * (abs(surprise) / OUTLIER_SD - 1.0)
                given, total = given + extra, total + extra
            there = logs + (float(by_logs @ common) + float(pulls[i][Z] + pulls[j][W])) * off / total
            if abs(there - at) < _NEAR:
                break
            at = min(max(at + min(max(there - at, -1.0), 1.0), LEAST_LOG), MOST_LOG)
        at_prior = off + float(slope @ moved)
        for token, pull in pulls.items():
            gain, by_token = pull / given, slopes[token]
            self.own[token] += gain * at_prior
            self.follow[token] -= np.outer(gain, slope)
            others = given - float(pull @ by_token)
            self.variance[token] = _after(variances[token], by_token, gain, others)
        share = p / given
        self.pair_own[pair] += share * at_prior
        self.pair_follow[pair] = by_pair - share * slope
        self.pair_variance[pair] = p - p * share
        self.mean = self.mean + common * (off / total)
        self.covariance = _after(self.covariance, slope, common / total, given)
        return surprise

    def forget(self, i: int, j: int) -> None:
        """These two have changed: keep what is believed of them, but as uncertain as at the start."""
        for token in {i, j}:
            self.variance[token] = np.diag(self.start[token])
        self.pair_variance[self.pair(i, j)] = np.nan

    def table(self, victims: Index, neighbours: Index) -> tuple[Floats, Floats]:
        """Mean and variance of the log slow-down of every victim beside every neighbour; each token at most once."""
        common = self.covariance
        by_v, by_n = self.load[victims] + self.follow[victims], self.load[neighbours] + self.follow[neighbours]
        at_v, at_n = self.logs(victims), self.logs(neighbours)
        own_v, own_n = self.variance[victims], self.variance[neighbours]
        a, c, b, e = by_v[:, Z] @ common, by_v[:, C] @ common, by_n[:, W] @ common, by_n[:, E] @ common
        product = np.exp(np.clip(at_v[:, Z, None] + at_n[:, W], LEAST_LOG, MOST_LOG))
        mean = product + at_v[:, C, None] + at_n[:, E]
        # The variance is that of product * (x + y) + (v + w), where x and v are the victim's, y and w the neighbour's.
        relative = 2.0 * a @ by_n[:, W].T
        relative += (_dot(a, by_v[:, Z]) + own_v[:, Z, Z])[:, None] + _dot(b, by_n[:, W]) + own_n[:, W, W]
        relative += self.general.spread.pair_relative**2
        mixed = a @ by_n[:, E].T + (b @ by_v[:, C].T).T
        mixed += (_dot(a, by_v[:, C]) + own_v[:, Z, C])[:, None] + _dot(b, by_n[:, E]) + own_n[:, W, E]
        flat = 2.0 * c @ by_n[:, E].T
        flat += (_dot(c, by_v[:, C]) + own_v[:, C, C])[:, None] + _dot(e, by_n[:, E]) + own_n[:, E, E]
        flat += self.general.spread.pair**2
        variance = product * (product * relative + 2.0 * mixed) + flat
        row, column = np.nonzero((victims[:, None] == neighbours) & (victims[:, None] >= 0))  # beside its own kind
        if len(row):
            at, same = product[row, column], own_v[row]
            both = at**2 * same[:, Z, W] + at * (same[:, Z, E] + same[:, W, C]) + same[:, C, E]
            variance[row, column] += 2.0 * both
        self._add_seen(victims, neighbours, product, mean, variance)
        return mean, np.maximum(variance, 1e-8)

    def _add_seen(self, victims: Index, neighbours: Index, product: Floats, mean: Floats, variance: Floats) -> None:
        """What is known of pairs themselves, where they were seen."""
        row_of, column_of = np.full(len(self.own), -1), np.full(len(self.own), -1)
        row_of[victims], column_of[neighbours] = np.arange(len(victims)), np.arange(len(neighbours))
        row_of[-1] = column_of[-1] = -1
        at = self.pair_at[: len(self.pairs)]
        seen = np.flatnonzero((row_of[at[:, 0]] >= 0) & (column_of[at[:, 1]] >= 0))
        seen = seen[~np.isnan(self.pair_variance[seen])]
        if not len(seen):
            return
        i, j = at[seen].T
        row, column, follow = row_of[i], column_of[j], self.pair_follow[seen]
        here = product[row, column]
        by_i, by_j = self.load[i] + self.follow[i], self.load[j] + self.follow[j]
        slope = here[:, None] * (by_i[:, Z] + by_j[:, W]) + by_i[:, C] + by_j[:, E]
        mean[row, column] += self.pair_own[seen] + follow @ (self.mean - self.general.coefficients.mean)
        more = self.pair_variance[seen] - self.general.pair_variance(here)
        variance[row, column] += more + _dot((2.0 * slope + follow) @ self.covariance, follow)

    def _pair_variance(self, pair: int, product: float, fade: float) -> float:
        """Of what only this pair does, when old evidence of it counts a little less."""
        start = self.general.spread.pair_relative**2 * product**2 + self.general.spread.pair**2
        p = float(self.pair_variance[pair])
        return start if math.isnan(p) else p + fade * p * max(0.0, 1.0 - p / start)

    def _faded(self, token: int, fade: float) -> Floats:
        """The token's variances when its old evidence counts a little less: jobs change.

        Precision moves by the share `fade` from what it is to what it was at the start, here to first order.
        """
        variance: Floats = self.variance[token]
        if not fade:
            return variance
        return _symmetric(variance + fade * (variance - (variance / self.start[token]) @ variance))


def _after(variance: Floats, slope: Floats, gain: Floats, others: float) -> Floats:
    """The variances of what an observation has `slope` on, once it has moved them by `gain`.

    `others` is the observation's variance that comes from elsewhere. This is Joseph's form: a sum of two squares, so
    that no rounding makes a variance negative, however many observations there are.
    """
    kept = np.eye(len(slope)) - np.outer(gain, slope)
    return _symmetric(kept @ variance @ kept.T + others * np.outer(gain, gain))


def _symmetric(matrix: Floats) -> Floats:
    """Without what rounding has added on one side of the diagonal only: as evidence fades that would grow."""
    return np.asarray((matrix + matrix.T) / 2.0, dtype=np.float64)


def _dot(left: Floats, right: Floats) -> Floats:
    """The scalar product of each row with its counterpart."""
    return np.asarray(np.einsum("ij,ij->i", left, right), dtype=np.float64)


def _diagonals(rows: Floats) -> Floats:
    matrices: Floats = np.zeros((*rows.shape, rows.shape[1]))
    matrices[:, range(rows.shape[1]), range(rows.shape[1])] = rows
    return matrices


_STEPS = 6
_OUTLIER = 4.0


class Posterior:
    """The joint solution for some jobs and what was observed among them, linearised where it lies."""

    def __init__(
        self, general: Interference, jobs: Telemetry, observed: Observed, families: Index | None = None
    ) -> None:
        """`families`: which jobs have a part of their own effects in common; none where not given."""
        self.general = general
        self.jobs = jobs
        self.observed = observed
        self._load, self._start = general.loads(jobs), general.starts(jobs)
        kin = np.eye(len(jobs)) if families is None else kinship(families, general.spread.family)
        deviation = np.sqrt(self._start)
        self._own = [np.outer(deviation[:, own], deviation[:, own]) * kin for own in (Z, W)]
        self._by_victim, self._by_neighbour = self._load[observed.victim], self._load[observed.neighbour]
        self._at_prior = self._by_victim @ general.coefficients.mean, self._by_neighbour @ general.coefficients.mean
        self._logs = self._at_prior[0][:, Z] + self._at_prior[1][:, W]  # log s + log h of each observation
        self.coefficients = general.coefficients  # after the observations, with everything else integrated out
        self._inverse: Floats = np.zeros((0, 0))
        if len(observed.rate):
            self._solve()

    @property
    def product(self) -> Floats:
        """Sensitivity times pressure of each observation, at the solution."""
        return np.asarray(np.exp(np.clip(self._logs, LEAST_LOG, MOST_LOG)), dtype=np.float64)

    @property
    def residual(self) -> Floats:
        """What the linearised model, at its prior mean, leaves of the observed log slow-downs."""
        victim, neighbour = self._at_prior
        moved = victim[:, Z] + neighbour[:, W] - self._logs
        flat = victim[:, C] + neighbour[:, E]
        return np.asarray(self.observed.log_slowdown - self.product * (1.0 + moved) - flat, dtype=np.float64)

    @property
    def jacobian(self) -> Floats:
        """Of the observed log slow-downs on the coefficients."""
        by_logs = self._by_victim[:, Z] + self._by_neighbour[:, W]
        flat = self._by_victim[:, C] + self._by_neighbour[:, E]
        return np.asarray(self.product[:, None] * by_logs + flat, dtype=np.float64)

    def beliefs(self) -> Beliefs:
        """What is believed of each job and of each pair that was observed (each at most once) afterwards."""
        found, seen, start = Beliefs(self.general, self.jobs), self.observed, self._start
        if not len(seen.rate):
            return found
        found.mean, found.covariance = self.coefficients.mean.copy(), self.coefficients.covariance.copy()
        by_residual, by_jacobian = self._inverse @ self.residual, self._inverse @ self.jacobian
        for job in np.unique(np.concatenate([seen.victim, seen.neighbour])).tolist():
            mine = np.flatnonzero((seen.victim == job) | (seen.neighbour == job))
            victim, neighbour = seen.victim[mine] == job, seen.neighbour[mine] == job
            slopes = np.array([victim * self.product[mine], neighbour * self.product[mine], victim, neighbour])
            towards = start[job][:, None] * slopes  # covariance of (z, w, c, e) with each observation
            found.own[job] = towards @ by_residual[mine]
            found.follow[job] = -towards @ by_jacobian[mine]
            found.variance[job] -= towards @ self._inverse[np.ix_(mine, mine)] @ towards.T
        start_p = self.general.pair_variance(self.product)
        own, follow = start_p * by_residual, -start_p[:, None] * by_jacobian
        variance = start_p - start_p**2 * np.diag(self._inverse)
        for row, (i, j) in enumerate(zip(seen.victim.tolist(), seen.neighbour.tolist(), strict=True)):
            pair = found.pair(i, j)
            found.pair_own[pair], found.pair_follow[pair] = own[row], follow[row]
            found.pair_variance[pair] = variance[row]
        return found

    def _solve(self) -> None:
        seen, prior = self.observed, self.general.coefficients
        precision = np.linalg.inv(prior.covariance)
        noise = seen.noise**2
        for step in range(_STEPS):
            kernel = self._kernel() + np.diag(noise + 1e-8)
            self._inverse = np.asarray(np.linalg.inv(kernel), dtype=np.float64)
            residual, jacobian = self.residual, self.jacobian
            pulled = self._inverse @ jacobian
            covariance = np.linalg.inv(precision + jacobian.T @ pulled)
            covariance = (covariance + covariance.T) / 2.0
            moved = covariance @ (pulled.T @ residual)
            self.coefficients = Coefficients(prior.mean + moved, covariance)
            if step + 1 < _STEPS:  # the last solution stays consistent with where it was linearised
                weights = self._inverse @ (residual - jacobian @ moved)
                left = np.diag(self._inverse) - np.einsum("ij,jk,ik->i", pulled, covariance, pulled)
                self._logs = self._logs + np.clip(self._solution(weights, moved) - self._logs, -1.0, 1.0)
                noise = _doubted(seen.noise**2, weights, left)

    def _kernel(self) -> Floats:
        """Covariance of the observed log slow-downs, given the coefficients."""
        seen, spread, product = self.observed, self.general.spread, self.product
        same_victim = seen.victim[:, None] == seen.victim
        same_neighbour = seen.neighbour[:, None] == seen.neighbour
        same = same_victim & same_neighbour
        own = self._own[0][np.ix_(seen.victim, seen.victim)] + self._own[1][np.ix_(seen.neighbour, seen.neighbour)]
        kernel = np.outer(product, product) * (own + spread.pair_relative**2 * same)
        alike = spread.offset**2 * same_victim + spread.burden**2 * same_neighbour + spread.pair**2 * same
        return np.asarray(kernel + alike, dtype=np.float64)

    def _solution(self, weights: Floats, moved: Floats) -> Floats:
        """Log s + log h of each observation in the linearised model."""
        seen, pull, count = self.observed, self.product * weights, len(self.jobs)
        z = self._own[0] @ np.bincount(seen.victim, pull, count)
        w = self._own[1] @ np.bincount(seen.neighbour, pull, count)
        own = z[seen.victim] + w[seen.neighbour]
        shared = (self._by_victim[:, Z] + self._by_neighbour[:, W]) @ moved
        return np.asarray(self._at_prior[0][:, Z] + self._at_prior[1][:, W] + own + shared, dtype=np.float64)


def _doubted(noise: Floats, weights: Floats, left: Floats) -> Floats:
    """More noise for observations that all the others contradict: one bad measurement must not poison a job."""
    precision: Floats = np.maximum(left, 1e-12)
    surprise = np.abs(weights) / np.sqrt(precision)  # left-one-out residual over its standard deviation
    extra: Floats = np.where(surprise > _OUTLIER, ((surprise / _OUTLIER) ** 2 - 1.0) / precision, 0.0)
    return np.asarray(noise + extra, dtype=np.float64)


def kinship(families: Index, share: float) -> Floats:
    """Correlation of the jobs' own effects: 1 with itself, `share` within a family."""
    same = (families[:, None] == families[None, :]).astype(np.float64)
    correlation: Floats = share * same + (1.0 - share) * np.eye(len(families))
    return correlation
