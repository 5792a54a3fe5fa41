"""Awaits what should end in time: tells when it hasn't for a while, and gives it up in the end. Knows nothing of what it awaits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from rollart.control.silence import Silence

__all__ = ["Overdue", "patient"]

T = TypeVar("T")

LOOK_S = 1.0


class Overdue(RuntimeError):
    """Something has not ended within its time; the message says what."""


async def patient(work: Awaitable[T], what: str, *, silence_s: float, limit_s: float, tell: Callable[[str], None], look_s: float = LOOK_S) -> T:
    """The result of `work`, which is `what` in words. `tell` hears of it after `silence_s` seconds, and each time that it has taken twice as long
    again; Overdue after `limit_s` seconds, and `work` is then cancelled."""
    doing, began, silence = asyncio.ensure_future(work), time.monotonic(), Silence(silence_s)
    try:
        while not (await asyncio.wait((doing,), timeout=min(look_s, silence_s, limit_s)))[0]:
            taken = time.monotonic() - began
            if taken >= limit_s:
                raise Overdue(f"{what} has not ended within {limit_s:g} s (run.step_timeout); look at that worker's log, then go on with --resume")
            if silence.due(taken):
                tell(f"{what} has been awaited for {taken:.0f} s")
        return doing.result()
    finally:
        doing.cancel()
