"""Names the advantage estimators and applies each to the groups of the tasks that want it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rollart.training.advantages.grpo import grpo
from rollart.training.advantages.reinforce import reinforce
from rollart.training.advantages.rloo import rloo
from rollart.training.errors import BatchError
from rollart.training.settings import AdvantageName, AdvantageSettings
from rollart.types import Attempt, Episode, Group

__all__ = ["ADVANTAGES", "Estimator", "advantages_of"]

Estimator = Callable[[Sequence[float], Sequence[Episode], AdvantageSettings], list[float]]
"""Scores and their episodes, both of length n, to n advantages. What has to be compared with something that only the learner knows, a
running baseline or values, is left as the score."""

ADVANTAGES: dict[AdvantageName, Estimator] = {
    "grpo": lambda scores, episodes, settings: grpo(scores, episodes, divide_by_std=settings.divide_by_std),
    "rloo": lambda scores, episodes, settings: rloo(scores, episodes),
    "reinforce": lambda scores, episodes, settings: reinforce(scores, [e.task for e in episodes]) if settings.baseline == "batch" else list(scores),
    "gae": lambda scores, episodes, settings: list(scores),
}


def advantages_of(groups: Iterable[Group], settings: AdvantageSettings) -> dict[Attempt, float]:
    """What the scores alone say of each attempt of `groups`, each task by its own estimator; the learner finishes what needs more.

    BatchError if a score or a receipt is in the wrong place.
    """
    attempts: list[Attempt] = []
    scores: list[float] = []
    for group in groups:
        for member in group.members:
            attempt = member.receipt.attempt
            if attempt.episode != group.episode:
                raise BatchError(f"attempt {attempt} stands in the group of {group.episode}; groups hold attempts of one episode")
            if (member.score.attempt, member.score.nonce) != (attempt, member.receipt.nonce):
                raise BatchError(f"attempt {attempt} carries a score of {member.score.attempt}, or of another execution of it")
            attempts.append(attempt)
            scores.append(member.score.value)
    if len(set(attempts)) != len(attempts):
        raise BatchError("an attempt stands twice in the batch; each may be trained on once")
    found: dict[Attempt, float] = {}
    for task in dict.fromkeys(a.episode.task for a in attempts):
        chosen = settings.of(task)
        mine = [i for i, a in enumerate(attempts) if a.episode.task == task]
        values = ADVANTAGES[chosen.name]([scores[i] for i in mine], [attempts[i].episode for i in mine], chosen)
        found |= {attempts[i]: value for i, value in zip(mine, values, strict=True)}
    return found
