"""What a draft head is trained to: the policy's own distribution at each place, over several steps of its own features. Knows no trainer.

Cross entropy against soft targets as EAGLE has it (Li et al. 2024, arXiv 2401.15077), over steps that go on from the head's own features as
EAGLE-3 does (Li et al. 2025, arXiv 2503.01840). Beside it stands the chance that a token drawn from the head is accepted, which is the sum
over x of min(p(x), q(x)), or 1 - TV(p, q) (Leviathan et al. 2023, arXiv 2211.17192).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rollart.drafts.head import DraftHead
from rollart.drafts.own_steps import OwnSteps, shifted

__all__ = ["DraftLoss", "Texts", "draft_loss"]

DECAY = 0.8
"""What each step's loss weighs of the step before's: a later token is drafted for nothing where an earlier one is refused. As in EAGLE-3."""


@dataclass(frozen=True, slots=True)
class Texts:
    """Sequences padded on their right, and what the policy computed of them: `hidden` [B, N, H] after its final norm, at place t of x_0 .. x_t,
    `embeddings` [B, N, H] of the tokens x_t, and for each of the M places that are to be learnt `rows` and `places` [M], from which the policy
    sampled x_{place + 1}: `targets` [M, R], its probabilities of the head's tokens there (what it gives the others is missing from the sum), and
    `weights` [M].

    All of it is data: no gradient goes back into the policy.
    """

    hidden: Tensor
    embeddings: Tensor
    rows: Tensor
    places: Tensor
    targets: Tensor
    weights: Tensor


@dataclass(frozen=True, slots=True)
class DraftLoss:
    """`loss`, a scalar with gradient; by step, without one: `entropies`, the weighted sum of the cross entropies in nats, `accepted`, that of the
    chances of acceptance, and `weight`, that of the places that the step could be taken at."""

    loss: Tensor
    entropies: tuple[float, ...]
    accepted: tuple[float, ...]
    weight: tuple[float, ...]


def draft_loss(head: DraftHead, texts: Texts, steps: int) -> DraftLoss:
    """The loss over `steps` steps, the s-th weighing `DECAY ** s`; cross entropies are against targets renormalised over the head's tokens.

    Step s at place t has read hidden states up to h_{t - s} and drafted s tokens from there; the tokens themselves are those of the text.
    """
    # The head's place t reads x_{t+1}, and says what comes after it: what the policy says at place t + 1.
    hidden, embeddings = texts.hidden[:, :-1], texts.embeddings[:, 1:]
    positions = torch.arange(hidden.shape[1], device=hidden.device).expand(len(hidden), -1)
    attend = OwnSteps()
    loss = hidden.new_zeros((), dtype=torch.float32)
    entropies, accepted, weight = [], [], []
    for step in range(steps):
        features = head(hidden, embeddings, positions, attend)
        at = texts.places - 1
        there = at >= step
        logits = head.logits(features[texts.rows[there], at[there]]).float()
        logprobs = logits.log_softmax(-1)
        p, w = texts.targets[there].float(), texts.weights[there].float()
        soft = p / p.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        entropy = -(w * (soft * logprobs).sum(-1)).sum()
        loss = loss + DECAY**step * entropy
        entropies.append(float(entropy.detach()))
        accepted.append(float((w * torch.minimum(p, logprobs.detach().exp()).sum(-1)).sum()))
        weight.append(float(w.sum()))
        hidden = shifted(features, 1)  # g_{t+1} stands for h_{t+1}
    return DraftLoss(loss, tuple(entropies), tuple(accepted), tuple(weight))
