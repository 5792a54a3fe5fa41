"""Cuts a minibatch into padded micro-batches that fit a token budget; owns the layout and the weights, not the order of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from rollart.training.batch import TrainSequence
from rollart.training.settings import BatchSettings, Denominator

__all__ = ["MicroBatch", "micro_batches"]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Right-padded sequences `ids` [B, T], and for each trained token, all [N]:

    `index` into the B * T hidden states, of the one that predicts it; `targets`, its id; `behaviour`, `advantages`, `temperature`,
    `versions`; `sequence`, the row it is in; and `weights`, its share in the loss of the whole minibatch (they sum to 1 over it, so
    sums over micro-batches need no further division). `real` counts the positions of `ids` that are not padding; `tempered` says whether
    any temperature differs from 1.
    """

    ids: Tensor
    index: Tensor
    targets: Tensor
    behaviour: Tensor
    advantages: Tensor
    temperature: Tensor
    versions: Tensor
    sequence: Tensor
    weights: Tensor
    real: int
    tempered: bool

    def to(self, device: torch.device, dtype: torch.dtype) -> MicroBatch:
        """The same on `device`, with its floating-point tensors in `dtype`."""
        moved = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Tensor):
                value = value.to(device, dtype) if value.is_floating_point() else value.to(device)
            moved[f.name] = value
        return MicroBatch(**moved)


def micro_batches(sequences: Sequence[TrainSequence], settings: BatchSettings) -> list[MicroBatch]:
    """Sequences of like length together, each micro-batch at most `token_budget` positions (padding included) or one sequence."""
    weights = _weights(sequences, settings.denominator)
    order = sorted(range(len(sequences)), key=lambda i: sequences[i].inputs)  # stable, so equal lengths stay in canonical order
    rows: list[list[int]] = []
    for i in order:
        # Ascending, so the new sequence is the longest and sets the width of its micro-batch.
        if rows and (len(rows[-1]) + 1) * sequences[i].inputs <= settings.token_budget:
            rows[-1].append(i)
        else:
            rows.append([i])
    return [_pad([sequences[i] for i in row], [weights[i] for i in row]) for row in rows]


def _weights(sequences: Sequence[TrainSequence], denominator: Denominator) -> list[float]:
    """The weight of each token of each sequence: 1 / tokens, or 1 / (trajectories * tokens of its trajectory)."""
    tokens: dict[int, int] = {}
    for s in sequences:
        tokens[s.trajectory] = tokens.get(s.trajectory, 0) + len(s.positions)
    if denominator == "token":
        total = sum(tokens.values())
        return [1.0 / total for _ in sequences]
    return [1.0 / (len(tokens) * tokens[s.trajectory]) for s in sequences]


def _pad(sequences: list[TrainSequence], weights: list[float]) -> MicroBatch:
    width = max(s.inputs for s in sequences)
    ids = torch.zeros(len(sequences), width, dtype=torch.long)  # [B, T]; what stands in the padding is never looked at
    for row, s in enumerate(sequences):
        ids[row, : s.inputs] = s.ids[:-1]
    counts = torch.tensor([len(s.positions) for s in sequences])
    temperatures = torch.tensor([s.temperature for s in sequences], dtype=torch.float64)
    return MicroBatch(
        ids=ids,
        index=torch.cat([row * width + s.positions - 1 for row, s in enumerate(sequences)]),
        targets=torch.cat([s.ids[s.positions] for s in sequences]),
        behaviour=torch.cat([s.behaviour for s in sequences]),
        advantages=torch.cat([s.advantages for s in sequences]),
        temperature=temperatures.repeat_interleave(counts),
        versions=torch.cat([s.versions for s in sequences]),
        sequence=torch.arange(len(sequences)).repeat_interleave(counts),
        weights=torch.tensor(weights, dtype=torch.float64).repeat_interleave(counts),
        real=sum(s.inputs for s in sequences),
        tempered=any(s.temperature != 1.0 for s in sequences),
    )
