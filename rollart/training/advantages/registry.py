"""Names the advantage estimators and applies one to a batch's groups."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from rollart.training.advantages.grpo import grpo
from rollart.training.errors import BatchError
from rollart.training.settings import AdvantageName, AdvantageSettings
from rollart.types import Attempt, Episode, Group

__all__ = ["ADVANTAGES", "advantages_of"]


class Estimator(Protocol):
    """Scores and their groups' ids, both of length n, to n advantages."""

    def __call__(self, scores: list[float], groups: list[Episode], *, divide_by_std: bool) -> list[float]: ...


ADVANTAGES: dict[AdvantageName, Estimator] = {"grpo": grpo}


def advantages_of(groups: Iterable[Group], settings: AdvantageSettings) -> dict[Attempt, float]:
    """The advantage of each attempt of `groups`; BatchError if a score or a receipt is in the wrong place."""
    attempts: list[Attempt] = []
    scores: list[float] = []
    episodes: list[Episode] = []
    for group in groups:
        for member in group.members:
            attempt = member.receipt.attempt
            if attempt.episode != group.episode:
                raise BatchError(f"attempt {attempt} stands in the group of {group.episode}; groups hold attempts of one episode")
            if (member.score.attempt, member.score.nonce) != (attempt, member.receipt.nonce):
                raise BatchError(f"attempt {attempt} carries a score of {member.score.attempt}, or of another execution of it")
            attempts.append(attempt)
            scores.append(member.score.value)
            episodes.append(group.episode)
    if len(set(attempts)) != len(attempts):
        raise BatchError("an attempt stands twice in the batch; each may be trained on once")
    return dict(zip(attempts, ADVANTAGES[settings.name](scores, episodes, divide_by_std=settings.divide_by_std), strict=True))
