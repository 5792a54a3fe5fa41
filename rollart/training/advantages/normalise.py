"""Brings the advantages of a batch to one scale by task; owns no estimator."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rollart.training.advantages.grpo import NO_SPREAD
from rollart.training.batch import TrainSequence
from rollart.training.ranks import ALONE, Ranks
from rollart.training.settings import AdvantageSettings

__all__ = ["scaled"]


def scaled(sequences: Sequence[TrainSequence], settings: AdvantageSettings, ranks: Ranks = ALONE) -> tuple[TrainSequence, ...]:
    """The sequences with A <- weight (A - mean) / std where the task's settings say `normalise: task`, else A <- weight A.

    Mean and standard deviation (population) run over the task's trajectories in the batch, each counting once however many tokens it
    has: whitening per task, after Hu 2025, REINFORCE++ (arXiv 2501.03262), equation 8, which does it over the whole batch. A task whose
    advantages do not differ gets 0. `ranks` hold the rest of the batch.
    """
    by_task: dict[str, list[int]] = defaultdict(list)
    for i, s in enumerate(sequences):
        by_task[s.task].append(i)
    found = list(sequences)
    normalised = {task: [sequences[i] for i in indices] for task, indices in by_task.items() if settings.of(task).normalise == "task"}
    moments = _moments(normalised, ranks)
    for task, indices in by_task.items():
        chosen = settings.of(task)
        mean, scale = 0.0, 1.0
        if chosen.normalise == "task":
            mean, scale = moments[task]
        elif chosen.weight == 1.0:
            continue
        for i in indices:
            centred = sequences[i].advantages - mean
            found[i] = replace(sequences[i], advantages=centred * (chosen.weight * scale))
    return tuple(found)


def _moments(by_task: Mapping[str, Sequence[TrainSequence]], ranks: Ranks) -> dict[str, tuple[float, float]]:
    """The mean of each task over all ranks, and 1 / standard deviation or 0 where there is no spread."""
    mine = {task: _by_trajectory(sequences) for task, sequences in by_task.items()}
    found: dict[str, list[tuple[int, float, float]]] = defaultdict(list)
    for part in ranks.gather(mine):
        for task, trajectories in part.items():
            found[task] += trajectories
    return {task: _moments_of(sorted(trajectories)) for task, trajectories in found.items()}


def _by_trajectory(sequences: Sequence[TrainSequence]) -> list[tuple[int, float, float]]:
    """Number of each trajectory, with mean and variance of the advantages over its tokens."""
    tokens: dict[int, list[Tensor]] = defaultdict(list)
    for s in sequences:
        tokens[s.trajectory].append(s.advantages)
    whole = {trajectory: torch.cat(parts) for trajectory, parts in tokens.items()}
    return [(trajectory, float(a.mean()), float(a.var(unbiased=False))) for trajectory, a in whole.items()]


def _moments_of(trajectories: Sequence[tuple[int, float, float]]) -> tuple[float, float]:
    mean = math.fsum(m for _, m, _ in trajectories) / len(trajectories)
    # (The variance of all is that within each and that between them, each counting once.)
    deviation = math.sqrt(math.fsum(v + (m - mean) ** 2 for _, m, v in trajectories) / len(trajectories))
    return mean, 0.0 if deviation <= NO_SPREAD else 1.0 / deviation
