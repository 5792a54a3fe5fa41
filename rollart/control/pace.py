"""Whether trajectories keep up with the steps: which task's outlast the staleness window, and how wide it would have to be. Times nothing."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

ENDS, STEPS = 20, 3
"""Trajectories of a task, and steps, that have to be known before its pace is told."""

RECENT_ENDS, RECENT_STEPS = 200, 20
"""Those that are looked at, the last ones."""


@dataclass(frozen=True, slots=True)
class Outlasting:
    """Half of the task's trajectories take over `seconds`, while a step that needn't wait for that task takes `step_s`: a window of `alpha`
    is what they need."""

    task: str
    seconds: float
    step_s: float
    alpha: int


class Pace:
    """Fed with how long trajectories took and with when steps began."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=RECENT_ENDS))
        self._steps: deque[tuple[float, Mapping[str, float]]] = deque(maxlen=RECENT_STEPS)
        self._last: float | None = None

    def ended(self, task: str, seconds: float) -> None:
        """A trajectory of `task` took that long."""
        self._seconds[task].append(seconds)

    def stepped(self, now: float, waited: Mapping[str, float]) -> None:
        """A batch was formed at time `now`, for which `waited[task]` seconds were spent while that task's groups were missing."""
        if self._last is not None:
            self._steps.append((now - self._last, dict(waited)))
        self._last = now

    def outlasting(self, alpha: int) -> list[Outlasting]:
        """The tasks whose median trajectory takes longer than the `alpha` + 1 steps that the window gives it.

        A step is taken without the time that it waited for the task itself, which is as long as the task makes it.
        """
        found: list[Outlasting] = []
        if len(self._steps) < STEPS:
            return found
        for task, seconds in self._seconds.items():
            step = median(length - waited.get(task, 0.0) for length, waited in self._steps)
            usual = median(seconds)
            if len(seconds) >= ENDS and step > 0 and usual > (alpha + 1) * step:
                found.append(Outlasting(task, usual, step, math.ceil(usual / step) - 1))
        return found
