"""What every policy loss is given and gives back, and the terms that are added to any of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["LossInputs", "LossTerms", "kl_to_reference", "surrogate"]


@dataclass(frozen=True, slots=True)
class LossInputs:
    """The trained tokens of some sequences, all of shape [N]; log-probabilities are natural and only `current` has a gradient.

    `sequence` numbers the sequence of each token, for losses over sequences; a sequence is never split between two calls.
    """

    current: Tensor
    proximal: Tensor
    behaviour: Tensor
    advantages: Tensor
    sequence: Tensor


@dataclass(frozen=True, slots=True)
class LossTerms:
    """The loss of each token [N], to be weighed and summed by the caller, and named marks [N] (bool) that are reported as shares."""

    per_token: Tensor
    marks: dict[str, Tensor] = field(default_factory=dict)


def surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """PPO's min(r A, clip(r, 1 - low, 1 + high) A) and where the clip took the gradient away, both [N].

    Schulman et al. 2017, Proximal Policy Optimization Algorithms (arXiv 1707.06347), equation 7; low != high as in DAPO,
    Yu et al. 2025 (arXiv 2503.14476).
    """
    free = ratio * advantages
    held = ratio.clamp(1.0 - low, 1.0 + high) * advantages
    return torch.minimum(free, held), (held < free).detach()


def kl_to_reference(current: Tensor, reference: Tensor) -> Tensor:
    """exp(ref - cur) - (ref - cur) - 1, [N]: the estimator k3 of KL(current || reference), never negative.

    Schulman 2020, Approximating KL Divergence (joschu.net/blog/kl-approx.html); as in GRPO's objective.
    """
    gap = reference - current
    return torch.expm1(gap) - gap
