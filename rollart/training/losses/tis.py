"""The policy gradient with truncated importance sampling, and no clip."""

from __future__ import annotations

import torch

from rollart.training.losses.terms import LossInputs, LossTerms, behaviour_weight
from rollart.training.settings import LossSettings

__all__ = ["tis"]


def tis(inputs: LossInputs, settings: LossSettings) -> LossTerms:
    """-w r A with r = exp(current - proximal), w = min(exp(proximal - behaviour), truncate), detached.

    At the proximal policy its gradient is -w A times that of log p: with `correction: sequence` and no cap, exactly the policy
    gradient from another policy's samples; with a cap, less variance for some bias. Espeholt et al. 2018, IMPALA (arXiv 1802.01561);
    for the gap between engine and trainer Yao et al. 2025, Your Efficient RL Framework Secretly Brings You Off-Policy RL Training.
    """
    weight, truncated = behaviour_weight(inputs, settings.correction, settings.truncate)
    return LossTerms(-weight * torch.exp(inputs.current - inputs.proximal) * inputs.advantages, {"truncated": truncated})
