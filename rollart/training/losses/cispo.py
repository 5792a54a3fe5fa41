"""Clip the importance weight and not the update: every token keeps a gradient."""

from __future__ import annotations

import torch

from rollart.training.losses.terms import LossInputs, LossTerms
from rollart.training.settings import LossSettings

__all__ = ["cispo"]


def cispo(inputs: LossInputs, settings: LossSettings) -> LossTerms:
    """-min(r, 1 + clip_high) A current with r = exp(current - behaviour), the weight detached.

    CISPO, MiniMax 2025, MiniMax-M1 (arXiv 2506.13585), equations 4 and 5; like there, the weight has no lower bound. `clip_high` is
    to be larger than in PPO (4, say), since it limits variance and stops no token.
    """
    ratio = torch.exp(inputs.current - inputs.behaviour).detach()
    cap = 1.0 + settings.clip_high
    return LossTerms(-ratio.clamp(max=cap) * inputs.advantages * inputs.current, {"truncated": ratio > cap})
