"""Leaves tokens out of a policy loss, whichever it is, where the trainer and what sampled them disagree too much."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from rollart.training.losses.terms import LossInputs, LossTerms, over_sequence
from rollart.training.settings import LossSettings, MaskSettings

__all__ = ["MASKED", "PolicyLoss", "kept", "masked"]

PolicyLoss = Callable[[LossInputs, LossSettings], LossTerms]
"""What every policy loss is: a function of the tokens and the settings."""

MASKED = "masked"
"""The mark of what was left out."""


def kept(inputs: LossInputs, settings: MaskSettings) -> Tensor:
    """Which tokens stay, bool [N]: low <= m <= high, by d = proximal - behaviour, without gradient.

    By ratio, m = exp(d) of the token, exp(sum of d) of its sequence, or exp(mean of d), the geometric mean: Liu, Li et al. 2025, When
    Speed Kills Stability; the geometric one with `negative_only` is DeepSeek-V3.2's off-policy sequence mask (arXiv 2512.02556).
    By divergence, m is KL(Bernoulli(q) || Bernoulli(p)) with q, p the token's behaviour and proximal probability, summed or averaged
    for a sequence: the binary KL of DPPO, Qi et al. 2026 (arXiv 2602.04879).
    """
    value = inputs.proximal.detach() - inputs.behaviour if settings.by == "ratio" else _binary_kl(inputs.behaviour, inputs.proximal.detach())
    if settings.level != "token":
        value = over_sequence(value, inputs.sequence, mean=settings.level == "geometric")
    if settings.by == "ratio":
        value = value.exp()
    stay = torch.ones_like(value, dtype=torch.bool)
    if settings.low is not None:
        stay &= value >= settings.low
    if settings.high is not None:
        stay &= value <= settings.high
    return stay | (inputs.advantages >= 0) if settings.negative_only else stay


def masked(loss: PolicyLoss, inputs: LossInputs, settings: LossSettings) -> LossTerms:
    """`loss` of the tokens that the settings' mask keeps; the others have a loss and a gradient of exactly 0, whatever their ratio is.

    To a loss over sequences a token that is left out looks like one of ratio 1, so no gradient reaches it through the others either.
    """
    if settings.mask is None:
        return loss(inputs, settings)
    stay = kept(inputs, settings.mask)
    # Not a product with 0 afterwards: 0 times an infinite gradient is NaN.
    neutral = inputs.proximal.detach()
    seen = replace(
        inputs, current=torch.where(stay, inputs.current, neutral), behaviour=torch.where(stay, inputs.behaviour, neutral), proximal=neutral
    )
    terms = loss(seen, settings)
    marks = {name: mark & stay for name, mark in terms.marks.items()}
    return LossTerms(torch.where(stay, terms.per_token, torch.zeros_like(terms.per_token)), {**marks, MASKED: ~stay})


def _binary_kl(q: Tensor, p: Tensor) -> Tensor:
    """q log(q / p) + (1 - q) log((1 - q) / (1 - p)) from log-probabilities; at least 0, and finite where either is 1."""
    tiny = torch.finfo(q.dtype).eps
    q, p = q.clamp(max=-tiny), p.clamp(max=-tiny)
    rest_q, rest_p = torch.log(-torch.expm1(q)), torch.log(-torch.expm1(p))
    return (q.exp() * (q - p) + rest_q.exp() * (rest_q - rest_p)).clamp(min=0.0)
