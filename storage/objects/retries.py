"""When a request to a store is tried again, how often and for how long; owns the count, the pauses and the log line, not what passes."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

ATTEMPTS = 6
"""Tries of one request, the first included: with the pauses below they span about six seconds, which throttling and a server's
restart behind a balancer take; what lasts longer is for a person to see."""

FIRST_PAUSE_S = 0.2
"""Pause before the second try, doubled for each one after it: shorter would add to the load that made a server refuse."""

LONGEST_PAUSE_S = 5.0

TOTAL_S = 120.0
"""No try begins later than this after the first: where each one runs into its time-out, six would take many minutes."""

_log = logging.getLogger(__name__)

R = TypeVar("R")


class GaveUp(OSError):
    """A request failed in a passing way each time it was tried. Its cause is the last failure."""


def retried(work: Callable[[], R], doing: str, passing: Callable[[Exception], bool], scrubbed: Callable[[str], str]) -> R:
    """The result of `work`, tried again while it raises what `passing` accepts; GaveUp when the tries or the time are used up.

    Pauses are drawn from half to all of their length, so that clients which were refused together don't come back together.
    Each further try is logged with `doing` (which object, what for), its number and the error's text as `scrubbed` leaves it.
    """
    start = time.monotonic()
    pause = FIRST_PAUSE_S
    attempt = 1
    while True:
        try:
            return work()
        except Exception as error:
            if not passing(error):
                raise
            said = scrubbed(f"{type(error).__name__}: {error}")
            wait = random.uniform(0.5, 1.0) * min(pause, LONGEST_PAUSE_S)
            took = time.monotonic() - start
            if attempt >= ATTEMPTS or took + wait > TOTAL_S:
                raise GaveUp(
                    f"tried {attempt} {'time' if attempt == 1 else 'times'} in {took:.1f} s, the last time: {said}; "
                    "the store or the way to it is in trouble: look at its address and its load, then try again"
                ) from error
            _log.warning("%s failed (%s); attempt %d of %d follows in %.1f s", doing, said, attempt + 1, ATTEMPTS, wait)
        time.sleep(wait)
        attempt += 1
        pause *= 2
