"""Means with 95 % intervals, and the rise from one measurement to another. Pure arithmetic; knows nothing of runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, variance
from typing import Literal

__all__ = ["Estimate", "Method", "mean_estimate", "rise_estimate", "t_quantile"]

Method = Literal["mean", "paired", "welch"]

CONFIDENCE = 0.95

PAIRED_SHARE = 0.9
"""Two measurements count as taken on the same seeds if they share this much of the larger one, so that an episode lost on one side
does not unpair the rest."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over `n` episodes with its 95 % interval [`low`, `high`], which is (-inf, inf) for fewer than two.

    It is a t interval: where every episode scored the same its width is 0, which says nothing of episodes that were not drawn.
    """

    mean: float
    low: float
    high: float
    n: int
    method: Method = "mean"

    def to_dict(self) -> dict[str, float | int | str | None]:
        """For JSON: an infinite bound becomes None."""
        low, high = (value if math.isfinite(value) else None for value in (self.low, self.high))
        return {"mean": self.mean, "low": low, "high": high, "n": self.n, "method": self.method}


def mean_estimate(values: Sequence[float]) -> Estimate:
    """The mean of independent values with its t interval; ValueError for none."""
    if not values:
        raise ValueError("a mean needs at least one value")
    return _around(fmean(values), _squared_error(values), len(values) - 1, len(values), "mean")


def rise_estimate(before: Mapping[int, float], after: Mapping[int, float]) -> Estimate:
    """How much the mean rose from `before` to `after`, both episode -> score.

    Measurements on the same episodes (so the same seeds) are paired, over the episodes that both have: what makes an episode easy
    cancels. Others are compared by Welch's test, with its degrees of freedom rounded down. ValueError if either is empty.
    """
    if not before or not after:
        raise ValueError("a rise needs episodes before and after")
    common = sorted(before.keys() & after.keys())
    if len(common) >= PAIRED_SHARE * max(len(before), len(after)):
        rise = mean_estimate([after[episode] - before[episode] for episode in common])
        return Estimate(rise.mean, rise.low, rise.high, rise.n, "paired")
    first, second = list(before.values()), list(after.values())
    a, b = _squared_error(first), _squared_error(second)
    freedom = 0
    if len(first) > 1 and len(second) > 1:
        freedom = int((a + b) ** 2 / (a**2 / (len(first) - 1) + b**2 / (len(second) - 1))) if a + b > 0 else len(first) + len(second) - 2
    return _around(fmean(second) - fmean(first), a + b, freedom, min(len(first), len(second)), "welch")


def t_quantile(probability: float, freedom: int) -> float:
    """The quantile of Student's t with `freedom` >= 1 degrees of freedom, `probability` in [0.5, 1).

    By bisection on the finite series for whole degrees of freedom (Abramowitz and Stegun 26.7.3 and 26.7.4).
    """
    if freedom < 1 or not 0.5 <= probability < 1:
        raise ValueError(f"no t quantile for probability {probability} with {freedom} degrees of freedom")
    low, high = 0.0, 1.0
    while 0.5 + _central(high, freedom) / 2 < probability:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if 0.5 + _central(middle, freedom) / 2 < probability else (low, middle)
    return (low + high) / 2


def _central(t: float, freedom: int) -> float:
    """The probability that |T| < t."""
    angle = math.atan2(t, math.sqrt(freedom))
    cosine, sine = math.cos(angle), math.sin(angle)
    even = freedom % 2 == 0
    term = 1.0 if even else cosine
    total = term if freedom > 1 else 0.0
    for k in range(2 if even else 3, freedom - 1, 2):
        term *= (k - 1) / k * cosine**2
        total += term
    return sine * total if even else 2 / math.pi * (angle + sine * total)


def _squared_error(values: Sequence[float]) -> float:
    """The squared standard error of the mean, 0 for a single value (whose interval is infinite by its degrees of freedom)."""
    return variance(values) / len(values) if len(values) > 1 else 0.0


def _around(mean: float, squared_error: float, freedom: int, n: int, method: Method) -> Estimate:
    if freedom < 1:
        return Estimate(mean, -math.inf, math.inf, n, method)
    half = t_quantile((1 + CONFIDENCE) / 2, freedom) * math.sqrt(squared_error)
    return Estimate(mean, mean - half, mean + half, n, method)
