"""Does the correlation of two jobs' profiles over time say whom to pair? ``python -m bench.peaks_in_time``

Kube-Knots (CLUSTER 2019) co-locates what does not correlate. Its assumptions are put to a test here on made-up jobs,
since a record keeps sums and no series: each job alternates between a busy and a light phase (period 0.5 to 60 s,
busy for 0.2 to 0.8 of it, each phase 2 % longer or shorter at random), was sampled alone for 120 s every 0.5 s, and
then runs for an hour beside another. What counts is how long both are busy at once.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

STEP_S, PROFILE_S, SHARED_S, JITTER = 0.5, 120.0, 3600.0, 0.02
RESIDENTS, CHOICES = 400, 8

Series = NDArray[np.float64]


def busy(rng: np.random.Generator, period_s: float, duty: float, seconds: float) -> Series:
    """1 while the job is busy, else 0, from a random point of its period on."""
    phases = int(2 * seconds / period_s / 0.9) + 4
    lengths = np.tile([duty * period_s, (1 - duty) * period_s], phases) * (1 + JITTER * rng.standard_normal(2 * phases))
    at = np.arange(0, seconds, STEP_S) + rng.uniform(0, period_s)
    found: Series = (np.searchsorted(np.cumsum(lengths), at) % 2 == 0).astype(float)
    return found


def correlation(a: Series, b: Series) -> float:
    return float(np.corrcoef(a, b)[0, 1]) if a.std() > 0 and b.std() > 0 else 0.0


def main(seed: int = 1) -> None:
    """Print what each way of choosing one of eight neighbours gives."""
    rng = np.random.default_rng(seed)
    kinds = [(float(np.exp(rng.uniform(np.log(0.5), np.log(60)))), rng.uniform(0.2, 0.8)) for _ in range(200)]
    both: dict[str, list[float]] = {"random": [], "correlation": [], "means": [], "best": []}
    seen: list[tuple[float, float]] = []
    for _ in range(RESIDENTS):
        first, *others = (kinds[i] for i in rng.choice(len(kinds), CHOICES + 1, replace=False))
        profile, run = busy(rng, *first, PROFILE_S), busy(rng, *first, SHARED_S)
        found = [correlation(profile, busy(rng, *other, PROFILE_S)) for other in others]
        overlap = [float(np.mean(run * busy(rng, *other, SHARED_S))) for other in others]
        seen += [(r, o - first[1] * other[1]) for r, o, other in zip(found, overlap, others, strict=True)]
        both["random"].append(overlap[0])
        both["correlation"].append(overlap[int(np.argmin(found))])
        both["means"].append(overlap[int(np.argmin([other[1] for other in others]))])
        both["best"].append(min(overlap))
    for name, values in both.items():
        print(f"{name:12s} both busy {100 * np.mean(values):.1f} % of the time")
    r = np.corrcoef(np.array(seen).T)[0, 1]
    print(f"correlation of the profiles against what timing adds to the product of means: r = {r:.3f}")


if __name__ == "__main__":
    main()
