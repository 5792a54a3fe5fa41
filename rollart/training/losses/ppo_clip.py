"""Clip around the behaviour policy: PPO as it was first written, with one ratio for both purposes."""

from __future__ import annotations

import torch

from rollart.training.losses.terms import LossInputs, LossTerms, surrogate
from rollart.training.settings import LossSettings

__all__ = ["ppo_clip"]


def ppo_clip(inputs: LossInputs, settings: LossSettings) -> LossTerms:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(current - behaviour).

    Schulman et al. 2017 (arXiv 1707.06347), equation 7, with DAPO's asymmetric range. Whatever makes trainer and engine differ,
    rounding included, counts as a change of policy here.
    """
    ratio = torch.exp(inputs.current - inputs.behaviour)
    objective, clipped = surrogate(ratio, inputs.advantages, settings.clip_low, settings.clip_high)
    return LossTerms(-objective, {"clipped": clipped})
