"""Watches a run's trajectories from the control side: says what is awaited when nothing ends, and fails what nobody works on any more.

Owns when to look and what is done about what was found. How often an attempt is tried again is the failure policy's, which hears of it as
of any failure of the machine's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from distributed import Client

from rollart.control.silence import Absence, Absences, Silence, lost, tell
from rollart.rollout.whereabouts import look, missing
from rollart.types import Attempt

log = logging.getLogger(__name__)

TICK_S = 1.0
"""Between two looks at the time, and at whether tasks wait for a worker that is not there."""

GRACE_S = 3.0
"""How long a resource may be without a worker before that is worth a word: a nanny takes a second or two to start another process."""

CONFIRM_S = 2.0
"""Between two looks of which both have to find an attempt lost."""

Tell = Callable[[str, Mapping[str, Any]], None]
"""Takes a note, and its figures for the metrics."""


class LostAttempt(RuntimeError):
    """No worker had the attempt any more, though there was one for it."""


class NoWorker(RuntimeError):
    """No worker has had a resource for `rollout.worker_wait` seconds, and work waits for one."""

    def __init__(self, of: Absence) -> None:
        super().__init__(
            f"no worker has had the resource {of.resource} for {of.seconds:.0f} s (rollout.worker_wait), and {of.tasks} tasks wait for one; "
            f'start one with `dask worker SCHEDULER --resources "{of.resource}=1"`, look at why the last one ended, and resume the run'
        )


class Watched(Protocol):
    """What sends attempts to the cluster."""

    namespace: str
    """What the keys of its Dask tasks end in."""

    last_end: float
    """When an attempt ended last, or the first one went out (on `time.monotonic`)."""

    @property
    def in_flight(self) -> int:
        """How many attempts have not ended."""
        ...

    def keys(self) -> dict[Attempt, list[str]]:
        """The attempts in flight, with the keys of each one's Dask tasks, first to last."""
        ...

    def held(self) -> dict[str, int]:
        """How many attempts have not gone out yet, by the resource that they want."""
        ...

    async def fail(self, attempts: Sequence[Attempt], error: BaseException) -> None:
        """Takes these attempts back, and reports that they ended in `error`."""
        ...


class Watchdog:
    """Watches what `watched` says is in flight. `silence_s`: seconds without any end before it looks; `worker_wait_s`: seconds that work may
    wait for a worker with its resource while there is none."""

    def __init__(self, client: Client, watched: Callable[[], Sequence[Watched]], silence_s: float, worker_wait_s: float, tell: Tell) -> None:
        self._client, self._watched, self._tell = client, watched, tell
        self._silence_s = silence_s
        self._silences: dict[str, Silence] = {}
        self._absences = Absences(GRACE_S, worker_wait_s)

    async def keep(self) -> None:
        """Watches until it is cancelled. NoWorker."""
        while True:
            await asyncio.sleep(TICK_S)
            busy = [each for each in self._watched() if each.in_flight]
            try:
                if busy:
                    await self._see_resources(busy)
                for each in busy:
                    if self._silences.setdefault(each.namespace, Silence(self._silence_s)).due(time.monotonic() - each.last_end):
                        await self._see_silence(each)
            except TimeoutError:
                log.warning("the Dask scheduler does not answer; its log and its machine's load may say why")
            self._silences = {name: silence for name, silence in self._silences.items() if name in {each.namespace for each in busy}}

    async def _see_resources(self, busy: Sequence[Watched]) -> None:
        held = sum((Counter(each.held()) for each in busy), Counter[str]())
        lacking, now = await missing(self._client, [each.namespace for each in busy], held), time.monotonic()
        for text in self._absences.see(lacking, now):
            self._tell(text, {"kind": "workers", "missing": lacking, "text": text})
        if (given_up := self._absences.hopeless(lacking, now)) is not None:
            raise NoWorker(given_up)

    async def _see_silence(self, watched: Watched) -> None:
        found = await look(self._client, watched.keys())
        gone: list[Attempt] = []
        if any(each.kind == "lost" for each in found):
            await asyncio.sleep(CONFIRM_S)
            before, found = found, await look(self._client, watched.keys())
            gone = lost(before, found)
        silent_s = time.monotonic() - watched.last_end
        told = [f"nothing has ended for {silent_s:.0f} s; in flight:", *(f"  {line}" for line in tell(found))]
        if gone:
            told.append(f"  {len(gone)} that no worker has are tried again")
        text = "\n".join(told)
        self._tell(text, {"kind": "silence", "silent": silent_s, "in_flight": len(found), "lost": len(gone), "text": text})
        if gone:
            await watched.fail(gone, LostAttempt("no worker had it any more, though there was one for it"))
