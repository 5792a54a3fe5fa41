"""Turns trajectories and advantages into sequences to train on; owns their order and what is trained, knows no model.

Every segment is a sequence. What is trained is decided by position alone, never by a token's id, so a padding id that is also the end token
hides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollart.training.cut import Cut
from rollart.training.errors import BatchError, TransformError
from rollart.training.shares import dealt
from rollart.types import Attempt, Segment, Trajectory

__all__ = ["TrainBatch", "TrainSequence", "build_batch", "supervised_sequences"]


@dataclass(frozen=True, slots=True)
class TrainSequence:
    """One segment, cut after its last trained token: `ids` [T]; the rest is [n], one entry for each trained token.

    `positions` are the trained tokens' places in `ids` (at least 1), `behaviour` their log-probabilities when they were sampled, `versions`
    the steps that sampled them, `advantages` theirs, `returns` what a value head is to predict there (None: nothing). `temperature`
    divides the logits, and `cut` holds what top-k and top-p kept (None: everything). `trajectory` numbers the trajectory within the batch,
    in canonical order, `segment` the segment within that; `task` is its episode's.
    """

    ids: Tensor
    positions: Tensor
    behaviour: Tensor
    versions: Tensor
    advantages: Tensor
    temperature: float
    trajectory: int
    task: str = ""
    returns: Tensor | None = None
    segment: int = 0
    cut: Cut | None = None

    @property
    def inputs(self) -> int:
        """How many tokens are forwarded: the last trained one is predicted, but predicts nothing."""
        return len(self.ids) - 1


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """What one training step consumes, in canonical order: the step that starts from version `step`.

    `trajectories` counts those given, also the ones without a trained token.
    """

    step: int
    sequences: tuple[TrainSequence, ...]
    trajectories: int

    @property
    def trained(self) -> dict[int, int]:
        """Trained tokens of each trajectory that has any."""
        found: dict[int, int] = {}
        for s in self.sequences:
            found[s.trajectory] = found.get(s.trajectory, 0) + len(s.positions)
        return found

    def split(self, parts: int, everywhere: Sequence[int] | None = None) -> list[tuple[TrainSequence, ...]]:
        """At most `parts` minibatches of whole trajectories, dealt out in turn so that each holds a like share of every task; none is
        empty, but a batch without sequences is one empty minibatch.

        `everywhere` numbers the trajectories with trained tokens that all ranks have (default: those here); of a minibatch that others
        have, nothing may be here.
        """
        numbers = list(self.trained if everywhere is None else everywhere)
        in_part = dealt(numbers, parts)
        return [tuple(s for s in self.sequences if in_part[s.trajectory] == p) for p in range(min(parts, len(numbers)))] or [()]


def build_batch(
    trajectories: Sequence[Trajectory], advantages: Mapping[Attempt, float], step: int, numbers: Mapping[Attempt, int] | None = None
) -> TrainBatch:
    """Sorts `trajectories` by attempt, so that the order of arrival changes nothing, and gives each token its trajectory's advantage.

    `numbers` are the trajectories' places in the whole batch, of which these are a rank's share (default: these are all of it).
    BatchError if an attempt occurs twice or has no advantage; SegmentError if a segment does not hang together; TransformError if one was
    sampled greedily, by min-p, or under a cut whose kept sets are not stored with it, which cannot be replayed.
    """
    ordered = sorted(trajectories, key=lambda t: t.attempt)
    sequences: list[TrainSequence] = []
    for number, trajectory in enumerate(ordered):
        attempt = trajectory.attempt
        if number and ordered[number - 1].attempt == attempt:
            raise BatchError(f"attempt {attempt} occurs twice in the batch; each may be trained on once")
        if attempt not in advantages:
            raise BatchError(f"attempt {attempt} has no advantage; its group must be scored before it is trained on")
        for index, segment in enumerate(trajectory.segments):
            place = number if numbers is None else numbers[attempt]
            made = _sequence(segment, advantages[attempt], place, f"segment {index} of attempt {attempt}", attempt.episode.task, index)
            if made is not None:
                sequences.append(made)
    return TrainBatch(step, tuple(sequences), len(ordered))


def supervised_sequences(segments: Sequence[Segment]) -> tuple[TrainSequence, ...]:
    """Sequences whose mask says which tokens to imitate, at temperature 1; each counts as a trajectory of its own."""
    made = (_sequence(s, 1.0, i, f"supervised sequence {i}", plain=True) for i, s in enumerate(segments))
    return tuple(s for s in made if s is not None)


def _sequence(
    segment: Segment, advantage: float, trajectory: int, where: str, task: str = "", number: int = 0, *, plain: bool = False
) -> TrainSequence | None:
    """The sequence of `segment`, None if it holds no trained token."""
    segment.check()
    positions = torch.tensor(segment.mask, dtype=torch.bool).nonzero().flatten()
    if not len(positions):
        return None
    if positions[0] == 0:
        raise BatchError(f"{where} starts with a sampled token; it needs at least one prompt token before it")
    if not plain:
        _refuse_unreplayable(segment, where)
    end = int(positions[-1]) + 1
    return TrainSequence(
        ids=torch.tensor(segment.ids[:end], dtype=torch.long),
        positions=positions,
        behaviour=torch.tensor(segment.logprobs, dtype=torch.float64)[positions],
        versions=torch.tensor(segment.versions, dtype=torch.long)[positions],
        advantages=torch.full((len(positions),), advantage, dtype=torch.float64),
        temperature=1.0 if plain else segment.transform.temperature,
        trajectory=trajectory,
        task=task,
        segment=number,
        cut=Cut.of(segment.kept) if len(segment.kept) and not plain else None,
    )


def _refuse_unreplayable(segment: Segment, where: str) -> None:
    transform = segment.transform
    if transform.min_p > 0:
        raise TransformError(f"{where} was sampled with min_p={transform.min_p}, which is for evaluation; train on samples with min_p 0")
    if transform.is_cut and not len(segment.kept):
        raise TransformError(
            f"{where} was sampled with top_p={transform.top_p}, top_k={transform.top_k}: its log-probabilities are over the tokens that were kept, "
            "which are not stored with it. Have the embedded engine return them, or train on samples with top_p 1 and top_k -1"
        )
    if not transform.temperature > 0:
        raise TransformError(
            f"{where} was sampled at temperature {transform.temperature}, which has no log-probabilities; sample what is trained on above 0"
        )
