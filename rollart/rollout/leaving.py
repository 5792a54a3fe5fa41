"""How a worker leaves the cluster that is no longer fit for its tasks: owns the order of its steps, not what makes a worker unfit.

Such a worker fails each task at once, is free at once, and so is given more and more of them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import NoReturn
from weakref import WeakKeyDictionary

from distributed import Worker
from distributed.core import Status
from tornado.ioloop import PeriodicCallback

log = logging.getLogger(__name__)

FINISH_S = 60.0
"""How long what runs on a worker that leaves may take to end; what has not is done again elsewhere."""

CLOSE_S = 3.0
"""How long the tasks that are left may take to be cancelled. A local cluster gives a worker up, and its nanny with it, that is gone for 15 s."""

LOOK_S = 0.1
"""Between two looks at whether anything still runs."""


_MEMORY = "leaving-memory"
"""What the worker calls the look at its memory; it ends with the worker."""


def told_topic(run: str, lineage: int) -> str:
    """Where on the scheduler the workers of a run tell what its user should hear."""
    return f"told-{run}-{lineage}"


class Leaving:
    """Lets `worker` leave, once: it takes nothing new, finishes what it can, hands over its results, and closes its process. A nanny
    starts another one, which is set up anew; a worker without one is gone, until whoever deployed it starts another. `stuck` counts the tasks
    that can't end here."""

    def __init__(self, worker: Worker, topic: str, stuck: Callable[[], int] = lambda: 0) -> None:
        self._worker, self._topic, self._stuck = worker, topic, stuck

    def watch_memory(self) -> Leaving:
        """Leaves as soon as Dask has paused the worker, since it has come near its limit of memory, if it has one: what leaks is not freed by
        waiting. Returns itself."""
        worker, limit = self._worker, self._worker.memory_manager.memory_limit
        if limit is None:
            return self

        def look() -> None:
            if worker.status == Status.paused:
                self.begin(f"its process holds {worker.monitor.get_process_memory() / 2**20:,.0f} MiB of the {limit / 2**20:,.0f} MiB that it may")

        callbacks = worker.periodic_callbacks
        if _MEMORY in callbacks:  # of the run before
            callbacks[_MEMORY].stop()
        callbacks[_MEMORY] = PeriodicCallback(look, 1000 * LOOK_S)
        callbacks[_MEMORY].start()
        return self

    def begin(self, reason: str) -> None:
        """Leaves for `reason`, which the run's user is told; at once, and beside whatever goes on. Does nothing where the worker leaves already,
        for whatever reason: one may have several plugins, each with one of its own."""
        if self._worker not in _LEAVING:
            _LEAVING[self._worker] = asyncio.create_task(self._leave(reason))

    async def _leave(self, reason: str) -> None:
        worker = self._worker
        successor = "its nanny starts another process" if worker.nanny else "it has no nanny that would start another: do that yourself"
        log.error("this worker leaves the cluster: %s", reason)
        worker.log_event(self._topic, f"worker {worker.name} leaves ({reason}); its tasks go on elsewhere, and {successor}")
        worker.memory_manager.memory_pause_fraction = False  # else it would end the pause as soon as there is memory
        worker.status = Status.paused
        for _ in range(int(FINISH_S / LOOK_S)):
            if worker.state.executing_count <= self._stuck():
                break
            await asyncio.sleep(LOOK_S)
        moved = f"leaving-{time.time()}"
        await worker.scheduler.retire_workers(workers=[worker.address], close_workers=False, remove=True, stimulus_id=moved)
        await worker.close(nanny=False, timeout=CLOSE_S, executor_wait=False, reason=reason)


_LEAVING: WeakKeyDictionary[Worker, asyncio.Task[None]] = WeakKeyDictionary()
"""The workers that leave."""


async def unprepared(worker: Worker, what: str, topic: str) -> NoReturn:
    """For a task that finds `what` it needs of its worker not set up: has the worker leave, and ends only when Dask takes the task elsewhere."""
    Leaving(worker, topic, stuck=lambda: worker.state.executing_count).begin(f"{what} could not be set up; its log says why")
    while True:
        await asyncio.Event().wait()
