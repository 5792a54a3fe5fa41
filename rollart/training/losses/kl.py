"""Three estimators of the KL divergence to a reference policy from the tokens that were sampled."""

from __future__ import annotations

import torch
from torch import Tensor

from rollart.training.settings import KLEstimator

__all__ = ["kl_to_reference"]


def kl_to_reference(current: Tensor, reference: Tensor, estimator: KLEstimator = "k3") -> Tensor:
    """KL(current || reference) at each token, [N], with d = current - reference.

    Of tokens that were sampled under a cut both are over the kept set, since that is what they were drawn from: over the whole vocabulary the
    reference would add -log of its mass in the set to k1, which no policy over the set can change, and k2 and k3 would pull against it.

    k1 = d, unbiased, of either sign; k2 = d^2 / 2, never negative, biased; k3 = exp(-d) - 1 + d, unbiased and never negative, as in
    GRPO's objective. Schulman 2020, Approximating KL Divergence (joschu.net/blog/kl-approx.html). As a loss only k2 has the gradient
    of the divergence on average; that of d alone averages to 0, so k1 gets the gradient that it has as a part of the reward,
    d grad current, which is k2's. k3's is that of the reverse divergence to first order: Tang and Munos 2025, On a few pitfalls in KL
    divergence gradient estimation for RL (arXiv 2506.09477).
    """
    gap = current - reference
    if estimator == "k1":
        return gap.detach() * (1.0 + current - current.detach())
    if estimator == "k2":
        return 0.5 * gap**2
    return torch.expm1(-gap) + gap
