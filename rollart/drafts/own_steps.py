"""The attention of a head that is trained on its own features: what each step of a multi-step draft sees, for all places at once. Owns no weights."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["OwnSteps", "shifted"]


def shifted(values: Tensor, places: int) -> Tensor:
    """`values` [..., N, D] moved on by `places` along N: place t holds what place t - places held, and the first ones hold zeros."""
    if not places:
        return values
    moved = torch.zeros_like(values)
    moved[..., places:, :] = values[..., : values.shape[-2] - places, :]
    return moved


class OwnSteps:
    """The attention of one multi-step pass over whole sequences, padded on their right; use a new one for each pass.

    In step s (from 0) the query at place t stands where s tokens have been drafted: it sees the entries of the places up to t - s, which came of
    hidden states (step 0's), and of each step j from 1 to s the one at place t - s + j, which came of a feature. So an engine's cache looks
    then. After EAGLE-3's training-time test (Li et al. 2025, arXiv 2503.01840).
    """

    def __init__(self) -> None:
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """One step's attention, [B, heads, N, dim], as `head.Attend` has it."""
        shared = query.shape[1] // key.shape[1]
        self._keys.append(key.repeat_interleave(shared, 1))
        self._values.append(value.repeat_interleave(shared, 1))
        step, places, scale = len(self._keys) - 1, query.shape[2], query.shape[3] ** -0.5
        at = torch.arange(places, device=query.device)
        scores = (query @ self._keys[0].transpose(2, 3) * scale).masked_fill(at > at.unsqueeze(1) - step, -torch.inf)
        own = [(query * shifted(self._keys[j], step - j)).sum(-1, keepdim=True) * scale for j in range(1, step + 1)]
        # A place with less than `step` places before it sees nothing, and counts for nothing; its own entry keeps the softmax defined.
        weights = torch.cat([scores, *own], -1).float().softmax(-1).to(query.dtype)
        mixed = weights[..., :places] @ self._values[0]
        for j in range(1, step + 1):
            mixed = mixed + weights[..., places + j - 1 : places + j] * shifted(self._values[j], step - j)
        return mixed
