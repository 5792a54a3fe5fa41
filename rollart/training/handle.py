"""The control side of training: each call is a Dask task pinned to the worker that owns the learner. Decides nothing."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any

from distributed import Client, Future

from rollart.cluster import workers_of
from rollart.training import draft_tasks as drafts
from rollart.training import worker as tasks
from rollart.training.errors import TrainerLost
from rollart.training.keeping import Keeping
from rollart.training.metrics import StepMetrics, SupervisedMetrics
from rollart.training.resumed import Resumed
from rollart.training.settings import OptimiserSettings
from rollart.types import Batch, Receipt, Version

log = logging.getLogger(__name__)

WATCH_S = 1.0
"""Between two looks, while a task runs, at whether its worker is still there."""


class Trainer:
    """Training steps take the training class's resource, so that one runs at a time; publishing and saving run beside them.

    All of it is done for `coordinator`, by number. Where another one has set the worker up, each call is Superseded.
    """

    def __init__(self, client: Client, address: str, resource: str, namespace: str, coordinator: int = 0) -> None:
        self._client, self._address, self._resource, self._namespace, self._coordinator = client, address, resource, namespace, coordinator
        self._count = itertools.count()
        self.tell: Callable[[str], None] = log.warning
        """Is told, in a line, what happens to the workers that train."""

    async def open(self) -> None:
        """Makes ready for the first step; the workers have their learners by then, or build them."""

    async def train(self, batch: Batch, keep_state: bool, given: Sequence[Future] = ()) -> StepMetrics:
        """One training step; with `keep_state` the state after it can be saved while the next one runs. `given` are futures of the batch's
        log-probabilities, where other workers compute them; they don't pass through here."""
        return await self._run("train-step", tasks.train_task, batch, keep_state, list(given), exclusive=True)

    async def supervised(self, receipts: Sequence[Receipt]) -> SupervisedMetrics:
        """One supervised step on durable trajectories."""
        return await self._run("supervised-step", tasks.supervised_receipts_task, tuple(receipts), exclusive=True)

    async def begin(self, optimiser: OptimiserSettings | None = None) -> None:
        """A fresh optimiser on the weights held now."""
        await self._run("begin", tasks.begin_task, optimiser, 0, exclusive=True)

    async def publish(self, version: Version, parent: Version | None, metadata: dict[str, Any]) -> Version:
        """Publishes the weights of `version`; returns once it exists."""
        return await self._run("publish", tasks.publish_task, version, parent, metadata)

    async def checkpoint(self, version: Version, documents: dict[str, Any]) -> Version:
        """Saves the state at `version` and `documents` in one commit."""
        return await self._run("checkpoint", tasks.checkpoint_task, version, documents)

    async def publish_draft(self, lineage: int, metadata: dict[str, Any]) -> Version:
        """Publishes the draft head as it is, under the number of the policy's version that the learner is at."""
        return await self._run("publish-draft", drafts.publish_draft_task, lineage, metadata)

    async def collect(self, keeping: Keeping) -> None:
        """Removes the checkpoints and versions that are not kept. StoreError."""
        await self._run("collect", tasks.collect_task, keeping)

    async def resume(self) -> Resumed:
        """Goes on from the newest checkpoint, if there is one, in a new lineage of versions and checkpoints."""
        return await self._run("resume", tasks.resume_task, exclusive=True)

    async def run(self, name: str, task: Callable[..., Any], *args: Any) -> Any:
        """Another task on the worker that owns the learner, or is to, whoever set it up; its result. TrainerLost if it ends meanwhile."""
        return await self._watched(self._address, name, task, *args)

    async def _run(self, name: str, task: Callable[..., Any], *args: Any, exclusive: bool = False) -> Any:
        return await self._run_at(self._address, name, task, *args, exclusive=exclusive)

    async def _run_at(self, address: str, name: str, task: Callable[..., Any], *args: Any, exclusive: bool = False) -> Any:
        return await self._watched(address, name, tasks.fenced_task, self._coordinator, task, *args, exclusive=exclusive)

    async def _watched(self, address: str, name: str, task: Callable[..., Any], *args: Any, exclusive: bool = False) -> Any:
        result = asyncio.ensure_future(self.result_of(self._submit(address, name, task, *args, exclusive=exclusive)))
        try:
            while not result.done():
                await asyncio.wait((result,), timeout=WATCH_S)
                # Dask would wait for ever for a worker at that address: a restarted one has another, and an empty learner.
                if not result.done() and address not in {w.address for w in await workers_of(self._client)}:
                    raise TrainerLost(address, name)
            return result.result()
        finally:
            result.cancel()

    def _submit(self, address: str, name: str, task: Callable[..., Any], *args: Any, exclusive: bool) -> Future:
        return self._client.submit(
            task, *args, key=f"{name}-{next(self._count)}-{self._namespace}", workers=[address], allow_other_workers=False,
            resources={self._resource: 1} if exclusive else None, pure=False, retries=0,
        )  # fmt: skip

    @staticmethod
    async def result_of(future: Future) -> Any:
        """The future's result, once it is there; its error is raised."""
        # Who is cancelled while awaiting a future itself leaves a task of Dask's behind, whose error is told at the end as one that nobody heard.
        await future._state.wait()
        return await future
