"""The control side of training over several workers: forms the group of ranks, and forms it anew when one is lost. Decides nothing else.

Each worker is a rank. A step is one task on each of them, which they take together or not at all: what a broken step changed is
undone where it was changed, and a rank that lived on hands what it holds to the one that comes in the lost one's place.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distributed import Client, Future, KilledWorker

from rollart.cluster import ClusterWorker, workers_of
from rollart.training import rank_tasks
from rollart.training import worker as tasks
from rollart.training.errors import GroupBroken, TrainerLost
from rollart.training.handle import WATCH_S, Trainer
from rollart.training.keeping import Keeping
from rollart.training.metrics import StepMetrics, SupervisedMetrics
from rollart.training.resumed import Resumed
from rollart.training.seat import Invitation, Order, Standing
from rollart.training.settings import LearnerSettings, OptimiserSettings
from rollart.types import Batch, Receipt, Version
from storage.errors import VersionTaken

__all__ = ["TrainerGroup"]

log = logging.getLogger(__name__)

_TRIES = 5
"""How often one step is begun, or a group formed, before that is given up: each failure costs a worker, and this many are no accident."""

_SETTLE_S = 15.0
"""How long, beyond their own patience, ranks whose group broke may take to say so; one that is silent for longer is left out."""


class TrainerGroup(Trainer):
    """Training on the workers at `addresses`, rank by rank; `settings` are those of their learners. `open` has to come first."""

    def __init__(
        self, client: Client, addresses: Sequence[str], resource: str, namespace: str, settings: LearnerSettings, coordinator: int = 0
    ) -> None:
        super().__init__(client, addresses[0], resource, namespace, coordinator)
        self._members = list(addresses)
        self._wanted = len(addresses)
        self._ranks, self._sharded = settings.ranks, settings.model.shard
        self._silent: set[str] = set()
        self._generation = -1
        self._number = 0
        self._turn = asyncio.Lock()

    async def open(self) -> None:
        async with self._turn:
            await self._form(self._members)

    # ---- what all ranks do

    async def train(self, batch: Batch, keep_state: bool, given: Sequence[Future] = ()) -> StepMetrics:
        found: StepMetrics = await self._together("train-step", tasks.train_task, batch, keep_state, list(given))
        return found

    async def supervised(self, receipts: Sequence[Receipt]) -> SupervisedMetrics:
        found: SupervisedMetrics = await self._together("supervised-step", tasks.supervised_receipts_task, tuple(receipts))
        return found

    async def begin(self, optimiser: OptimiserSettings | None = None) -> None:
        await self._together("begin", tasks.begin_task, optimiser, 0)

    async def resume(self) -> Resumed:
        first, *others = self._members
        found: Resumed = (await self._all("resume", [(first, tasks.resume_task, ())], exclusive=True))[0]
        if found.version is not None:
            await self._all("load-checkpoint", [(address, tasks.load_checkpoint_task, (found.version,)) for address in others], exclusive=True)
        return found

    async def _together(self, name: str, task: Callable[..., Any], *args: Any) -> Any:
        """What rank 0 has of a step that all take, once, however often the group is formed anew meanwhile.

        Whoever waits for it may be cancelled, the step is not: some ranks would take it, and wait for those that don't.
        """
        step = asyncio.ensure_future(self._take(name, task, *args))
        step.add_done_callback(lambda done: done.cancelled() or done.exception())  # it may be that nobody waits any more
        return await asyncio.shield(step)

    async def _take(self, name: str, task: Callable[..., Any], *args: Any) -> Any:
        async with self._turn:
            if len(self._members) < self._wanted and not self._sharded and await self._spares(self._members):
                await self._form_again("a worker is there for a rank that was lost")
            for _ in range(_TRIES):
                order = Order(self._generation, self._number + 1)
                try:
                    found = await self._ask(name, [(a, rank_tasks.ordered_task, (order, task, *args)) for a in self._members], exclusive=True)
                except GroupBroken as error:
                    await self._form_again(f"{name}: {error}")
                    continue
                self._number = order.number
                return found[0]
            raise TrainerLost(", ".join(self._members), name)

    # ---- what rank 0 does for all, or each rank for its part

    async def publish(self, version: Version, parent: Version | None, metadata: dict[str, Any]) -> Version:
        if not self._sharded:
            return await self._on_first("publish", version, tasks.publish_task, version, parent, metadata)
        attempt = await self._run("open-attempt", rank_tasks.attempt_task)
        await self._all("publish-part", [(a, rank_tasks.publish_part_task, (version, attempt)) for a in self._members])
        return await self._on_first("publish", version, rank_tasks.commit_version_task, version, attempt, parent, metadata)

    async def checkpoint(self, version: Version, documents: dict[str, Any]) -> Version:
        if not self._sharded:
            return await self._on_first("checkpoint", version, tasks.checkpoint_task, version, documents)
        attempt = await self._run("open-attempt", rank_tasks.attempt_task)
        await self._all("checkpoint-part", [(a, rank_tasks.checkpoint_part_task, (version, attempt)) for a in self._members])
        return await self._on_first("checkpoint", version, rank_tasks.commit_checkpoint_task, version, attempt, documents)

    async def collect(self, keeping: Keeping) -> None:
        await self._on_first("collect", None, tasks.collect_task, keeping)

    async def _on_first(self, name: str, made: Version | None, task: Callable[..., Any], *args: Any) -> Any:
        """The result of a task on rank 0, of whoever is that by then; `made` is what it makes, at most once."""
        for tried in range(_TRIES):
            address = self._members[0]
            try:
                return await self._run_at(address, name, task, *args)
            except VersionTaken:
                if not tried:
                    raise
                return made  # by the one that was lost before it could say so
            except TrainerLost as lost:
                async with self._turn:
                    if address in self._members:  # no step has found out yet
                        await self._form_again(f"{name}: the worker at {lost.address} is gone")
        raise TrainerLost(self._members[0], name)

    # ---- forming the group

    async def _form(self, members: Sequence[str]) -> None:
        """A new group of the workers at `members`, of which the first holds what the others are to take over. GroupBroken."""
        self._generation += 1
        await self._ask("ready", [(a, rank_tasks.standing_task, ()) for a in members])  # learners that are being built would be waited for
        ((host, port),) = await self._ask("open-ranks", [(members[0], rank_tasks.open_task, ())])
        places = [Invitation(self._generation, host, port, rank, len(members), self._ranks.timeout) for rank in range(len(members))]
        await self._ask("join-ranks", [(a, rank_tasks.join_task, (place,)) for a, place in zip(members, places, strict=True)])
        self._members, self._address = list(members), members[0]

    async def _form_again(self, reason: str) -> None:
        """A new group of those that are left and whoever is there in the place of the others. TrainerLost if nobody holds the state."""
        for _ in range(_TRIES):
            able = {} if self._sharded else await self._able()
            if not able:
                break
            # Who carried out the last order leads, if anybody did: it was carried out by all of them, or can't be told from that.
            survivors = sorted(able, key=lambda a: (-able[a], self._members.index(a)))
            members = [*survivors, *await self._replacements(survivors)]
            self.tell(f"the group of {len(self._members)} ranks is formed anew with {len(members)} ({len(survivors)} of them as before): {reason}")
            try:
                await self._form(members)
            except GroupBroken as error:
                reason = str(error)
                continue
            return
        raise TrainerLost(", ".join(self._members), reason)

    async def _able(self) -> dict[str, int]:
        """The members that are there and hold the state before or after the present order, with the last order each has carried out."""
        here = {w.address for w in await workers_of(self._client)}
        asked = [a for a in self._members if a in here and a not in self._silent]
        found = await asyncio.gather(*(self._standing(a) for a in asked))
        return {a: s.done for a, s in zip(asked, found, strict=True) if s is not None and s.done is not None and s.done >= self._number}

    async def _standing(self, address: str) -> Standing | None:
        try:
            found: list[Standing] = await self._ask("standing", [(address, rank_tasks.standing_task, ())])
        except GroupBroken:
            return None
        return found[0]

    async def _replacements(self, survivors: Sequence[str]) -> list[str]:
        """Workers for the ranks that are missing, as many as come within the time that the settings give."""
        missing = max(0, self._wanted - len(survivors))
        loop = asyncio.get_running_loop()
        until = loop.time() + self._ranks.replacement
        while True:
            spares = await self._spares(survivors)
            if len(spares) >= missing or loop.time() >= until:
                return spares[:missing]
            await asyncio.sleep(WATCH_S)  # the scheduler tells of new workers when it is asked

    async def _spares(self, taken: Sequence[str]) -> list[str]:
        """Workers of the training class that no rank is on, by name."""
        return [w.address for w in await workers_of(self._client) if self._trains(w) and w.address not in {*taken, *self._silent}]

    def _trains(self, worker: ClusterWorker) -> bool:
        return worker.resources.get(self._resource, 0) >= 1

    # ---- asking

    async def _all(self, name: str, calls: Sequence[tuple[str, Callable[..., Any], tuple[Any, ...]]], *, exclusive: bool = False) -> list[Any]:
        """The results of tasks none of which another worker can do. TrainerLost if a worker is gone or silent."""
        try:
            return await self._ask(name, calls, exclusive=exclusive)
        except GroupBroken as error:
            raise TrainerLost(", ".join(self._members), f"{name} ({error})") from error

    async def _ask(self, name: str, calls: Sequence[tuple[str, Callable[..., Any], tuple[Any, ...]]], *, exclusive: bool = False) -> list[Any]:
        """The results of tasks, one on each of some workers. If one fails or loses its worker, the others get time to notice.

        GroupBroken if a worker is gone or silent, or says that another one is; else what the first that failed raised.
        """
        loop = asyncio.get_running_loop()
        futures = [
            self._submit(address, name, tasks.fenced_task, self._coordinator, task, *args, exclusive=exclusive) for address, task, args in calls
        ]
        waiting = [asyncio.ensure_future(self.result_of(f)) for f in futures]
        addresses = [address for address, _, _ in calls]
        gone: set[str] = set()
        until: float | None = None
        try:
            while pending := [w for w, a in zip(waiting, addresses, strict=True) if not w.done() and a not in gone]:
                await asyncio.wait(pending, timeout=WATCH_S, return_when=asyncio.FIRST_COMPLETED)
                # Dask would wait for ever for a worker at a lost one's address: a restarted one has another, and an empty learner.
                here = {w.address for w in await workers_of(self._client)}
                gone |= {a for w, a in zip(waiting, addresses, strict=True) if not w.done() and a not in here}
                if until is None and (gone or any(w.done() and w.exception() is not None for w in waiting)):
                    until = loop.time() + self._ranks.timeout + _SETTLE_S
                if until is not None and loop.time() > until:
                    silent = {a for w, a in zip(waiting, addresses, strict=True) if not w.done()} - gone
                    self._silent |= silent
                    gone |= silent
            return self._results(dict(zip(addresses, waiting, strict=True)), gone)
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    def _results(self, waiting: Mapping[str, asyncio.Future[Any]], gone: set[str]) -> list[Any]:
        errors = [e for w in waiting.values() if w.done() and (e := w.exception()) is not None]
        own = [e for e in errors if not isinstance(e, GroupBroken | KilledWorker)]
        if gone and (self._sharded or not own):  # a spread model's collectives fail in torch's words
            raise GroupBroken(f"the worker at {', '.join(sorted(gone))} is gone or silent")
        if own:
            raise own[0]
        if errors:
            raise GroupBroken(str(errors[0])) from errors[0]
        return [w.result() for w in waiting.values()]
