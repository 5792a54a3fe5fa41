"""Which of stored trajectories a draft head learns from and which measure it; owns the split and the counts of tokens, no model."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollart.control.seeds import derive
from rollart.training.batch import TrainSequence, build_batch
from rollart.training.errors import BatchError
from rollart.types import Episode, Trajectory

__all__ = ["DraftTexts", "sampled_counts", "sequences", "split_texts"]


@dataclass(frozen=True, slots=True)
class DraftTexts:
    """Trajectories to learn from, and those of other episodes, to measure on."""

    learnt: tuple[Trajectory, ...]
    held_out: tuple[Trajectory, ...]

    def batch(self, step: int, size: int, seed: int) -> tuple[TrainSequence, ...]:
        """The sequences of `size` trajectories, or all, drawn for step `step` from `seed`."""
        rng = random.Random(derive(seed, "draft", "batch", step))
        return sequences(rng.sample(self.learnt, min(size, len(self.learnt))))


def split_texts(trajectories: Sequence[Trajectory], share: float, seed: int) -> DraftTexts:
    """Holds `share` of each task's episodes out, at least one of a task that has two, with all that was played of them.

    BatchError if nothing is left for either side.
    """
    episodes: dict[str, set[Episode]] = {}
    for trajectory in trajectories:
        episodes.setdefault(trajectory.attempt.episode.task, set()).add(trajectory.attempt.episode)
    out: set[Episode] = set()
    for task, there in sorted(episodes.items()):
        many = min(math.ceil(share * len(there)), len(there) - 1)
        out |= set(random.Random(derive(seed, "draft", "held out", task)).sample(sorted(there), many))
    held = tuple(t for t in trajectories if t.attempt.episode in out)
    learnt = tuple(t for t in trajectories if t.attempt.episode not in out)
    if not held:
        raise BatchError(f"{len(trajectories)} sampled trajectories are of too few episodes to hold one out; a draft head needs more of them")
    return DraftTexts(learnt, held)


def sequences(trajectories: Sequence[Trajectory]) -> tuple[TrainSequence, ...]:
    """As a training step has them."""
    return build_batch(trajectories, {t.attempt: 1.0 for t in trajectories}, 0).sequences


def sampled_counts(trajectories: Iterable[Trajectory], vocabulary: int) -> Tensor:
    """How often each of the `vocabulary` tokens was sampled, int64 [V]."""
    ids = [i for t in trajectories for s in t.segments for i, sampled in zip(s.ids, s.mask, strict=True) if sampled]
    return torch.bincount(torch.tensor(ids, dtype=torch.int64), minlength=vocabulary)
