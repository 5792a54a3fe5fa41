"""Makes finished trajectories durable in batches; owns the buffer of one environment worker, decides nothing."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid

from rollart.rollout.flush_pace import FlushPace
from rollart.rollout.records import encode, flushed_name
from rollart.types import Trajectory
from storage.objects.store import ObjectStore


class TrajectoryWriter:
    """Writes what it is given once the first of it has waited as long, or it is as many, as `pace` says; one object a batch.

    `write` returns once the trajectory stands in the store, so what it returns may be called finished.
    """

    def __init__(self, store: ObjectStore, pace: FlushPace) -> None:
        self._store, self.pace = store, pace
        self._name = uuid.uuid4().hex[:12]
        self._count = 0
        self._pending: list[tuple[Trajectory, asyncio.Future[tuple[str, int]]]] = []
        self._full = asyncio.Event()
        self._flusher: asyncio.Task[None] | None = None

    async def write(self, trajectory: Trajectory) -> tuple[str, int]:
        """The file (relative to the run) and the row where `trajectory` stands; the store's error if it could not be written."""
        done: asyncio.Future[tuple[str, int]] = asyncio.get_running_loop().create_future()
        self._pending.append((trajectory, done))
        if len(self._pending) >= self.pace.rows:
            self._full.set()
        if self._flusher is None or self._flusher.done():
            self._flusher = asyncio.create_task(self._flush_until_empty())
        return await done

    async def _flush_until_empty(self) -> None:
        while self._pending:
            with contextlib.suppress(TimeoutError):  # time is the other reason to flush
                await asyncio.wait_for(self._full.wait(), self.pace.seconds)
            self._full.clear()
            batch, self._pending = self._pending, []
            file = flushed_name(self._name, self._count, time.time())
            self._count += 1
            try:
                await asyncio.to_thread(self._write, file, [t for t, _ in batch])
            except Exception as error:  # noqa: BLE001 - handed on to every trajectory of the batch, which raises it
                for _, done in batch:
                    if not done.done():
                        done.set_exception(error)
                continue
            for row, (_, done) in enumerate(batch):
                if not done.done():
                    done.set_result((file, row))

    def _write(self, file: str, trajectories: list[Trajectory]) -> None:
        self._store.write(file, encode(trajectories))
