"""Leave-one-out advantages: each member is compared with the mean of the others of its group, which makes the baseline independent of it."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

from rollart.training.advantages.grpo import groups_with_spread

__all__ = ["rloo"]


def rloo(scores: Sequence[float], groups: Sequence[Hashable]) -> list[float]:
    """A_i = r_i - mean of r_j over the others j of i's group, by group id, whatever the order and the sizes.

    RLOO, Kool et al. 2019, Buy 4 REINFORCE Samples, Get a Baseline for Free!; for language models Ahmadian et al. 2024, Back to Basics
    (arXiv 2402.14740), equation 7. It is n / (n - 1) times GRPO's without the standard deviation. A group of one has no other
    to compare with and gets 0, and so does a group without spread.
    """
    advantages = [0.0] * len(scores)
    for indices, values in groups_with_spread(scores, groups):
        total = math.fsum(values)
        for i in indices:
            advantages[i] = scores[i] - (total - scores[i]) / (len(values) - 1)
    return advantages
