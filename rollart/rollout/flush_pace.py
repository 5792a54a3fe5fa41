"""How many finished trajectories are written at once, and how long they wait for each other: so that a step costs a store few objects whatever
its batch. Decides, writes nothing."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

OBJECTS_A_STEP = 40
"""Files that all writers together make in a step for time's sake, and as many again, at most, because they hold enough."""

WAIT_SHARE = 1 / 4
"""Part of a step that a finished trajectory may wait, however many writers there are: each writes four files a step at least."""

RECENT = 5


class FlushPace:
    """`least_s`, `least_rows`: what is waited for at least. `writers` workers write the `a_step` trajectories of a training step."""

    def __init__(self, least_s: float, least_rows: int, writers: int = 1, a_step: int = 0) -> None:
        self.rows = max(least_rows, math.ceil(a_step / OBJECTS_A_STEP))
        self._least_s, self._writers = least_s, writers
        self._steps: deque[float] = deque(maxlen=RECENT)
        self._last: float | None = None

    def stepped(self, now: float) -> None:
        """A newer version came at time `now`."""
        if self._last is not None:
            self._steps.append(now - self._last)
        self._last = now

    @property
    def seconds(self) -> float:
        """How long a finished trajectory waits for others; `least_s` until the length of a step is known."""
        if not self._steps:
            return self._least_s
        step = median(self._steps)
        return max(self._least_s, min(step * self._writers / OBJECTS_A_STEP, step * WAIT_SHARE))
