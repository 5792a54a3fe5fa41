"""Clip around the proximal policy, and correct for the behaviour policy by a weight that carries no gradient."""

from __future__ import annotations

import torch

from rollart.training.losses.terms import LossInputs, LossTerms, behaviour_weight, surrogate
from rollart.training.settings import LossSettings

__all__ = ["decoupled_ppo"]


def decoupled_ppo(inputs: LossInputs, settings: LossSettings) -> LossTerms:
    """-w min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(current - proximal), w = min(exp(proximal - behaviour), truncate).

    The proximal policy is the trainer's own at the start of the step, so the clip does not cut what is only a difference in rounding
    between engine and trainer; w is detached. Hilton et al. 2021, Batch size-invariance for policy optimization (arXiv 2110.00641);
    with stale rollouts AReaL, Fu et al. 2025 (arXiv 2505.24298); the cap is truncated importance sampling,
    Espeholt et al. 2018, IMPALA (arXiv 1802.01561).
    """
    ratio = torch.exp(inputs.current - inputs.proximal)
    weight, truncated = behaviour_weight(inputs, settings.correction, settings.truncate)
    objective, clipped = surrogate(ratio, inputs.advantages, settings.clip_low, settings.clip_high)
    return LossTerms(-weight * objective, {"clipped": clipped, "truncated": truncated})
