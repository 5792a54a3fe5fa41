"""Where an environment worker sends its requests: owns which class each task wants now, where trajectories have their prefix, what is in flight,
and what the control side is told of all this. Picks by the router's rule, asks no engine itself."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rollart.engines.router import NOBODY, EngineEntry, EngineTable, Routes, StandIns, pick
from rollart.engines.usage import UsageCounts
from rollart.types import Attempt, GenerateResult

TELL_S = 1.0
"""How long what has been counted waits for more, to be told in one message."""

PROBE_EVERY = 8
"""One trajectory in so many of a task tries the class that the task is to be measured at."""


@dataclass(frozen=True, slots=True)
class RoutingPlan:
    """What does not change during a run. `stand_ins`: class -> what serves in its place. `topic`: where on the scheduler it is told what requests
    took and where, None if nobody listens. `measuring`: whether that includes what each took, and not only the classes that stood in."""

    stand_ins: Mapping[str, StandIns] = field(default_factory=dict)
    topic: str | None = None
    measuring: bool = False


class Routing:
    """`wanted`: task -> the class that it wants until other routes are pushed. `tell` sends a message to a topic."""

    def __init__(self, plan: RoutingPlan, wanted: Mapping[str, str], tell: Callable[[str, Any], None]) -> None:
        self._plan, self._tell = plan, tell
        self.routes = Routes(wanted)
        self.in_flight: Counter[str] = Counter()
        self.last_engine: dict[Attempt, str] = {}
        self._counts = UsageCounts(plan.measuring)
        self._stand_ins = plan.stand_ins

    def push(self, routes: Routes) -> None:
        """Takes over newer routes."""
        if routes.revision <= self.routes.revision:
            return
        self.routes = routes
        self._stand_ins = {
            name: StandIns(s.order, {c: room / routes.sharers for c, room in s.room.items()}) for name, s in self._plan.stand_ins.items()
        }

    def wanted(self, attempt: Attempt, table: EngineTable) -> str:
        """The class that the attempt's requests should go to: its task's, or one to be measured, which a few of its trajectories try."""
        episode = attempt.episode
        probe = self.routes.probes.get(episode.task)
        if probe is not None and episode.purpose == "train" and (episode.index + attempt.member) % PROBE_EVERY == 0 and table.of_class(probe):
            return probe
        return self.routes.wanted[episode.task]

    def pick(self, table: EngineTable, attempt: Attempt, wanted: str) -> EngineEntry:
        """The engine for the attempt's next turn."""
        entry = pick(table, wanted, self.last_engine.get(attempt), self.in_flight, self._stand_ins.get(wanted, NOBODY))
        self.last_engine[attempt] = entry.url
        return entry

    @contextmanager
    def asking(self, entry: EngineEntry, attempt: Attempt, wanted: str) -> Iterator[Callable[[GenerateResult], None]]:
        """Counts a request at `entry` as in flight inside; what it yields counts the result."""
        started = time.perf_counter()
        self.in_flight[entry.url] += 1

        def served(result: GenerateResult) -> None:
            self._served(attempt, wanted, entry.hardware_class, result, time.perf_counter() - started)

        try:
            yield served
        finally:
            self.in_flight[entry.url] -= 1

    def forget(self, attempt: Attempt) -> None:
        """The attempt asks for nothing any more."""
        self.last_engine.pop(attempt, None)

    def _served(self, attempt: Attempt, wanted: str, used: str, result: GenerateResult, seconds: float) -> None:
        if self._plan.topic is None:
            return
        told = self._counts.empty
        # An evaluation is no part of a step's load, and is sampled in another way.
        self._counts.served(attempt.episode.task, wanted, used, result, seconds, measured=attempt.episode.purpose == "train")
        if told and not self._counts.empty:
            asyncio.get_running_loop().call_later(TELL_S, self._send, self._plan.topic)

    def _send(self, topic: str) -> None:
        self._tell(topic, self._counts.take())
