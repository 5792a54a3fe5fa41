"""What one optimiser step is taken on, and what comes of it; plain data that passes between the parts of a training step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from rollart.training.batch import TrainSequence
from rollart.training.metrics import SkipReason
from rollart.training.microbatch import MicroBatch

__all__ = ["Gradient", "Minibatch", "counted", "marks", "padding"]


@dataclass(frozen=True, slots=True)
class Minibatch:
    """What one optimiser step is taken on: micro-batches and, for each of them, log-probabilities [N] that its loss needs beside the
    current ones: `proximal`, under the policy at the start of the step (None: that is the current one), and `reference` (None: no KL).

    `skip` says why there is nothing to learn from it, `valued` whether there is something for the value head, on whichever rank.
    """

    micros: list[MicroBatch]
    proximal: list[Tensor] | None = None
    reference: list[Tensor] | None = None
    skip: SkipReason | None = None
    valued: bool = False


@dataclass(frozen=True, slots=True)
class Gradient:
    """What a minibatch's backward passes came to: the `loss`, a scalar without gradient, and how many tokens the loss's mask left that
    have an advantage. Both add up over parts of a minibatch, and over ranks."""

    loss: Tensor
    live: int


def marks(sequences: Sequence[TrainSequence]) -> tuple[bool, bool]:
    """Whether any of the sequences has an advantage, and whether any has a return for the value head."""
    return any(bool(s.advantages.any()) for s in sequences), any(s.returns is not None for s in sequences)


def counted(micros: Sequence[MicroBatch]) -> list[int]:
    """How many there are, the positions in them, and how many of those are not padding; idle ones don't count."""
    busy = [m for m in micros if m.members]
    return [len(busy), sum(m.ids.numel() for m in busy), sum(m.real for m in busy)]


def padding(places: float, real: float) -> float:
    return 1.0 - real / places if places else 0.0
