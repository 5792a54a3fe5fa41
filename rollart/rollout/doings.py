"""What the attempts of one worker are at; owns words and times, and asks nobody."""

from __future__ import annotations

import time

from rollart.types import Attempt


class Doings:
    """What each attempt is at, in words, and since when. Called with an attempt, it says what it is at and for how many seconds by now."""

    def __init__(self) -> None:
        self._said: dict[Attempt, tuple[str, float]] = {}

    def __call__(self, attempt: Attempt) -> tuple[str, float] | None:
        """None if nothing is known of the attempt."""
        if (said := self._said.get(attempt)) is None:
            return None
        return said[0], time.monotonic() - said[1]

    def note(self, attempt: Attempt, doing: str) -> None:
        """From now on the attempt is at `doing`."""
        self._said[attempt] = (doing, time.monotonic())

    def forget(self, attempt: Attempt) -> None:
        """The attempt is over."""
        self._said.pop(attempt, None)
