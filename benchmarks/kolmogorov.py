"""The two-sample Kolmogorov-Smirnov test. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

TERMS = 101


def ks_test(one: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """The largest distance between the two samples' distribution functions, and the p-value of it under the hypothesis that both are drawn from one
    distribution: Kolmogorov's limit with Stephens' correction for small samples (Numerical Recipes, 14.3.3). Ties make it conservative.
    ValueError for an empty sample."""
    a, b = np.sort(np.asarray(one, float)), np.sort(np.asarray(other, float))
    if not a.size or not b.size:
        raise ValueError(f"the samples have {a.size} and {b.size} values; both need some")
    every = np.concatenate([a, b])
    distance = float(np.abs(np.searchsorted(a, every, "right") / a.size - np.searchsorted(b, every, "right") / b.size).max())
    root = math.sqrt(a.size * b.size / (a.size + b.size))
    x = (root + 0.12 + 0.11 / root) * distance
    if x < 0.2:  # the series converges badly there, and the value is 1 to fifteen digits
        return distance, 1.0
    p = 2 * sum((-1) ** (k - 1) * math.exp(-2 * k * k * x * x) for k in range(1, TERMS))
    return distance, min(1.0, max(0.0, p))
