"""Brings the advantages of a batch to one scale by task; owns no estimator."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import torch

from rollart.training.advantages.grpo import NO_SPREAD
from rollart.training.batch import TrainSequence
from rollart.training.settings import AdvantageSettings

__all__ = ["scaled"]


def scaled(sequences: Sequence[TrainSequence], settings: AdvantageSettings) -> tuple[TrainSequence, ...]:
    """The sequences with A <- weight (A - mean) / std where the task's settings say `normalise: task`, else A <- weight A.

    Mean and standard deviation (population) run over the task's trajectories in the batch, each counting once however many tokens it
    has: whitening per task, after Hu 2025, REINFORCE++ (arXiv 2501.03262), equation 8, which does it over the whole batch. A task whose
    advantages do not differ gets 0.
    """
    by_task: dict[str, list[int]] = defaultdict(list)
    for i, s in enumerate(sequences):
        by_task[s.task].append(i)
    found = list(sequences)
    for task, indices in by_task.items():
        chosen = settings.of(task)
        mean, scale = 0.0, 1.0
        if chosen.normalise == "task":
            mean, scale = _moments([sequences[i] for i in indices])
        elif chosen.weight == 1.0:
            continue
        for i in indices:
            centred = sequences[i].advantages - mean
            found[i] = replace(sequences[i], advantages=centred * (chosen.weight * scale))
    return tuple(found)


def _moments(sequences: list[TrainSequence]) -> tuple[float, float]:
    """The mean, and 1 / standard deviation or 0 where there is no spread."""
    tokens: dict[int, int] = defaultdict(int)
    for s in sequences:
        tokens[s.trajectory] += len(s.positions)
    values = torch.cat([s.advantages for s in sequences])
    weights = torch.cat([torch.full_like(s.advantages, 1.0 / (len(tokens) * tokens[s.trajectory])) for s in sequences])
    mean = float((weights * values).sum())
    deviation = float((weights * (values - mean) ** 2).sum().sqrt())
    return mean, 0.0 if deviation <= NO_SPREAD else 1.0 / deviation
