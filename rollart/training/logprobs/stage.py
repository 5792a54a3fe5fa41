"""The control side of the stage: deals a batch out to the workers of its class as Dask tasks, and hands their futures on. Sees no number."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable
from typing import TypeVar

from distributed import Client, Future, KilledWorker, as_completed

from rollart.cluster import workers_of
from rollart.training.errors import LogprobsLost
from rollart.training.handle import WATCH_S
from rollart.training.logprobs.worker import LogprobShare, logprobs_task
from rollart.types import Batch, Version

__all__ = ["LogprobFutures", "LogprobStage"]

T = TypeVar("T")


class LogprobStage:
    """Log-probabilities under `reference` and the version that a step starts from, on the workers that have `resource`.

    A share whose worker dies is computed anew on another one, or on the one that comes in its place, for which `patience_s` seconds are
    waited. `namespace` keeps the keys of this run's tasks apart from others'.
    """

    def __init__(self, client: Client, resource: str, namespace: str, reference: Version, patience_s: float) -> None:
        self.reference = reference
        self._client, self._resource, self._namespace, self._patience = client, resource, namespace, patience_s
        self._count = itertools.count()

    @contextlib.asynccontextmanager
    async def of(self, batch: Batch) -> AsyncIterator[LogprobFutures]:
        """The log-probabilities of `batch`, under way; they are let go with the context."""
        sampled = sum(m.receipt.sampled > 0 for m in batch.members)
        shares = min(sampled, max(1, await self._workers()))
        started = LogprobFutures(
            self,
            [
                self._client.submit(
                    logprobs_task, LogprobShare(batch, rank, shares, self.reference), key=f"logprobs-{next(self._count)}-{self._namespace}",
                    resources={self._resource: 1}, pure=False, retries=0,
                )
                for rank in range(shares)
            ],
        )  # fmt: skip
        try:
            yield started
        finally:
            for future in started.futures:
                future.release()

    async def watch(self, futures: list[Future], work: Awaitable[T]) -> T:
        """The result of `work`, which needs `futures`. LogprobsLost once no worker could compute one that isn't there, for too long."""
        doing = asyncio.ensure_future(work)
        loop = asyncio.get_running_loop()
        seen = loop.time()
        try:
            while not doing.done():
                await asyncio.wait((doing,), timeout=WATCH_S)
                if doing.done() or all(f.status == "finished" for f in futures) or await self._workers():
                    seen = loop.time()
                elif loop.time() - seen >= self._patience:  # Dask would wait for ever
                    raise LogprobsLost(
                        f"stages.logprobs: no worker has had the resource {self._resource} for {self._patience:g} seconds, and a training step waits "
                        "for its log-probabilities; start one, and go on with --resume"
                    )
            return doing.result()
        except KilledWorker as error:
            if not any(f.status == "error" for f in futures):
                raise
            raise LogprobsLost(
                f"stages.logprobs: each worker that was to compute log-probabilities of a batch died of it, lastly {error.last_worker.address}; "
                "see what ended them (memory, by default): lower logprobs.token_budget, or take larger workers, and go on with --resume"
            ) from error
        finally:
            doing.cancel()

    async def _workers(self) -> int:
        return sum(w.resources.get(self._resource, 0) >= 1 for w in await workers_of(self._client))


class LogprobFutures:
    """The tasks of one batch: `futures` of a `Logprobs` each, as arguments of the training tasks, which fetch them from the workers."""

    def __init__(self, stage: LogprobStage, futures: list[Future]) -> None:
        self._stage, self.futures = stage, futures

    async def ready(self) -> None:
        """Returns once all are computed, or raises what one of them did. LogprobsLost."""
        await self.beside(self._computed())

    async def beside(self, work: Awaitable[T]) -> T:
        """The result of `work`, which uses `futures`: of one that is lost with its worker it waits for another. LogprobsLost."""
        return await self._stage.watch(self.futures, work)

    async def _computed(self) -> None:
        async for future in as_completed(self.futures):
            if future.status in ("error", "cancelled"):
                await future  # which raises; the result of another one has no business here
