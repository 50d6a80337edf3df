"""Learning which tokens slow which, one observation at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from slurm_gpushare.knowledge import learning
from slurm_gpushare.knowledge.beliefs import Beliefs, Posterior
from slurm_gpushare.knowledge.interference import Coefficients, Interference, Observed, Spread, Telemetry
from slurm_gpushare.knowledge.learning import LearnedKnowledge, Refit
from slurm_gpushare.protocol.errors import BadInput

Floats = NDArray[np.float64]

PRODUCT = {"unknown": 0.5, "offset": 0.1, "burden": 0.1, "pair": 0.05}


def flat(**spread: float) -> Interference:
    """A world of level 0.4 without telemetry; by default a sum of effects, which can be worked out by hand."""
    given = {
        "unknown": 1e-6,
        "offset": 0.2,
        "burden": 0.3,
        "pair": 0.1,
        "pair_relative": 1e-6,
    } | spread
    prior = Coefficients.prior()
    typical = (0.0, 0.0, 0.0)
    level = Coefficients(np.array([math.log(0.4), *prior.mean[1:]]), prior.covariance * 1e-12)
    return Interference(level, Spread(**given), typical)


def jobs(*shares: float) -> Telemetry:
    """Jobs that are busy for these shares of time, half of it accessing memory."""
    busy = np.array(shares)
    return Telemetry(busy, busy / 2.0, np.full(len(busy), 0.2))


def rate(knowledge: LearnedKnowledge, victim: str, neighbour: str) -> float:
    return float(knowledge.rates([victim], [neighbour]).mean[0, 0])


def log(knowledge: LearnedKnowledge, victim: str, neighbour: str) -> float:
    """The expected log slow-down."""
    places = knowledge._places([victim]), knowledge._places([neighbour])
    return float(knowledge.beliefs.table(*places)[0][0, 0])


def test_unseen_tokens_get_the_prior_and_a_wide_interval() -> None:
    table = LearnedKnowledge(flat()).rates(["a", "b"], ["c"])
    assert table.mean == pytest.approx(np.full((2, 1), math.exp(-0.4)), abs=0.05)
    wide = math.sqrt(0.2**2 + 0.3**2 + 0.1**2)
    assert table.low == pytest.approx(np.full((2, 1), math.exp(-0.4 - 1.2816 * wide)))


def test_first_step_is_the_exact_posterior_mean() -> None:
    knowledge = LearnedKnowledge(flat())
    knowledge.observe("a", "b", math.exp(-0.6))
    total = 0.2**2 + 0.3**2 + 0.1**2
    learned = 0.2 * total / (total + 0.05**2)
    assert log(knowledge, "a", "b") == pytest.approx(0.4 + learned)
    assert log(knowledge, "x", "b") == pytest.approx(0.4 + 0.2 * 0.3**2 / (total + 0.05**2))
    assert log(knowledge, "a", "x") == pytest.approx(0.4 + 0.2 * 0.2**2 / (total + 0.05**2))
    assert log(knowledge, "b", "a") == pytest.approx(0.4)


def test_a_sensitive_token_is_more_so_beside_who_presses_harder() -> None:
    knowledge = LearnedKnowledge(flat(**PRODUCT))
    for _ in range(10):
        for victim in ("x", "y"):
            knowledge.observe(victim, "heavy", math.exp(-0.8))
            knowledge.observe(victim, "light", math.exp(-0.2))
        knowledge.observe("sensitive", "light", math.exp(-0.4))
    slower = -math.log(rate(knowledge, "sensitive", "heavy")) + math.log(rate(knowledge, "x", "heavy"))
    assert slower > 1.3 * (0.4 - 0.2)


def test_products_are_learned_from_fewer_pairs_than_by_sums() -> None:
    rng = np.random.default_rng(4)
    names = [f"t{i}" for i in range(12)]
    log = 0.35 * np.outer(np.exp(rng.normal(0, 0.6, 12)), np.exp(rng.normal(0, 0.6, 12)))
    seen = rng.random((12, 12)) < 0.5
    left = []
    for spread in (PRODUCT, {"offset": 0.3, "burden": 0.3}):
        knowledge = LearnedKnowledge(flat(**spread))
        for i, j in rng.permutation(np.argwhere(seen)):
            knowledge.observe(names[i], names[j], math.exp(-log[i, j]))
        error = -np.log(knowledge.rates(names, names).mean) - log
        left.append(float(np.sqrt(np.mean(error[~seen] ** 2))))
    assert left[0] < 0.7 * left[1]


def test_intervals_narrow_with_evidence_and_noise_counts() -> None:
    precise, vague = LearnedKnowledge(flat()), LearnedKnowledge(flat())
    before = precise.rates(["a"], ["b"]).low[0, 0]
    precise.observe("a", "b", math.exp(-0.4))
    vague.observe("a", "b", math.exp(-0.4), weight=0.01)
    assert before < vague.rates(["a"], ["b"]).low[0, 0] < precise.rates(["a"], ["b"]).low[0, 0]


def test_one_absurd_observation_moves_little() -> None:
    knowledge = LearnedKnowledge(flat())
    for _ in range(20):
        knowledge.observe("a", "b", 0.8)
    knowledge.observe("a", "b", 0.03)
    assert rate(knowledge, "a", "b") > 0.72


def test_lasting_change_is_followed() -> None:
    knowledge = LearnedKnowledge(flat(), half_life=50)
    for _ in range(300):
        knowledge.observe("a", "b", 0.9)
    for _ in range(100):
        knowledge.observe("a", "b", 0.5)
    assert rate(knowledge, "a", "b") == pytest.approx(0.5, abs=0.05)


def test_old_evidence_fades_without_a_surprise() -> None:
    """A change too small to stand out is followed all the same, as fast after a long history as after a short one."""
    found = []
    for before in (500, 5000):
        knowledge = LearnedKnowledge(flat(**PRODUCT), half_life=50)
        for _ in range(before):
            knowledge.observe("a", "b", 0.8)
        for _ in range(100):
            knowledge.observe("a", "b", 0.75)
        found.append(rate(knowledge, "a", "b"))
    assert found == pytest.approx([0.76, 0.76], abs=0.01)


def test_true_rates_of_many_pairs_are_found() -> None:
    rng = np.random.default_rng(3)
    names = [f"t{i}" for i in range(8)]
    log = np.maximum(0.4 + rng.normal(0, 0.2, (8, 1)) + rng.normal(0, 0.3, 8) + rng.normal(0, 0.1, (8, 8)), 0.01)
    knowledge = LearnedKnowledge(flat())
    for _ in range(30):
        for i, j in np.ndindex(8, 8):
            knowledge.observe(names[i], names[j], math.exp(-log[i, j] + rng.normal(0, 0.05)))
    assert -np.log(knowledge.rates(names, names).mean) == pytest.approx(log, abs=0.08)


def test_telemetry_is_the_prior_of_a_token_the_moment_it_is_profiled() -> None:
    knowledge = LearnedKnowledge(Interference())
    knowledge.profiled(["light", "heavy"], jobs(0.1, 0.95))
    assert rate(knowledge, "light", "light") > 0.9 > rate(knowledge, "heavy", "heavy")
    assert rate(knowledge, "heavy", "heavy") < rate(knowledge, "heavy", "light")


def test_the_next_unknown_token_is_predicted_better_on_this_sites_cards() -> None:
    """Tokens never seen to share follow the coefficients, which every observation refines."""
    names, busy = [f"t{i}" for i in range(12)], np.linspace(0.3, 0.95, 12)
    knowledge = LearnedKnowledge(Interference())
    knowledge.profiled([*names, "new"], jobs(*busy, 0.8))
    true = np.exp(-1.6 * np.outer(busy, busy))  # twice as bad as the prior believes
    before = rate(knowledge, "new", "new")
    for i, j in np.ndindex(12, 12):
        if (i + j) % 3 == 0:
            knowledge.observe(names[i], names[j], float(true[i, j]))
    after = rate(knowledge, "new", "new")
    wanted = math.exp(-1.6 * 0.8**2)
    assert abs(math.log(after / wanted)) < 0.5 * abs(math.log(before / wanted))


def test_telemetry_that_comes_late_keeps_what_was_seen() -> None:
    knowledge = LearnedKnowledge(Interference())
    for other in range(15):
        knowledge.observe("a", f"t{other}", 0.5)
    knowledge.profiled(["a", "b"], jobs(0.05, 0.05))
    assert rate(knowledge, "a", "t1") < 0.65
    assert rate(knowledge, "b", "t1") > 0.8


def test_steps_come_near_the_joint_solution_and_a_refit_is_it() -> None:
    rng = np.random.default_rng(2)
    names, shares = [f"t{i}" for i in range(10)], rng.uniform(0.2, 1.0, 10)
    true = 0.8 * np.outer(shares * np.exp(rng.normal(0, 0.3, 10)), shares * np.exp(rng.normal(0, 0.3, 10)))
    seen = [(i, j) for i, j in np.ndindex(10, 10) if (3 * i + j) % 4 == 0]
    knowledge = LearnedKnowledge(Interference())
    knowledge.profiled(names, jobs(*shares))
    for i, j in seen:
        knowledge.observe(names[i], names[j], math.exp(-true[i, j]))
    stepped = knowledge.rates(names, names).mean
    knowledge.refit()
    solved = knowledge.rates(names, names).mean
    errors = [float(np.sqrt(np.mean((np.log(table) + true) ** 2))) for table in (stepped, solved)]
    assert errors[1] <= errors[0] < 1.5 * errors[1] + 0.05


def test_a_refit_beside_the_ticks_keeps_what_was_seen_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "JOINT_PAIRS", 4)  # so that some pairs are added one by one
    knowledge = LearnedKnowledge(Interference())
    knowledge.profiled(["a", "b", "c"], jobs(0.9, 0.8, 0.7))
    for victim, neighbour in (("a", "b"), ("b", "a"), ("a", "c"), ("c", "a"), ("b", "c")):
        knowledge.observe(victim, neighbour, 0.7)
    refit = Refit(knowledge)
    for _ in range(4):
        knowledge.observe("new", "a", 0.3)
    knowledge.profiled(["late"], jobs(0.05))
    refit.run()
    before = rate(knowledge, "new", "a")
    refit.install()
    assert rate(knowledge, "new", "a") == pytest.approx(before, abs=0.1)
    assert rate(knowledge, "a", "b") == pytest.approx(0.7, abs=0.05)
    assert rate(knowledge, "late", "late") > 0.93


def own_variances(knowledge: LearnedKnowledge) -> Floats:
    """Eigenvalues of every token's variances as shares of the start's, and of the coefficients' covariance."""
    beliefs = knowledge.beliefs
    deviation = np.sqrt(beliefs.start)
    shares = beliefs.variance / (deviation[:, :, None] * deviation[:, None, :])
    asymmetry = float(np.abs(shares - shares.transpose(0, 2, 1)).max())
    assert asymmetry < 1e-9
    return np.concatenate([np.linalg.eigvalsh(shares).ravel(), np.linalg.eigvalsh(beliefs.covariance)])


def test_variances_stay_variances_while_evidence_fades() -> None:
    """Rounding on one side of the diagonal grew with each fading: below zero after 3,400 of these observations."""
    rng = np.random.default_rng(0)
    knowledge = LearnedKnowledge(Interference(), half_life=50)
    knowledge.profiled(["a", "b"], jobs(0.3, 0.9))
    for _ in range(6000):
        i, j = rng.integers(2, size=2)
        knowledge.observe("ab"[i], "ab"[j], 0.7 * math.exp(rng.normal(0, 0.02)))
    assert own_variances(knowledge).min() > 0.0


@pytest.mark.slow
@pytest.mark.parametrize("half_life", [20.0, 200.0])
def test_variances_stay_variances_over_a_hundred_thousand_observations(half_life: float) -> None:
    """With outliers, lasting changes, new telemetry, jobs beside their own kind, and weights of any size."""
    rng, names = np.random.default_rng(1), [f"t{i}" for i in range(5)]
    knowledge = LearnedKnowledge(Interference(), half_life)
    knowledge.profiled(names, jobs(*rng.uniform(0.05, 1.0, 5)))
    for number in range(100_000):
        if number % 20_000 == 0:
            rates = rng.uniform(0.05, 1.0, (5, 5))
        if number % 7_000 == 0:
            knowledge.profiled(names[:2], jobs(*rng.uniform(0.0, 1.0, 2)))
        i, j = rng.integers(5, size=2)
        seen = rng.uniform(0.001, 5.0) if rng.random() < 0.01 else rates[i, j] * math.exp(rng.normal(0, 0.05))
        knowledge.observe(names[i], names[j], float(seen), float(10.0 ** rng.uniform(-4, 6)))
        if number % 1000 == 999:
            found = own_variances(knowledge)
            assert found.min() > 0.0
            assert found.max() <= 1.0 + 1e-6
    table = knowledge.rates(names, names)
    assert np.all((table.low > 0.0) & (table.low <= table.mean) & (table.mean <= 1.0))


def test_what_is_recalled_counts_as_if_it_had_been_seen() -> None:
    rows = [("a", "b", 0.6, 1.0), ("b", "a", 0.8, 1.0), ("a", "b", 0.62, 1.0), ("a", "c", 0.9, 0.5)]
    seen, recalled = LearnedKnowledge(Interference()), LearnedKnowledge(Interference())
    for row in rows:
        seen.observe(*row)
    recalled.recall(rows)
    for knowledge in (seen, recalled):
        knowledge.refit()
    assert recalled.rates("abc", "abc").mean == pytest.approx(seen.rates("abc", "abc").mean)
    assert recalled.observations == 4


def test_the_first_step_is_what_the_joint_solution_says() -> None:
    """With one observation the two solvers differ only in how often they linearise."""
    general, two = Interference(), jobs(0.6, 0.9)
    steps = Beliefs(general, two)
    steps.step(0, 1, 0.45, 0.05**2)
    both = np.arange(2)
    joint = Posterior(general, two, Observed(both[:1], both[1:], np.array([math.exp(-0.45)]), np.array([0.05])))
    for stepped, solved in zip(steps.table(both, both), joint.beliefs().table(both, both), strict=True):
        assert stepped == pytest.approx(solved, abs=0.01)


def test_rates_answer_repeated_and_unseen_tokens() -> None:
    knowledge = LearnedKnowledge(flat())
    knowledge.observe("a", "b", 0.5)
    table = knowledge.rates(["a", "new", "a"], ["b", "b", "new", "x"])
    assert table.mean.shape == (3, 4)
    assert np.array_equal(table.mean[0], table.mean[2])
    assert table.mean[0, 0] == table.mean[0, 1] < table.mean[1, 0]


@pytest.mark.parametrize(("seen", "weight"), [(0.0, 1.0), (-1.0, 1.0), (math.nan, 1.0), (0.5, 0.0), (0.5, math.inf)])
def test_impossible_observations_are_refused(seen: float, weight: float) -> None:
    knowledge = LearnedKnowledge(flat())
    with pytest.raises(BadInput):
        knowledge.observe("a", "b", seen, weight)
    assert len(knowledge) == 0
