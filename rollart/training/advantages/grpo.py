"""Group-relative advantages: a score is compared with the other scores of its own group and with nothing else."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence

__all__ = ["NO_SPREAD", "groups_with_spread", "grpo"]

NO_SPREAD = 1e-8
"""Scores of a group that differ by no more than this are equal: the group has no signal, and its advantages are exactly 0."""

_EPSILON = 1e-4
"""Added to the standard deviation, as TRL does, so that a group of almost equal scores is not blown up."""


def groups_with_spread(scores: Sequence[float], groups: Sequence[Hashable]) -> Iterator[tuple[list[int], list[float]]]:
    """Places and scores of each group's members, for the groups whose scores differ."""
    members: dict[Hashable, list[int]] = defaultdict(list)
    for i, group in enumerate(groups):
        members[group].append(i)
    for indices in members.values():
        values = [scores[i] for i in indices]
        if max(values) - min(values) <= NO_SPREAD:
            continue
        yield indices, values


def grpo(scores: Sequence[float], groups: Sequence[Hashable], *, divide_by_std: bool = True) -> list[float]:
    """A_i = (r_i - mean of i's group) / (std of i's group + 1e-4), by group id, whatever the order and the sizes.

    GRPO, Shao et al. 2024, DeepSeekMath (arXiv 2402.03300), section 4.1; std is the sample's (n - 1), as TRL has it. With
    `divide_by_std` False it is A_i = r_i - mean, Dr. GRPO, Liu et al. 2025 (arXiv 2503.20783), section 3.2. A group of one
    and a group without spread get 0.
    """
    advantages = [0.0] * len(scores)
    for indices, values in groups_with_spread(scores, groups):
        mean = math.fsum(values) / len(values)
        scale = 1.0
        if divide_by_std:
            scale = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)) + _EPSILON
        for i in indices:
            advantages[i] = (scores[i] - mean) / scale
    return advantages
