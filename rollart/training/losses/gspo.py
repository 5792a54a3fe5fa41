"""Clip by sequence: the ratio is the geometric mean over a sequence's tokens, and they are clipped together."""

from __future__ import annotations

import torch

from rollart.training.losses.terms import LossInputs, LossTerms, over_sequence, surrogate
from rollart.training.settings import LossSettings

__all__ = ["gspo"]


def gspo(inputs: LossInputs, settings: LossSettings) -> LossTerms:
    """-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A) at every token, with s = exp(mean over the sequence of current - behaviour).

    GSPO, Zheng et al. 2025, Group Sequence Policy Optimization (arXiv 2507.18071), equations 5 and 7. Since s is a mean, it stays far
    nearer to 1 than a token's ratio: the paper's range is 3e-4 and 4e-4. `denominator: trajectory` gives the paper's average.
    """
    ratio = torch.exp(over_sequence(inputs.current - inputs.behaviour, inputs.sequence, mean=True))
    objective, clipped = surrogate(ratio, inputs.advantages, settings.clip_low, settings.clip_high)
    return LossTerms(-objective, {"clipped": clipped})
