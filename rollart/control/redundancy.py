"""Which spares to launch and which of two tries goes on, without favouring the fast; owns the delays that this is judged by.

Whoever is last may be slow because of what the policy wrote, and stopping it would censor long responses. So by default a try yields to
a spare only while its delay says nothing of the policy: before it asks an engine for its first token.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Literal

RedundancyRule = Literal["none", "before_first_token", "first_finished"]
"""`before_first_token`: a member that is late to ask for its first token gets a second try beside it, and the one that begins first goes on.
`first_finished`: groups are launched larger, and whoever is still running once enough have finished is stopped, which favours the fast
(RollArt's rule)."""

MEASURED = 20
"""Delays of a task that have to be known before a late one can be told."""

RECENT = 500
"""Delays of a task that are looked at."""


@dataclass(frozen=True, slots=True)
class Redundancy:
    """`factor`: tries at most that are out for a group, over its size. `patience`: the share of a task's measured delays that a try has
    to outlast before it gets a spare."""

    rule: RedundancyRule = "none"
    factor: float = 1.3
    patience: float = 0.9

    def __post_init__(self) -> None:
        if not 1 <= self.factor <= 4:
            raise ValueError(f"factor is {self.factor}; write between 1 and 4 tries for each member of a group")
        if not 0 <= self.patience < 1:
            raise ValueError(f"patience is {self.patience}; write a share from 0 up to, not including, 1")

    def launched(self, group_size: int) -> int:
        """Members that a group is admitted with, of which `group_size` are wanted."""
        return math.ceil(group_size * self.factor - 1e-9) if self.rule == "first_finished" else group_size

    def spares(self, group_size: int) -> int:
        """Second tries that may be out for a group at a time."""
        return math.ceil(group_size * (self.factor - 1) - 1e-9) if self.rule == "before_first_token" else 0


class Delays:
    """Seconds from a try's dispatch until it asks for its first token, by task."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=RECENT))

    def note(self, task: str, seconds: float) -> None:
        """A try of `task` began after that many seconds."""
        self._seconds[task].append(seconds)

    def quantile(self, task: str, share: float) -> float | None:
        """The delay that `share` of the task's tries stay under; None while too few are known."""
        known = sorted(self._seconds[task])
        if len(known) < MEASURED:
            return None
        return known[min(len(known) - 1, int(share * len(known)))]
