"""Follows every trajectory of a run: feeds the ledger with what happens on the cluster and dispatches what the ledger plans."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from rollart.control.ledger import Ledger
from rollart.control.pace import Pace
from rollart.control.redundancy import Redundancy
from rollart.rollout.dispatcher import Dispatcher, Ended, Stalled
from rollart.types import Attempt, Batch, Member

log = logging.getLogger(__name__)

TICK_S = 1.0
"""Between two looks at what time alone decides; a look costs a pass over what is in flight."""

LOOK_S = 0.1
"""Between two looks at which tasks a batch waits for."""

HOPELESS = 64
"""Failed attempts in a row, with none that succeeded between, after which the cause is the set-up and not bad luck."""

ROUNDS = 4
"""The same, in rounds of everything that was in flight: one loss, or one service that is down, fails all of it at once."""


def begun_topic(redundancy: Redundancy, run: str, lineage: int) -> str | None:
    """Where on the scheduler the workers of a run tell which attempts have begun to sample; None if its redundancy doesn't ask."""
    return f"begun-{run}-{lineage}" if redundancy.rule == "before_first_token" else None


class RolloutFailed(RuntimeError):
    """Attempts fail without end, or filters leave nothing of what does not; the message says why."""


class _Waiting:
    """Seconds of waiting for a batch, given to the tasks whose groups were missing meanwhile."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._since = 0.0
        self._missing: tuple[str, ...] = ()

    def look(self, now: float, missing: Callable[[], Mapping[str, int]]) -> None:
        """Waiting goes on; which tasks are `missing` is asked no more often than a report can tell."""
        if not self._missing or now - self._since >= LOOK_S:
            self._give(now)
            self._missing = tuple(missing())

    def end(self, now: float) -> Mapping[str, float]:
        """The batch is there; seconds by task."""
        self._give(now)
        return dict(self._seconds)

    def _give(self, now: float) -> None:
        for task in self._missing:
            self._seconds[task] += now - self._since
        self._since = now


class Rollout:
    """Keeps as much work in flight as the staleness window can use, and forms batches from what comes back.

    Use it as an async context manager; inside, `next_batch` waits for a batch while everything goes on. `served` is the version
    that the engines serve at first, and `advance` tells that they serve a newer version. `observe` is called with every scored member, `warn`
    with what whoever watches should know.
    `begun_topic` is where the workers tell which attempts have begun to sample, where the ledger's redundancy needs to know.
    """

    def __init__(
        self, ledger: Ledger, dispatcher: Dispatcher, *, stall_s: float, served: int, observe: Callable[[Member], None] = lambda m: None,
        begun_topic: str | None = None, warn: Callable[[str], None] = log.warning,
    ) -> None:  # fmt: skip
        self.ledger, self.dispatcher = ledger, dispatcher
        self._stall_s, self._observe, self._warn = stall_s, observe, warn
        self.waited: Mapping[str, float] = {}
        self._pace, self._warned = Pace(), dict[str, int]()
        self._served = served
        self._begun_topic = begun_topic
        self._changed, self._yielded = asyncio.Event(), asyncio.Event()
        self._last_end = time.monotonic()
        self._failures_in_a_row = self._most_in_flight = 0
        self._failure: BaseException | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._open = False

    async def __aenter__(self) -> Rollout:
        self._open = True
        if self._begun_topic is not None:
            self.dispatcher.follow(self._begun_topic, self._begun)
        self.dispatcher.hear(lambda attempts: self.ledger.renew(attempts, time.monotonic()))
        running = self.ledger.running()
        self.ledger.renew(running, time.monotonic())
        self._dispatch(running)
        self._admit()
        self._tasks = [asyncio.create_task(self._guard(work)) for work in (self._follow(), self._watch_time(), self._stop_yielded())]
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
        """The batch of the next step, as soon as the ledger can form it; `waited` is then how many seconds each task's groups were missing from
        it. RolloutFailed or Stalled if it never will."""
        waiting, began = _Waiting(), time.monotonic()
        while True:
            if self._failure is not None:
                raise self._failure
            batch = self.ledger.form_batch()
            self._admit()
            now = time.monotonic()
            if batch is not None:
                self.waited = waiting.end(now)
                self._stepped(now)
                return batch
            waiting.look(now, self.ledger.awaited)
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), 1.0)
            except TimeoutError:
                silent = time.monotonic() - max(self._last_end, began)  # what nobody waited for was no silence
                if silent > self._stall_s:
                    raise Stalled(
                        f"no trajectory has ended for {silent:.0f} s (run.step_timeout); awaited: {self.awaited()}; "
                        f"{self.dispatcher.in_flight} in flight, such as {next(iter(self.ledger.running()), 'none')}; "
                        f"look at the workers' logs: {await self.dispatcher.whereabouts()}"
                    ) from None

    # ---- inside

    def _stepped(self, now: float) -> None:
        self._pace.stepped(now, self.waited)
        for found in self._pace.outlasting(alpha := self.ledger.window.alpha):
            if found.alpha > self._warned.get(found.task, 0):
                self._warned[found.task] = found.alpha
                self._warn(
                    f"{found.task}: half of its trajectories take over {found.seconds:.3g} s, and train.alpha {alpha} gives them {alpha + 1} steps "
                    f"of {found.step_s:.3g} s: steps wait for them, or they are dropped; train.alpha {found.alpha} is what they need"
                )

    def _admit(self) -> None:
        if not self._open:  # the last version is announced when nothing is to start any more
            return
        now = time.monotonic()
        groups = self.ledger.admit(self._served, now)
        self._dispatch([*(attempt for group in groups for attempt in group), *self.ledger.due(now)])

    def _dispatch(self, attempts: list[Attempt]) -> None:
        by_task: dict[str, list[Attempt]] = {}
        for attempt in attempts:
            by_task.setdefault(attempt.episode.task, []).append(attempt)
        for of_task in by_task.values():  # a graph a task: what a graph costs the scheduler, it costs once
            self.dispatcher.dispatch(of_task)
        self._most_in_flight = max(self._most_in_flight, self.dispatcher.in_flight)

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        """A background task's error must not be lost: the next call of `next_batch` raises it."""
        try:
            await work
        except Exception as error:  # noqa: BLE001 - kept and raised by next_batch
            self.fail(error)

    async def _follow(self) -> None:
        async for ended in self.dispatcher.ended():
            for end in ended:
                self._end(end)
            await self._go_on()

    def _end(self, end: Ended) -> None:
        self._last_end = time.monotonic()
        if end.member is not None:
            self._failures_in_a_row = 0
            self._pace.ended(end.attempt.episode.task, end.member.receipt.seconds.get("total", 0.0))
            if self.ledger.scored(end.member.receipt, end.member.score):
                self._observe(end.member)
        elif self.ledger.failed(end.attempt, end.cause, time.monotonic()):
            self._failures_in_a_row += 1
            if self._failures_in_a_row >= max(HOPELESS, ROUNDS * self._most_in_flight):
                raise RolloutFailed(f"{self._failures_in_a_row} attempts in a row failed; the last, {end.attempt}: {end.error}") from end.error
        self._give_up_on_filters()

    async def _go_on(self) -> None:
        """Stops what nobody wants any more, starts what is due, and has the batch looked at again."""
        await self.dispatcher.cancel(self.ledger.stops())
        self._admit()
        self._changed.set()

    def _begun(self, attempts: list[Attempt]) -> None:
        now = time.monotonic()
        for attempt in attempts:
            self.ledger.begun(attempt, now)
        self._yielded.set()

    async def _stop_yielded(self) -> None:
        """Stops, as soon as it is known, what has yielded to another try: its environment holds a slot."""
        while True:
            await self._yielded.wait()
            self._yielded.clear()
            await self._go_on()

    def _give_up_on_filters(self) -> None:
        reason = self.ledger.hopeless()
        if reason is not None:
            raise RolloutFailed(
                f"{reason}: more would go the same way. Make the task easier or harder, raise max_tokens, or loosen tasks.NAME.filters"
            )

    async def _watch_time(self) -> None:
        """Looks every second at what time alone decides: leases that end, members that have rested, attempts that need a spare."""
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            self.ledger.renew(self.dispatcher.waiting(), now)  # what waits for room is not silent
            if overdue := self.ledger.overdue(now):
                self.ledger.extend(await self.dispatcher.at_work(overdue, self.ledger.policy.lease_s), now)
            for attempt in self.ledger.expire(now):
                self._warn(f"{attempt} has been silent for as long as rollout.lease: it counts as failed")
            self._give_up_on_filters()
            await self._go_on()
