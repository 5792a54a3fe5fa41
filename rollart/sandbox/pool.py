"""Sandboxes kept ready for callers in threads; owns the thread and the event loop that they live in, knows nothing of what they run.

Starting Python and importing what a scorer needs costs over a second of processor time, a fork of a process that has done it some milliseconds.
A call gets a fork of its own in a sandbox without other calls, and what it leaves there is removed before the next.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from functools import cache
from typing import Any, TypeVar

from rollart.sandbox.limits import SandboxError, SandboxLimits, SandboxResult
from rollart.sandbox.session import Sandbox

T = TypeVar("T")

MOST = 4
"""Sandboxes of one pool; further calls wait."""

CALLS = 200
"""After so many calls another sandbox takes one's place."""


class Pool:
    """Up to `MOST` sandboxes that preloaded the same modules, made when they are first needed."""

    def __init__(self, limits: SandboxLimits, preload: Sequence[str]) -> None:
        self._limits, self._preload = limits, preload
        self._idle: list[tuple[Sandbox, int]] = []
        self._free = asyncio.Semaphore(MOST)

    async def run(self, code: str, stdin: bytes, wall_s: float) -> SandboxResult:
        """Runs `code` in a fork of a process with the preloaded modules. SandboxError."""
        async with self._free:
            sandbox, calls = self._idle.pop() if self._idle else (await self._opened(), 0)
            try:
                result = await sandbox.run([], stdin=stdin, code=code, wall_s=wall_s)
                if not sandbox.closed and calls + 1 < CALLS:
                    await sandbox.clear()
                    self._idle.append((sandbox, calls + 1))
                else:
                    await sandbox.close()
            except BaseException:
                await sandbox.close()
                raise
            return result

    async def _opened(self) -> Sandbox:
        sandbox = Sandbox(self._limits, packages=True, preload=self._preload)
        await sandbox.open()
        return sandbox

    async def close(self) -> None:
        while self._idle:
            await self._idle.pop()[0].close()


class _Home:
    """The thread with the event loop in which pools live: bubblewrap ends with the thread that started it, so it has to be one that stays."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="sandboxes", daemon=True)
        self._thread.start()
        self.pools: dict[tuple[SandboxLimits, tuple[str, ...]], Pool] = {}
        atexit.register(self.close)

    def close(self) -> None:
        async def all_closed() -> None:
            for pool in self.pools.values():
                await pool.close()

        asyncio.run_coroutine_threadsafe(all_closed(), self.loop).result(10.0)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10.0)


@cache
def _home() -> _Home:
    return _Home()


_BEING_FOUND = threading.Lock()
"""`cache` lets two threads that come at once make a home each, and pools of one are of no use in the other's loop."""


def waited(work: Coroutine[Any, Any, T], within_s: float) -> T:
    """What a coroutine of sandboxes comes to, for a caller in a thread without an event loop. SandboxError if it takes over `within_s` seconds."""
    with _BEING_FOUND:
        home = _home()
    future: Future[T] = asyncio.run_coroutine_threadsafe(work, home.loop)
    try:
        return future.result(within_s)
    except TimeoutError as error:
        future.cancel()
        raise SandboxError(f"a sandbox's work took over {within_s:g} s, which its own limits should have ended") from error


def run_warm(code: str, stdin: bytes, *, limits: SandboxLimits, preload: tuple[str, ...], wall_s: float) -> SandboxResult:
    """Runs `code` with `stdin` in a kept sandbox that has imported `preload`; blocks. SandboxError. Not for a thread that runs an event loop."""

    async def run() -> SandboxResult:
        key = (limits, preload)
        pool = _home().pools.setdefault(key, Pool(limits, preload))
        return await pool.run(code, stdin, wall_s)

    return waited(run(), WAIT_S + wall_s)


WAIT_S = 300.0
"""How long a call may wait for its turn and for a sandbox to start."""
