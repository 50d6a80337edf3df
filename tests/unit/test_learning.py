"""Learning which tokens slow which, one observation at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest

from slurm_gpushare.errors import BadInput
from slurm_gpushare.knowledge.learning import FlatPrior, LearnedKnowledge, Spread

PRODUCT = {"sensitivity": 0.5, "pressure": 0.5, "offset": 0.1, "burden": 0.1, "pair": 0.05}


def flat(**spread: float) -> FlatPrior:
    """By default a sum of effects, which can be worked out by hand; `PRODUCT` is the product."""
    given = {"sensitivity": 0.0, "pressure": 0.0, "offset": 0.2, "burden": 0.3, "pair": 0.1, "noise": 0.05} | spread
    return FlatPrior(0.4, Spread(**given))


def rate(knowledge: LearnedKnowledge, victim: str, neighbour: str) -> float:
    return float(knowledge.rates([victim], [neighbour]).mean[0, 0])


def test_unseen_tokens_get_the_prior_and_a_wide_interval() -> None:
    table = LearnedKnowledge(flat()).rates(["a", "b"], ["c"])
    assert table.mean == pytest.approx(np.full((2, 1), math.exp(-0.4)))
    wide = math.sqrt(0.2**2 + 0.3**2 + 0.1**2)
    assert table.low == pytest.approx(np.full((2, 1), math.exp(-0.4 - 1.2816 * wide)))


def test_first_step_is_the_exact_posterior_mean() -> None:
    knowledge = LearnedKnowledge(flat())
    knowledge.observe("a", "b", math.exp(-0.6))
    total = 0.2**2 + 0.3**2 + 0.1**2
    learned = 0.2 * total / (total + 0.05**2)
    assert -math.log(rate(knowledge, "a", "b")) == pytest.approx(0.4 + learned)
    assert -math.log(rate(knowledge, "x", "b")) == pytest.approx(0.4 + 0.2 * 0.3**2 / (total + 0.05**2))
    assert -math.log(rate(knowledge, "a", "x")) == pytest.approx(0.4 + 0.2 * 0.2**2 / (total + 0.05**2))
    assert rate(knowledge, "b", "a") == pytest.approx(math.exp(-0.4))


def test_a_sensitive_token_is_more_so_beside_who_presses_harder() -> None:
    knowledge = LearnedKnowledge(flat(**PRODUCT))
    for _ in range(10):
        for victim in ("x", "y"):
            knowledge.observe(victim, "heavy", math.exp(-0.8))
            knowledge.observe(victim, "light", math.exp(-0.2))
        knowledge.observe("sensitive", "light", math.exp(-0.4))
    slower = -math.log(rate(knowledge, "sensitive", "heavy")) + math.log(rate(knowledge, "x", "heavy"))
    assert slower > 1.5 * (0.4 - 0.2)


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


def test_effects_are_told_in_log_slow_down_beside_the_typical() -> None:
    knowledge = LearnedKnowledge(flat(**PRODUCT))
    for number in range(40):
        knowledge.observe("a", f"t{number}", math.exp(-0.6))
    found = {effect.token: effect for effect in knowledge.effects()}
    assert 0.1 < found["a"].victim <= 0.2
    assert found["a"].victim_sd < 0.1 < found["a"].aggressor_sd
    assert found["a"].aggressor == 0.0


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


def test_view_always_equals_rates() -> None:
    rng = np.random.default_rng(5)
    names = [f"t{i}" for i in range(12)]
    knowledge = LearnedKnowledge(flat(**PRODUCT))
    knowledge.observe("t1", "t2", 0.7)
    view = knowledge.view(names)
    for step in range(60):
        i, j = rng.integers(12, size=2)
        knowledge.observe(names[i], "outside" if step % 7 == 0 else names[j], float(rng.uniform(0.3, 1.2)))
        if step % 3 == 0:
            table = knowledge.rates(names, names)
            assert view.mean == pytest.approx(table.mean)
            assert view.low == pytest.approx(table.low)


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
