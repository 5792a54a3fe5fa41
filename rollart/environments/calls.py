"""Calls an environment's methods where its task says and for as long as its task allows; owns the threads that they block.

A thread can't be stopped from outside. A call that outlasts its limit, or that nobody waits for any more, is left behind with its thread,
another thread takes its place, and the environment is closed once the call is back.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from distributed.threadpoolexecutor import ThreadPoolExecutor

from rollart.environments.protocol import Agent, Environment, RunIn

THREADS = 64
"""Calls of one process that may block a thread at the same time."""

LEFT_BEHIND = 64
"""Calls that may be left behind: with so many the process has no thread for another call."""

STUCK_S = 10.0
"""How long it may be so before the process counts as unfit: calls that nobody waits for any more, all stopped at once, are back by then."""

CLOSE_S = 30.0
"""How long `close` may take before it is left behind."""

log = logging.getLogger(__name__)


class CallTimedOut(RuntimeError):
    """A call took longer than its limit."""


class CallPool:
    """Threads for calls that block. Those of distributed's executor end with the process, whatever they are at.

    With `left_behind` calls left behind, further ones wait for one of these to come back; `unfit` is called, with the reason, once that has been
    so for `STUCK_S` seconds. `waiting` counts them.
    """

    def __init__(self, threads: int = THREADS, left_behind: int = LEFT_BEHIND, unfit: Callable[[str], None] = lambda reason: None) -> None:
        self._executor = ThreadPoolExecutor(threads + left_behind, thread_name_prefix="calls")
        self._most_left, self._unfit = left_behind, unfit
        self._free = asyncio.Semaphore(threads)
        self._room = asyncio.Event()
        self._room.set()
        self.left = self.waiting = 0

    async def run(self, function: Callable[[], Any], what: str, limit_s: float | None, leave: Callable[[asyncio.Future[Any]], None]) -> Any:
        """The result of `function`, called in a thread as soon as one is free, and for `limit_s` seconds from then on.

        CallTimedOut, which names `what`. What is not waited for to its end is handed to `leave`.
        """
        async with self._free:
            await self._wait_for_room()
            call = asyncio.get_running_loop().run_in_executor(self._executor, _called, function)
            try:
                return await _within(limit_s, what, asyncio.shield(call))
            except (CallTimedOut, asyncio.CancelledError):
                if not call.done():
                    self.left += 1
                    call.add_done_callback(self._back)
                    leave(call)
                    if self.left == self._most_left:
                        self._room.clear()
                        asyncio.get_running_loop().call_later(STUCK_S, self._look_at_room, what)
                raise

    @property
    def full(self) -> bool:
        """Whether a further call would wait for one that was left behind."""
        return not self._room.is_set()

    def close(self) -> None:
        """Ends the threads that are at nothing; the others end with what they are at."""
        self._executor.shutdown(wait=False)

    async def _wait_for_room(self) -> None:
        while self.full:
            self.waiting += 1
            try:
                await self._room.wait()
            finally:
                self.waiting -= 1

    def _look_at_room(self, what: str) -> None:
        if self.left >= self._most_left:
            self._unfit(f"{self.left} calls have not come back, the last: {what}")

    def _back(self, call: asyncio.Future[Any]) -> None:
        self.left -= 1
        self._room.set()
        if not call.cancelled() and call.exception() is not None:
            log.info("a call that was left behind ended in %r", call.exception())


class EnvironmentCalls:
    """The calls of one environment or agent, one at a time. `limits_s`: seconds by method (`reset`, `step`, `run`); a plain function in the loop
    has none."""

    def __init__(self, environment: Environment | Agent, run_in: RunIn, limits_s: dict[str, float], pool: CallPool) -> None:
        self._environment, self._run_in, self._limits_s, self._pool = environment, run_in, limits_s, pool
        self._left: asyncio.Future[Any] | None = None

    async def call(self, method: str, *arguments: Any) -> Any:
        """`reset(seed)`, `step(action)` or `run(seed, url, key)`, with what it raises. CallTimedOut."""
        return await self._run(partial(getattr(self._environment, method), *arguments), method, self._limits_s.get(method))

    async def close(self) -> None:
        """Closes the environment, once; after the call that was left behind, if one was, without waiting for it here.

        What `close` raises is told in the log: what was played stands. In a full pool it is left open, since its process has no future.
        """
        if self._left is not None:
            _KEPT.add(task := asyncio.create_task(self._close_after(self._left)))
            task.add_done_callback(_KEPT.discard)
            return
        await self._close()

    async def _close_after(self, left: asyncio.Future[Any]) -> None:
        await asyncio.wait((left,))
        await self._close()

    async def _close(self) -> None:
        close: Callable[[], Any] | None = getattr(self._environment, "close", None)  # which an agent need not have
        if self._pool.full or close is None:
            return
        try:
            await self._run(close, "close", CLOSE_S)
        except Exception as error:  # noqa: BLE001 - code of others
            log.warning("an environment (%s) was not closed: %s: %s", type(self._environment).__name__, type(error).__name__, error)

    async def _run(self, function: Callable[[], Any], what: str, limit_s: float | None) -> Any:
        if self._run_in == "thread" and not inspect.iscoroutinefunction(function):
            return await self._pool.run(function, what, limit_s, self._leave)
        found = _called(function)
        return await _within(limit_s, what, _awaited(found)) if inspect.isawaitable(found) else found

    def _leave(self, call: asyncio.Future[Any]) -> None:
        self._left = call


async def _within(limit_s: float | None, what: str, work: Awaitable[Any]) -> Any:
    """The result of `work`; CallTimedOut, which a time-out of its own is not."""
    timeout = asyncio.timeout(limit_s)
    try:
        async with timeout:
            return await work
    except TimeoutError as error:
        if timeout.expired():
            raise CallTimedOut(f"{what} took longer than {limit_s:g} s") from error
        raise


def _called(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except StopIteration as error:  # which no future can hold: whoever waits for it would do so for ever
        raise RuntimeError(f"StopIteration: {error}") from error
    except Exception:
        raise
    except BaseException as error:  # a panic in Rust, an outcome of pytest, an exit(): out of here it would end the worker's event loop
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


async def _awaited(work: Awaitable[Any]) -> Any:
    """The same for a coroutine, whose cancellation is its own doing unless somebody has cancelled the task that awaits it."""
    try:
        return await work
    except (Exception, GeneratorExit):
        raise
    except BaseException as error:
        this = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and this is not None and this.cancelling():
            raise
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


_KEPT: set[asyncio.Task[None]] = set()
"""An event loop holds its tasks weakly."""
