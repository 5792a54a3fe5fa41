"""What became of members, by task and fate, and how much of a trajectory they had: whoever drops some must be able to say which."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rollart.types import Receipt


@dataclass(slots=True)
class Tally:
    """`members` with one fate, of which `played` left a trajectory, with so many `sampled` tokens and `seconds` in all."""

    members: int = 0
    played: int = 0
    sampled: int = 0
    seconds: float = 0.0

    def note(self, receipt: Receipt | None) -> None:
        """One member more; `receipt` is its trajectory's, if it left one."""
        self.members += 1
        if receipt is not None:
            self.played += 1
            self.sampled += receipt.sampled
            self.seconds += receipt.seconds.get("total", 0.0)

    @property
    def mean_sampled(self) -> float | None:
        """Tokens a trajectory; None without any."""
        return self.sampled / self.played if self.played else None


class Tallies:
    """Task to fate to its tally."""

    def __init__(self, tasks: Iterable[str], kept: Mapping[str, Mapping[str, Tally]] | None = None) -> None:
        self.by_task: dict[str, dict[str, Tally]] = {task: dict((kept or {}).get(task, {})) for task in tasks}

    @property
    def fates(self) -> Counter[str]:
        """Members by fate, of all tasks."""
        found: Counter[str] = Counter()
        for of_task in self.by_task.values():
            found.update({fate: tally.members for fate, tally in of_task.items()})
        return found

    def note(self, task: str, fate: str, receipt: Receipt | None) -> None:
        """A member of `task` ended as `fate`."""
        self.by_task[task].setdefault(fate, Tally()).note(receipt)
