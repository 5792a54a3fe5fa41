"""What every policy loss is given and gives back, and the pieces that several of them share."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["LossInputs", "LossTerms", "behaviour_weight", "over_sequence", "surrogate"]


@dataclass(frozen=True, slots=True)
class LossInputs:
    """The trained tokens of some sequences, all of shape [N]; log-probabilities are natural and only `current` has a gradient.

    `sequence` numbers the sequence of each token from 0, for losses over sequences. A sequence is a whole trajectory: all of its segments
    together, where its prefix was changed on the way, since they were sampled and scored as one. A loss that `over_sequences` says
    needs it never gets a sequence in two calls.
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


def over_sequence(values: Tensor, sequence: Tensor, *, mean: bool) -> Tensor:
    """The sum or the mean of `values` [N] over the tokens of each one's sequence, at every token, [N]; differentiable."""
    count = int(sequence.max()) + 1 if len(sequence) else 0
    total = values.new_zeros(count).index_add(0, sequence, values)
    if mean:
        total = total / torch.bincount(sequence, minlength=count).clamp(min=1)
    return total.index_select(0, sequence)


def behaviour_weight(inputs: LossInputs, level: str, cap: float | None) -> tuple[Tensor, Tensor]:
    """min(exp(proximal - behaviour), cap) of each token, or of the sum over its sequence, and where the cap bit; [N], without gradient.

    At level `none` every weight is 1, as if the proximal policy had sampled all tokens. The cap is truncated importance sampling: Ionides
    2008; in reinforcement learning Espeholt et al. 2018, IMPALA (arXiv 1802.01561).
    """
    gap = (inputs.proximal - inputs.behaviour).detach()
    if level == "none":
        gap = torch.zeros_like(gap)
    if level == "sequence":
        gap = over_sequence(gap, inputs.sequence, mean=False)
    weight = gap.exp()
    if cap is None:
        return weight, torch.zeros_like(weight, dtype=torch.bool)
    return weight.clamp(max=cap), weight > cap
