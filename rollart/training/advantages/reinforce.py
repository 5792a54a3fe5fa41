"""REINFORCE with a baseline that belongs to the task, not to the group: the batch's own mean, or a running one over the steps before."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence

__all__ = ["RunningBaselines", "reinforce"]


def reinforce(scores: Sequence[float], tasks: Sequence[Hashable]) -> list[float]:
    """A_i = r_i - mean of the scores of i's task in the batch.

    Williams 1992, Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement Learning, section 4, with the batch's
    mean for a baseline. Each score is in its own baseline, which scales the gradient by 1 - 1/n and leaves its direction.
    """
    members: dict[Hashable, list[float]] = defaultdict(list)
    for score, task in zip(scores, tasks, strict=True):
        members[task].append(score)
    means = {task: math.fsum(values) / len(values) for task, values in members.items()}
    return [score - means[task] for score, task in zip(scores, tasks, strict=True)]


class RunningBaselines:
    """An exponential mean of each task's scores over the steps before: b <- decay b + (1 - decay) mean of the batch.

    Williams 1992 calls it reinforcement comparison. What a batch is compared with was known before it was sampled, so the gradient has
    no bias; a task's first batch, before which nothing is known, is compared with its own mean.
    """

    def __init__(self, means: Mapping[str, float] | None = None) -> None:
        self.means: dict[str, float] = dict(means or {})

    def baseline(self, task: str, scores: Sequence[float]) -> float:
        """What `scores` of `task` are compared with; changes nothing."""
        return self.means.get(task, math.fsum(scores) / len(scores))

    def update(self, task: str, scores: Sequence[float], decay: float) -> None:
        """Takes one batch's `scores` of `task` in."""
        mean = math.fsum(scores) / len(scores)
        self.means[task] = decay * self.means[task] + (1.0 - decay) * mean if task in self.means else mean
