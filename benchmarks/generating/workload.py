"""Prompts, and responses whose lengths are set before and have a long tail. Every way generates the same; nothing here is measured."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

TAIL = 0.8
"""Of the lengths' logarithm, the standard deviation: of 32 responses the longest has some five times the tokens of the middle one."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that come at once: `prompts`, and of each response the number of tokens in `lengths`, whatever is sampled."""

    prompts: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Of all responses."""
        return sum(self.lengths)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and the longest response together."""
        return max(map(len, self.prompts)) + max(self.lengths)


def workload(requests: int, vocabulary: int, middle: int, most: int, seed: int) -> Workload:
    """`requests` with prompts of 16 to 64 tokens and responses of up to `most`, half of these of up to `middle`; a single one has just that."""
    rng = np.random.default_rng(seed)
    prompts = tuple(tuple(rng.integers(2, vocabulary, n).tolist()) for n in rng.integers(16, 65, requests).tolist())
    if requests == 1:
        return Workload(prompts, (middle,))
    lengths = np.clip(np.exp(rng.normal(np.log(middle), TAIL, requests)), 4, most).astype(int)
    return Workload(prompts, tuple(lengths.tolist()))
