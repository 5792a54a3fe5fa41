"""The submission window: how many tasks of a resource are with the cluster at a time; owns who waits for their turn, knows no future.

Dask hands every task with a resource to some worker at once, also to one whose slots are taken, and seldom moves it again: a worker that
comes late would stay idle. So only a little more goes out than there are slots, and the rest waits here.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from distributed import Client, Scheduler

from rollart.types import Attempt

AHEAD = 1.25
"""Tasks with the cluster for each slot: what a worker can begin as soon as another ends, while the client learns of that."""

GRAPH_SHARE = 8
"""One part in so many of the tasks that may be out goes out at a time, since a graph costs the scheduler the same for one task as for several."""

LOOK_S = 2.0
"""Between two looks at how many slots there are."""

Start = Callable[[list[Attempt]], None]


@dataclass(slots=True)
class _Lane:
    """One resource: its slots, what is out, and what waits, each with what starts it."""

    slots: int = 0
    out: int = 0
    waiting: deque[tuple[Attempt, Start]] = field(default_factory=deque)

    @property
    def limit(self) -> int:
        return math.ceil(self.slots * AHEAD)


class SubmissionWindow:
    """Starts what it is given in its order, as soon as there is room for it; what evaluates goes before all that waits, since no step is taken
    until it has ended. One is shared by all that submits to a cluster for a run.

    `slots`: units of each resource that the cluster has now; `keep` follows how they change.
    """

    def __init__(self, slots: Mapping[str, float]) -> None:
        self._lanes: dict[str, _Lane] = {}
        self.resize(slots)

    def submit(self, resource: str, attempts: Sequence[Attempt], start: Start) -> None:
        """Has `start` called with these attempts, in parts, as room for them comes; with all that there is room for at once."""
        lane = self._lane(resource)
        lane.waiting.extendleft((a, start) for a in reversed(attempts) if a.episode.purpose == "evaluate")
        lane.waiting.extend((a, start) for a in attempts if a.episode.purpose != "evaluate")
        self._let_out(lane, at_least=1)

    def ended(self, resource: str, count: int = 1) -> None:
        """So many tasks that were started are over."""
        lane = self._lane(resource)
        lane.out -= count
        self._let_out(lane, at_least=max(1, lane.limit // GRAPH_SHARE))

    def withdraw(self, attempts: Collection[Attempt], start: Start) -> set[Attempt]:
        """Takes back those of `attempts`, submitted with `start`, that have not been started; returns them."""
        found: set[Attempt] = set()
        for lane in self._lanes.values():
            taken = {a for a, theirs in lane.waiting if theirs == start and a in attempts}
            if taken:
                lane.waiting = deque((a, theirs) for a, theirs in lane.waiting if theirs != start or a not in taken)
                found |= taken
        return found

    def waiting(self) -> dict[str, int]:
        """Tasks that wait for room, by resource; only resources that any wait for."""
        return {resource: len(lane.waiting) for resource, lane in self._lanes.items() if lane.waiting}

    def resize(self, slots: Mapping[str, float]) -> None:
        """The cluster has so many units of each resource now; of one that isn't named, none."""
        for resource in {*slots, *self._lanes}:
            lane = self._lane(resource)
            lane.slots = int(slots.get(resource, 0))
            self._let_out(lane, at_least=1)

    async def keep(self, client: Client) -> None:
        """Follows the cluster as workers come and go, until it is cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.resize(await client.run_on_scheduler(cluster_slots))

    def _lane(self, resource: str) -> _Lane:
        return self._lanes.setdefault(resource, _Lane())

    def _let_out(self, lane: _Lane, at_least: int) -> None:
        room = lane.limit - lane.out
        if room < min(at_least, len(lane.waiting)):
            return
        while room > 0 and lane.waiting:
            _, start = lane.waiting[0]
            part: list[Attempt] = []
            while len(part) < room and lane.waiting and lane.waiting[0][1] == start:
                part.append(lane.waiting.popleft()[0])
            lane.out += len(part)
            room -= len(part)
            start(part)


def cluster_slots(dask_scheduler: Scheduler) -> dict[str, float]:
    """Units of each resource over all workers that take tasks, on the scheduler that `Client.run_on_scheduler` fills in."""
    found: Counter[str] = Counter()
    for worker in dask_scheduler.running:
        found.update(worker.resources)
    return dict(found)
