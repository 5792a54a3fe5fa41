"""A scheduler and one worker in this process, whose notes to the run's user are heard."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from distributed import Client, Scheduler, Worker


@dataclass(frozen=True)
class OneWorker:
    """`told` has what was said on the topic."""

    scheduler: Scheduler
    worker: Worker
    client: Client
    told: asyncio.Queue[str]


@asynccontextmanager
async def one_worker(name: str, resources: dict[str, float], topic: str, **options: Any) -> AsyncIterator[OneWorker]:
    """The worker is called `name`; `options` are Dask's."""
    async with (
        Scheduler(protocol="inproc", dashboard=False) as scheduler,
        Worker(scheduler.address, name=name, nthreads=8, resources=resources, dashboard=False, **options) as worker,
        Client(scheduler.address, asynchronous=True) as client,
    ):
        told: asyncio.Queue[str] = asyncio.Queue()
        client.subscribe_topic(topic, lambda event: told.put_nowait(event[1]))
        yield OneWorker(scheduler, worker, client, told)
