"""Measures one version on held-out episodes; owns which results count, not where they run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollart.rollout.coordinator import HOPELESS, RolloutFailed
from rollart.rollout.dispatcher import Dispatcher
from rollart.types import Attempt, Episode, Member, Version


@dataclass(frozen=True, slots=True)
class Evaluation:
    """`members`: one scored trajectory an episode, every token of `version`. `void`: episodes that never got one, and `reason` of the last."""

    version: Version
    members: tuple[Member, ...]
    void: tuple[Episode, ...]
    reason: str = ""

    def mean(self, task: str) -> float:
        """Mean score of a task's episodes; NaN without any."""
        scores = [m.score.value for m in self.members if m.receipt.attempt.episode.task == task]
        return sum(scores) / len(scores) if scores else float("nan")

    def count(self, task: str) -> int:
        return sum(m.receipt.attempt.episode.task == task for m in self.members)


async def evaluate_version(
    dispatcher: Dispatcher, version: Version, tasks: Sequence[str], episodes: int, attempts: int, stall_s: float | None = None
) -> Evaluation:
    """Plays `episodes` held-out episodes of each task, the same ones at every call, on `version`.

    The caller keeps the engines on that version. A token of another version voids the attempt; so does a failure. Either is tried again,
    `attempts` times in all. RolloutFailed if everything fails, Stalled after `stall_s` seconds in which nothing has ended.
    """
    waiting: set[Attempt] = set()
    for task in tasks:
        plan = [Attempt(Episode(task, i, "evaluate"), 0) for i in range(episodes)]
        waiting.update(plan)
        dispatcher.dispatch(plan)
    most = max(HOPELESS, len(waiting))  # what one loss may take with it
    members: list[Member] = []
    void: list[Episode] = []
    reason = ""
    failures = 0
    async for ended in dispatcher.ended(stall_s):
        for end in ended:
            waiting.discard(end.attempt)
            member = end.member
            if member is not None and member.receipt.first_version == member.receipt.last_version == version.step:
                members.append(member)
                failures = 0
                continue
            reason = f"{end.attempt}: {end.error}" if member is None else f"{end.attempt}: sampled by versions other than {version}"
            failures += 1
            if failures >= most:
                raise RolloutFailed(f"{failures} evaluation attempts in a row failed; the last, {reason}") from end.error
            if end.attempt.number + 1 < attempts:
                again = end.attempt.retried()
                waiting.add(again)
                dispatcher.dispatch([again])
            else:
                void.append(end.attempt.episode)
        if not waiting:
            break
    members.sort(key=lambda m: m.receipt.attempt)
    return Evaluation(version, tuple(members), tuple(void), reason)
