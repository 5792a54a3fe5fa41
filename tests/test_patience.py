"""What is awaited for long is told of, and given up in the end."""

from __future__ import annotations

import asyncio

import pytest

from rollart.patience import Overdue, patient


async def test_what_ends_in_time_is_returned_without_a_word_and_its_error_raised() -> None:
    told: list[str] = []

    async def fails() -> None:
        raise OSError("the disk is full")

    assert await patient(asyncio.sleep(0, "done"), "it", silence_s=60.0, limit_s=60.0, tell=told.append) == "done"
    with pytest.raises(OSError, match="the disk is full"):
        await patient(fails(), "it", silence_s=60.0, limit_s=60.0, tell=told.append)
    assert told == []


async def test_what_does_not_end_is_told_ever_less_often_and_cancelled_in_the_end() -> None:
    told: list[str] = []
    never = asyncio.get_running_loop().create_future()
    with pytest.raises(Overdue, match=r"training step 3 on worker w has not ended within 0\.4 s \(run\.step_timeout\).*--resume"):
        await patient(never, "training step 3 on worker w", silence_s=0.04, limit_s=0.4, tell=told.append, look_s=0.01)
    assert never.cancelled()
    assert 1 <= len(told) <= 4 and all(line.startswith("training step 3 on worker w has been awaited for") for line in told)


async def test_who_is_cancelled_cancels_what_it_awaits() -> None:
    never = asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(patient(never, "it", silence_s=60.0, limit_s=60.0, tell=lambda text: None))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert never.cancelled()
