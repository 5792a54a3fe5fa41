"""Finishes a batch's advantages where scores alone do not say them: running baselines, a value head, and the scale by task."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rollart.training.advantages.gae import gae
from rollart.training.advantages.normalise import scaled
from rollart.training.advantages.reinforce import RunningBaselines
from rollart.training.batch import TrainBatch, TrainSequence
from rollart.training.ranks import ALONE, Ranks
from rollart.training.settings import AdvantageSettings

__all__ = ["Values", "finished"]

Values = Callable[[Sequence[TrainSequence]], list[Tensor]]
"""Sequences to the value before each of their trained tokens, [n] each."""


def finished(batch: TrainBatch, settings: AdvantageSettings, baselines: RunningBaselines, values: Values | None, ranks: Ranks = ALONE) -> TrainBatch:
    """`batch` with the advantages that are trained on; takes the batch's scores into `baselines`, so call it once a batch.

    `values` is called once, on the sequences whose task wants `gae`. `ranks` hold the rest of the batch.
    """
    sequences = list(batch.sequences)
    by_task: dict[str, list[int]] = defaultdict(list)
    for i, s in enumerate(sequences):
        by_task[s.task].append(i)
    valued = [i for task, indices in by_task.items() if settings.of(task).name == "gae" for i in indices]
    compared = [task for task in by_task if settings.of(task).name == "reinforce" and settings.of(task).baseline == "running"]
    for task, scores in sorted(_scores(sequences, compared, ranks).items()):
        baseline = baselines.baseline(task, scores)
        baselines.update(task, scores, settings.of(task).baseline_decay)
        for i in by_task.get(task, ()):
            sequences[i] = replace(sequences[i], advantages=sequences[i].advantages - baseline)
    if values is not None:
        _estimate(sequences, sorted(valued), settings, values)
    return replace(batch, sequences=scaled(sequences, settings, ranks))


def _scores(sequences: Sequence[TrainSequence], tasks: Sequence[str], ranks: Ranks) -> dict[str, list[float]]:
    """The scores of each trajectory of `tasks`, by task, over all ranks; the same on each."""
    mine: dict[tuple[str, int], float] = {(s.task, s.trajectory): float(s.advantages[0]) for s in sequences if s.task in tasks}
    found: dict[str, list[float]] = defaultdict(list)
    for (task, _), score in sorted(pair for part in ranks.gather(mine) for pair in part.items()):
        found[task].append(score)
    return found


def _estimate(sequences: list[TrainSequence], valued: list[int], settings: AdvantageSettings, values: Values) -> None:
    """Puts advantages and returns in the place of the scores, over all tokens of a trajectory in the order they were sampled."""
    found = dict(zip(valued, values([sequences[i] for i in valued]), strict=True))
    by_trajectory: dict[int, list[int]] = defaultdict(list)
    for i in valued:
        by_trajectory[sequences[i].trajectory].append(i)
    for indices in by_trajectory.values():
        first = sequences[indices[0]]
        chosen = settings.of(first.task)
        advantages, returns = gae(
            torch.cat([found[i] for i in indices]).double(), float(first.advantages[0]), discount=chosen.discount, trace=chosen.trace
        )
        lengths = [len(sequences[i].positions) for i in indices]
        for i, a, r in zip(indices, advantages.split(lengths), returns.split(lengths), strict=True):
            sequences[i] = replace(sequences[i], advantages=a, returns=r)
