"""An engine process as its owner holds it: started, watched, ended. Knows nothing of weights or Dask."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections import deque
from collections.abc import Mapping

from rollart.engines.errors import EngineDied

__all__ = ["EngineProcess"]

log = logging.getLogger(__name__)

END_SECONDS = 5.0
"""How long SIGTERM may take before SIGKILL."""


class EngineProcess:
    """A running engine at `url`. It ends when its stdin closes, so it never outlives the process that started it."""

    def __init__(self, process: asyncio.subprocess.Process, tail: deque[str], reader: asyncio.Task[None]) -> None:
        self.url = ""
        self._process = process
        self._tail = tail
        self._reader = reader

    @classmethod
    async def start(cls, command: list[str], environment: Mapping[str, str], seconds: float) -> EngineProcess:
        """Starts `python COMMAND` with these variables beside this process's, and returns once it is healthy: it prints one line of JSON with its
        `url`, and ends when its stdin closes. EngineDied if it is not within `seconds`.

        Call it on a thread that lives as long as the engine should: on Linux the engine is killed with that very thread.
        """
        process = await asyncio.create_subprocess_exec(
            sys.executable, *command,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env={**os.environ, **environment},
        )  # fmt: skip
        tail: deque[str] = deque(maxlen=20)
        engine = cls(process, tail, asyncio.create_task(_follow(process, tail)))
        try:
            engine.url = await asyncio.wait_for(engine._greeting(), seconds)
        except TimeoutError as error:
            await engine.end()
            raise EngineDied(f"the engine was not healthy after {seconds:.0f} s; it last said: {engine.last_words}") from error
        except BaseException:
            await engine.end()
            raise
        return engine

    async def _greeting(self) -> str:
        if self._process.stdout is None:
            raise EngineDied("the engine was started without a pipe to read from")
        line = await self._process.stdout.readline()
        if not line:
            code = await self._process.wait()
            await self._reader
            raise EngineDied(f"the engine ended with code {code} before it was healthy: {self.last_words}")
        return str(json.loads(line)["url"])

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.returncode is None

    @property
    def last_words(self) -> str:
        """The last lines of its stderr."""
        return " | ".join(self._tail) or "nothing"

    def died(self) -> EngineDied:
        """The error for a process that ended by itself."""
        return EngineDied(f"engine {self.url} (pid {self.pid}) ended with code {self._process.returncode}; it last said: {self.last_words}")

    async def end(self) -> None:
        """Ends the process: SIGTERM, and SIGKILL if that takes too long. Returns once it is gone."""
        if self.alive:
            self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), END_SECONDS)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        await self._reader


async def _follow(process: asyncio.subprocess.Process, tail: deque[str]) -> None:
    """Hands the engine's stderr on to the log, line by line, so that its pipe never fills."""
    if process.stderr is None:
        return
    async for raw in process.stderr:
        line = raw.decode(errors="replace").rstrip()
        if line:
            tail.append(line)
            log.info("%s", line)
