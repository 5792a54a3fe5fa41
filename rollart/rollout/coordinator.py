"""Follows every trajectory of a run: feeds the ledger with what happens on the cluster and dispatches what the ledger plans."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from rollart.control.ledger import Ledger
from rollart.rollout.dispatcher import Dispatcher, Ended, Stalled
from rollart.types import Attempt, Batch, Member

log = logging.getLogger(__name__)

LEASE_CHECK_S = 1.0
"""How often leases are looked at: they are minutes long, and a look costs a pass over what is in flight."""

HOPELESS = 64
"""Failed attempts in a row, with none that succeeded between, after which the cause is the set-up and not bad luck."""


class RolloutFailed(RuntimeError):
    """Attempts fail without end, or filters leave nothing of what does not; the message says why."""


class Rollout:
    """Keeps as much work in flight as the staleness window can use, and forms batches from what comes back.

    Use it as an async context manager; inside, `next_batch` waits for a batch while everything goes on. `served` is the version
    that the engines serve at first, and `advance` tells that they serve a newer version. `observe` is called with every scored member.
    """

    def __init__(
        self, ledger: Ledger, dispatcher: Dispatcher, *, stall_s: float, served: int, observe: Callable[[Member], None] = lambda m: None
    ) -> None:
        self.ledger, self.dispatcher = ledger, dispatcher
        self._stall_s, self._observe = stall_s, observe
        self._served = served
        self._changed = asyncio.Event()
        self._last_end = time.monotonic()
        self._failures_in_a_row = 0
        self._failure: BaseException | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._open = False

    async def __aenter__(self) -> Rollout:
        self._open = True
        running = self.ledger.running()
        self.ledger.renew(running, time.monotonic())
        for episode in dict.fromkeys(a.episode for a in running):
            self.dispatcher.dispatch([a for a in running if a.episode == episode])
        self._admit()
        self._tasks = [asyncio.create_task(self._guard(self._follow())), asyncio.create_task(self._guard(self._watch_leases()))]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._open = False
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.dispatcher.close()

    def advance(self, served: int) -> None:
        """Every engine now serves version `served` (a step) or a newer one, so newer work may start."""
        self._served = max(self._served, served)
        self._last_end = time.monotonic()
        self._admit()
        self._changed.set()

    def fail(self, error: BaseException) -> None:
        """Something that the rollout depends on has failed for good: `next_batch` raises it instead of waiting for what can't come."""
        self._failure = error
        self._changed.set()

    def awaited(self) -> str:
        """What the next batch still needs, in words; empty if nothing."""
        missing = self.ledger.awaited()
        return ", ".join(f"{n} groups of {task}" for task, n in missing.items())

    async def next_batch(self) -> Batch:
        """The batch of the next step, as soon as the ledger can form it. RolloutFailed or Stalled if it never will."""
        while True:
            if self._failure is not None:
                raise self._failure
            batch = self.ledger.form_batch()
            self._admit()
            if batch is not None:
                return batch
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), 1.0)
            except TimeoutError:
                silent = time.monotonic() - self._last_end
                if silent > self._stall_s:
                    raise Stalled(
                        f"no trajectory has ended for {silent:.0f} s (run.step_timeout); awaited: {self.awaited()}; "
                        f"{self.dispatcher.in_flight} in flight, such as {next(iter(self.ledger.running()), 'none')}; "
                        "look at the Dask dashboard's task stream and the workers' logs"
                    ) from None

    # ---- inside

    def _admit(self) -> None:
        if not self._open:  # the last version is announced when nothing is to start any more
            return
        by_task: dict[str, list[Attempt]] = {}
        for attempts in self.ledger.admit(self._served, time.monotonic()):
            by_task.setdefault(attempts[0].episode.task, []).extend(attempts)
        for attempts in by_task.values():  # a graph a task: what a graph costs the scheduler, it costs once
            self.dispatcher.dispatch(attempts)

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        """A background task's error must not be lost: the next call of `next_batch` raises it."""
        try:
            await work
        except Exception as error:  # noqa: BLE001 - kept and raised by next_batch
            self.fail(error)

    async def _follow(self) -> None:
        async for ended in self.dispatcher.ended():
            for end in ended:
                await self._end(end)
            self._admit()
            self._changed.set()

    async def _end(self, end: Ended) -> None:
        self._last_end = time.monotonic()
        if end.member is not None:
            self._failures_in_a_row = 0
            dropped_group = self.ledger.scored(end.member.receipt, end.member.score) and end.member.receipt.outcome == "over_age"
            self._observe(end.member)
            if dropped_group:
                await self._cancel_orphans()
            self._give_up_on_filters()
            return
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= HOPELESS:
            raise RolloutFailed(f"{HOPELESS} attempts in a row failed; the last, {end.attempt}: {end.error}") from end.error
        await self._retry(end.attempt)

    def _give_up_on_filters(self) -> None:
        reason = self.ledger.hopeless()
        if reason is not None:
            raise RolloutFailed(
                f"{reason}: more would go the same way. Make the task easier or harder, raise max_tokens, or loosen tasks.NAME.filters"
            )

    async def _retry(self, attempt: Attempt) -> None:
        again = self.ledger.failed(attempt, time.monotonic())
        if again is not None:
            self.dispatcher.dispatch([again])
        else:
            await self._cancel_orphans()
            self._give_up_on_filters()

    async def _cancel_orphans(self) -> None:
        """Cancels attempts whose group the ledger has dropped."""
        wanted = set(self.ledger.running())
        await self.dispatcher.cancel([a for a in self.dispatcher.attempts() if a not in wanted])

    async def _watch_leases(self) -> None:
        while True:
            await asyncio.sleep(LEASE_CHECK_S)
            overdue = self.ledger.overdue(time.monotonic())
            await self.dispatcher.cancel(overdue)
            for attempt in overdue:
                log.warning("%s has not ended within rollout.lease: it counts as failed", attempt)
                await self._retry(attempt)
            if overdue:
                self._admit()
                self._changed.set()
