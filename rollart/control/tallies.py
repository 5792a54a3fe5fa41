"""What became of members, by task and fate, and how much of a trajectory they had: whoever drops some must be able to say which."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rollart.types import Receipt


@dataclass(slots=True)
class Tally:
    """`members` with one fate, of which `played` left a trajectory, with so many `sampled` tokens and `seconds` in all.

    Those that were stopped for others of their group left none: `outlasted` sums the tokens of the last that had ended by then. They were still
    running, so where length alone drives latency they would have had as many at least.
    """

    members: int = 0
    played: int = 0
    sampled: int = 0
    seconds: float = 0.0
    outlasted: int = 0

    def note(self, receipt: Receipt | None, outlasted: Receipt | None = None) -> None:
        """One member more; `receipt` is its trajectory's, if it left one, and `outlasted` that of the one for which it was stopped."""
        self.members += 1
        self.outlasted += outlasted.sampled if outlasted is not None else 0
        if receipt is not None:
            self.played += 1
            self.sampled += receipt.sampled
            self.seconds += receipt.seconds.get("total", 0.0)

    @property
    def mean_sampled(self) -> float | None:
        """Tokens a trajectory; None without any."""
        return self.sampled / self.played if self.played else None

    @property
    def least_sampled(self) -> float | None:
        """Tokens that those had at least which were stopped for others, if latency is their length's; None without any."""
        return self.outlasted / (self.members - self.played) if self.outlasted else None


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

    def note(self, task: str, fate: str, receipt: Receipt | None, outlasted: Receipt | None = None) -> None:
        """A member of `task` ended as `fate`."""
        self.by_task[task].setdefault(fate, Tally()).note(receipt, outlasted)
