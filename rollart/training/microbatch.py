"""Cuts a minibatch into micro-batches that fit a token budget, packed or padded; owns the layout and the weights, not the batch's order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from rollart.training.batch import TrainSequence
from rollart.training.cut import Cut
from rollart.training.packing import PackedLayout, layout_of
from rollart.training.settings import BatchSettings, Denominator

__all__ = ["MicroBatch", "Totals", "idle_micro_batch", "micro_batches"]


@dataclass(frozen=True, slots=True)
class Totals:
    """What a minibatch holds over all ranks: trained `tokens`, and `trajectories` that have any."""

    tokens: int
    trajectories: int

    @classmethod
    def of(cls, trained: Iterable[int]) -> Totals:
        """The totals of trajectories with so many trained tokens each."""
        counts = list(trained)
        return cls(sum(counts), len(counts))


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequences `ids`: [B, T] with padding on the right, or, with a `layout`, [1, T] one after the other; and for each trained token, all [N]:

    `index` into the B * T hidden states, of the one that predicts it; `targets`, its id; `behaviour`, `advantages`, `temperature`,
    `versions`; `returns`, what the value head is to predict; `trajectory`, the number of its trajectory here; `weights`, its share
    in the loss of the whole minibatch (they sum to 1 over it, so sums over micro-batches and ranks need no further division), and `value_weights`,
    the same where there is a return and else 0.

    `cut`: what was kept where a token was sampled under a cut; None if none was.

    `members` are the sequences' places among those that were cut, in the order they lie here, and `counts` their trained tokens; an idle
    micro-batch has none. `real` counts the positions of `ids` that are not padding; `tempered` says whether any temperature differs from 1.
    """

    ids: Tensor
    layout: PackedLayout | None
    index: Tensor
    targets: Tensor
    behaviour: Tensor
    advantages: Tensor
    temperature: Tensor
    versions: Tensor
    returns: Tensor
    trajectory: Tensor
    weights: Tensor
    value_weights: Tensor
    members: tuple[int, ...]
    counts: tuple[int, ...]
    real: int
    tempered: bool
    cut: Cut | None = None

    def to(self, device: torch.device, dtype: torch.dtype) -> MicroBatch:
        """The same on `device`, with its floating-point tensors in `dtype`."""
        moved = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Tensor):
                value = value.to(device, dtype) if value.is_floating_point() else value.to(device)
            elif isinstance(value, PackedLayout | Cut):
                value = value.to(device)
            moved[f.name] = value
        return MicroBatch(**moved)


def micro_batches(
    sequences: Sequence[TrainSequence], settings: BatchSettings, *, packed: bool = False, totals: Totals | None = None, whole: bool = False
) -> list[MicroBatch]:
    """Sequences of like length together, each micro-batch at most `token_budget` positions (padding included) or one sequence.

    `whole` keeps the sequences of a trajectory together, for a loss that looks at all of its tokens: one that is over the budget then runs
    alone. `totals` are those of the minibatch that the sequences are a rank's share of (default: they are all of it).
    """
    weights = _weights(sequences, settings.denominator, totals)
    together: dict[int, list[int]] = {}
    for i, s in enumerate(sequences):
        together.setdefault(s.trajectory if whole else i, []).append(i)
    width = {unit: max(sequences[i].inputs for i in places) for unit, places in together.items()}
    rows: list[list[int]] = []
    held = 0
    for unit in sorted(together, key=lambda unit: width[unit]):  # stable, so equal lengths stay in canonical order
        # Ascending, so the new one has the longest sequence, which sets the width of its micro-batch.
        places = together[unit]
        inputs = sum(sequences[i].inputs for i in places)
        size = held + inputs if packed else (len(rows[-1]) + len(places)) * width[unit] if rows else inputs
        if rows and size <= settings.token_budget:
            rows[-1] += places
            held += inputs
        else:
            rows.append(list(places))
            held = inputs
    for row in rows:
        row.sort(key=lambda i: sequences[i].inputs)  # as a packed layout wants them
    return [_lay([sequences[i] for i in row], [weights[i] for i in row], tuple(row), packed) for row in rows]


def idle_micro_batch(*, packed: bool) -> MicroBatch:
    """A pass that counts for nothing: one made-up token of weight 0, for a rank that waits for another's pass."""
    nothing = torch.zeros(1, dtype=torch.float64)
    ids, positions = torch.zeros(2, dtype=torch.long), torch.ones(1, dtype=torch.long)
    sequence = TrainSequence(ids, positions, nothing, torch.zeros(1, dtype=torch.long), nothing, 1.0, 0)
    return _lay([sequence], [0.0], (), packed)


def _weights(sequences: Sequence[TrainSequence], denominator: Denominator, totals: Totals | None) -> list[float]:
    """The weight of each token of each sequence: 1 / tokens, or 1 / (trajectories * tokens of its trajectory), a trajectory being whole here."""
    tokens: dict[int, int] = {}
    for s in sequences:
        tokens[s.trajectory] = tokens.get(s.trajectory, 0) + len(s.positions)
    whole = totals or Totals.of(tokens.values())
    if denominator == "token":
        return [1.0 / whole.tokens for _ in sequences]
    return [1.0 / (whole.trajectories * tokens[s.trajectory]) for s in sequences]


def _lay(sequences: list[TrainSequence], weights: list[float], members: tuple[int, ...], packed: bool) -> MicroBatch:
    width = max(s.inputs for s in sequences)
    if packed:
        ids = torch.cat([s.ids[:-1] for s in sequences]).unsqueeze(0)  # [1, T]
        starts = torch.tensor([0, *(s.inputs for s in sequences)]).cumsum(0).tolist()
    else:
        ids = torch.zeros(len(sequences), width, dtype=torch.long)  # [B, T]; what stands in the padding is never looked at
        for row, s in enumerate(sequences):
            ids[row, : s.inputs] = s.ids[:-1]
        starts = [row * width for row in range(len(sequences))]
    counts = torch.tensor([len(s.positions) for s in sequences])
    numbers = {trajectory: number for number, trajectory in enumerate(dict.fromkeys(s.trajectory for s in sequences))}
    temperatures = torch.tensor([s.temperature for s in sequences], dtype=torch.float64)
    spread = torch.tensor(weights, dtype=torch.float64)
    valued = torch.tensor([s.returns is not None for s in sequences])
    return MicroBatch(
        ids=ids,
        layout=layout_of([s.inputs for s in sequences]) if packed else None,
        index=torch.cat([start + s.positions - 1 for start, s in zip(starts, sequences, strict=False)]),
        targets=torch.cat([s.ids[s.positions] for s in sequences]),
        behaviour=torch.cat([s.behaviour for s in sequences]),
        advantages=torch.cat([s.advantages for s in sequences]),
        temperature=temperatures.repeat_interleave(counts),
        versions=torch.cat([s.versions for s in sequences]),
        returns=torch.cat([torch.zeros_like(s.advantages) if s.returns is None else s.returns for s in sequences]),
        trajectory=torch.tensor([numbers[s.trajectory] for s in sequences]).repeat_interleave(counts),
        weights=spread.repeat_interleave(counts),
        value_weights=(spread * valued).repeat_interleave(counts),
        members=members,
        counts=tuple(counts.tolist()) if members else (),
        real=sum(s.inputs for s in sequences),
        tempered=any(s.temperature != 1.0 for s in sequences),
        cut=Cut.joined([(s.cut, len(s.positions)) for s in sequences]),
    )
