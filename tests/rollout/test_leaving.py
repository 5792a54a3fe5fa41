"""A worker that is unfit leaves a real scheduler: what it can end ends there, the rest goes on elsewhere, and the user is told."""

from __future__ import annotations

import asyncio
import re

from distributed import Worker
from distributed.worker import get_worker

from rollart.rollout.leaving import Leaving, told_topic, unprepared
from tests.one_worker import one_worker

PATIENCE_S = 60.0

FREE: dict[str, asyncio.Event] = {}


async def wait_for(name: str) -> str:
    """Ends, once it may, with the name of the worker that it ended on; on any other worker than the first, at once."""
    worker = str(get_worker().name)
    if worker == "first":
        await FREE[name].wait()
    return worker


async def test_a_worker_that_leaves_ends_what_it_can_takes_nothing_new_and_leaves_the_rest_to_others() -> None:
    async with one_worker("first", {"PLAY": 4}, "told-run-0") as here:
        scheduler, first, client, told = here.scheduler, here.worker, here.client, here.told
        FREE.update({name: asyncio.Event() for name in ("ends", "sticks", "late")})
        ends, sticks = (client.submit(wait_for, name, key=name, resources={"PLAY": 1}, pure=False) for name in ("ends", "sticks"))
        async with asyncio.timeout(PATIENCE_S):
            while True:
                if first.state.executing_count == 2:
                    break
                await asyncio.sleep(0.01)
            for reason in ("2 calls have not come back", "once is enough, whichever plugin says so"):
                Leaving(first, told_topic("run", 0), stuck=lambda: 1).begin(reason)
            assert await told.get() == (
                "worker first leaves (2 calls have not come back); its tasks go on elsewhere, and it has no nanny that would start another: "
                "do that yourself"
            )
            late = client.submit(wait_for, "late", key="late", resources={"PLAY": 1}, pure=False)
            FREE["ends"].set()
            assert await ends == "first"
            await first.finished()
            async with Worker(scheduler.address, name="second", nthreads=8, resources={"PLAY": 4}, dashboard=False):
                assert await asyncio.gather(sticks, late) == ["second", "second"]
        assert told.empty()


async def prepared_only() -> str:
    worker = get_worker()
    if worker.name == "first":
        await unprepared(worker, "the store", "told-run-0")
    return str(worker.name)


async def test_a_worker_on_which_something_was_not_set_up_leaves_and_fails_none_of_its_tasks() -> None:
    async with one_worker("first", {"PLAY": 4}, "told-run-0") as here:
        scheduler, first, client, told = here.scheduler, here.worker, here.client, here.told
        futures = [client.submit(prepared_only, key=f"task-{i}", resources={"PLAY": 1}, pure=False) for i in range(6)]
        async with asyncio.timeout(PATIENCE_S):
            assert "worker first leaves (the store could not be set up; its log says why)" in await told.get()
            await first.finished()
            async with Worker(scheduler.address, name="second", nthreads=8, resources={"PLAY": 4}, dashboard=False):
                assert await client.gather(futures) == ["second"] * 6
        assert told.empty()


async def test_a_worker_that_dask_paused_for_its_memory_leaves_once_what_it_has_has_ended() -> None:
    async with one_worker("first", {"PLAY": 4}, "told-run-0", memory_limit="1 TiB") as here:
        first, client, told = here.worker, here.client, here.told
        FREE["ends"] = asyncio.Event()
        ends = client.submit(wait_for, "ends", key="ends", resources={"PLAY": 1}, pure=False)
        async with asyncio.timeout(PATIENCE_S):
            while True:
                if first.state.executing_count:
                    break
                await asyncio.sleep(0.01)
            first.memory_manager.memory_pause_fraction = 1e-9  # whatever it holds is near its limit
            leaving = Leaving(first, "told-run-0")
            leaving.watch_memory()
            assert re.search(r"worker first leaves \(its process holds [\d,]+ MiB of the [\d,]+ MiB that it may\)", await told.get())
            FREE["ends"].set()
            assert await ends == "first"
            await first.finished()
