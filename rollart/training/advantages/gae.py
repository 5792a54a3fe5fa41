"""Generalised advantage estimation over the tokens of one trajectory, from a value head's estimates."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["gae"]


def gae(values: Tensor, score: float, *, discount: float, trace: float) -> tuple[Tensor, Tensor]:
    """Advantages and returns, both [n], of a trajectory's n trained tokens in the order they were sampled.

    `values` [n] are V(s_t) before token t. The score is the reward of the last token and the others have none, so
    delta_t = discount V_(t+1) - V_t, delta_n = score - V_n; A_t = delta_t + discount trace A_(t+1); R_t = A_t + V_t is what
    the value head is to predict. Schulman et al. 2016, High-Dimensional Continuous Control Using Generalized Advantage Estimation
    (arXiv 1506.02438), equation 16. A trajectory that was cut off ends with its score too: the score is all of its reward.
    """
    following = torch.cat([values[1:], values.new_tensor([score])])
    scale = torch.full_like(values, discount)
    scale[-1:] = 1.0
    deltas = (scale * following - values).tolist()
    advantages = [0.0] * len(deltas)
    ahead = 0.0
    for t in range(len(deltas) - 1, -1, -1):
        ahead = deltas[t] + discount * trace * ahead
        advantages[t] = ahead
    found = values.new_tensor(advantages)
    return found, found + values
