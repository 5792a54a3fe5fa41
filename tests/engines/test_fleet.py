"""How long the control side waits for engines that are not there."""

from __future__ import annotations

import asyncio

import pytest
from distributed import Client, Scheduler

from rollart.engines import fleet as module
from rollart.engines.errors import NoEngine
from rollart.engines.fleet import EngineFleet
from storage.version import Version


@pytest.mark.parametrize(("recovery_s", "looks"), [(0.0, 1), (3600.0, 5)])
async def test_engines_that_are_not_there_are_waited_for_as_long_as_they_may_take(
    monkeypatch: pytest.MonkeyPatch, recovery_s: float, looks: int
) -> None:
    monkeypatch.setattr(module, "WATCH_S", 0.001)
    async with Scheduler(protocol="inproc", dashboard=False) as scheduler, Client(scheduler.address, asynchronous=True) as client:
        fleet = EngineFleet(client, frozenset({"GENERATE"}), frozenset({"PLAY"}), recovery_s=recovery_s)
        looked, enough, look = 0, asyncio.Event(), fleet._look

        async def counted() -> tuple[list[str], list[str]]:
            nonlocal looked
            looked += 1
            if looked == looks:
                enough.set()
            return await look()

        monkeypatch.setattr(fleet, "_look", counted)
        serving = asyncio.create_task(fleet.serve(Version(0, 0)))
        await asyncio.wait_for(enough.wait(), 20)
        if looks == 1:
            with pytest.raises(NoEngine, match="GENERATE"):
                await serving
        assert looked >= looks and serving.done() == (looks == 1)
        serving.cancel()
        await fleet.close()
