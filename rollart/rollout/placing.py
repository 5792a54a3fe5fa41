"""Follows from the control side where the run's work goes: hears from the workers, lets the placement decide, has the routes and the places of
environments changed, and tells what happened. The decision itself is `control.placement`'s, and where one request goes is the router's."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from distributed import Client

from rollart.cluster import workers_of
from rollart.control.affinity import Stage
from rollart.control.placement import Decision, EngineClass, Placement
from rollart.engines.fleet import EngineFleet
from rollart.engines.usage import News
from rollart.rollout.dispatcher import Place
from rollart.types import Attempt

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Between two looks at which engines and workers there are."""

AWAY_S = 5.0
"""How long a class may be without a worker before another stands in: a nanny takes a second or two to start another process."""

Tell = Callable[[str, Mapping[str, Any]], None]
"""Takes a note, and its figures for the metrics."""


class ClassGone(RuntimeError):
    """An attempt waited for a worker of a class that has none any more; it is tried again where another class stands in."""


class Sender(Protocol):
    """What sends attempts to the cluster."""

    sent: Counter[tuple[str, Place]]
    """How many attempts of each task went where."""

    def waiting_for(self, resource: str) -> list[Attempt]:
        """The attempts in flight that can't end without a worker of `resource`."""
        ...

    async def fail(self, attempts: Sequence[Attempt], error: BaseException) -> None:
        """Takes these attempts back, and reports that they ended in `error`."""
        ...


@dataclass(slots=True)
class Places(Mapping[str, Place]):
    """Task -> where its attempts run now: the declared classes' resources, or those of the first stand-in with a worker.

    `chains`: task -> the resources for environments, and for rewards (None: none), the declared one first. `away`: resources without a worker.
    """

    chains: Mapping[str, tuple[Sequence[str], Sequence[str] | None]]
    away: set[str] = field(default_factory=set)

    def __getitem__(self, task: str) -> Place:
        environment, reward = self.chains[task]
        return self._present(environment), self._present(reward) if reward is not None else None

    def __iter__(self) -> Iterator[str]:
        return iter(self.chains)

    def __len__(self) -> int:
        return len(self.chains)

    def declared(self, task: str) -> Place:
        environment, reward = self.chains[task]
        return environment[0], reward[0] if reward is not None else None

    def replaceable(self) -> dict[str, tuple[str, ...]]:
        """Each resource that another may stand in for, and these."""
        chains = [chain for pair in self.chains.values() for chain in pair if chain is not None]
        return {chain[i]: tuple(chain[i + 1 :]) for chain in chains for i in range(len(chain) - 1)}

    def _present(self, chain: Sequence[str]) -> str:
        return next((resource for resource in chain if resource not in self.away), chain[0])


@dataclass(frozen=True, slots=True)
class PlacingPlan:
    """`topic`: where the workers tell what requests took. `names`: resource -> class. `wanted`: task -> the class declared for generation.
    `engines`: class -> what its engines are like (how many there are is looked up). `placement`: what decides, None if nothing ever moves."""

    topic: str
    names: Mapping[str, str]
    wanted: Mapping[str, str]
    engines: Mapping[str, EngineClass]
    placement: Placement | None = None


class Placing:
    """Use `keep` beside the flow, and `stepped` after each step."""

    def __init__(self, client: Client, fleet: EngineFleet, plan: PlacingPlan, places: Places, senders: Callable[[], Iterable[Sender]], tell: Tell):
        self._client, self._fleet, self._plan, self.places, self._senders, self._tell = client, fleet, plan, places, senders, tell
        self._resource = {name: resource for resource, name in plan.names.items()}
        self._fallen: Counter[tuple[str, Stage, str, str]] = Counter()
        self._told: set[tuple[str, Stage, str, str]] = set()
        self._seen: Counter[tuple[str, Place]] = Counter()
        self._absent: dict[str, float] = {}
        self._classes: tuple[str, ...] = ()
        self._routed: tuple[Mapping[str, str], Mapping[str, str]] = (plan.wanted, {})
        self._news = asyncio.Event()
        client.subscribe_topic(plan.topic, self._heard)

    def close(self) -> None:
        """Hears nothing any more."""
        if self._client.status == "running":
            self._client.unsubscribe_topic(self._plan.topic)

    async def start(self) -> None:
        """Gives the declared routes to the fleet, for the workers that get its table."""
        await self._route(*self._routed)

    def stepped(self) -> dict[str, Any]:
        """A step ended: decides where tasks generate from now on. What there is to say of where work went since the last step, for its line."""
        self._count_sent()
        line: dict[str, Any] = {}
        if self._fallen:
            keys = ("task", "stage", "wanted", "used", "count")
            line["fallbacks"] = [dict(zip(keys, (*key, n), strict=True)) for key, n in sorted(self._fallen.items())]
            self._fallen.clear()
        if self._plan.placement is not None:
            self._plan.placement.stepped()
            decision = self._decide(self._plan.placement)
            line["placement"] = {
                "classes": dict(decision.classes), "step_s": decision.step_s, "before_s": decision.before_s, "why": decision.why,
                "explore": dict(decision.explore), "pace": self._plan.placement.paces(),
            }  # fmt: skip
        return line

    async def keep(self) -> None:
        """Until it is cancelled: has the workers told of new routes, and sees whether classes come or go."""
        look = time.monotonic() + LOOK_S
        while True:
            with contextlib.suppress(TimeoutError):  # time is the other reason to look
                await asyncio.wait_for(self._news.wait(), max(0.0, look - time.monotonic()))
            self._news.clear()
            if time.monotonic() >= look:  # also while news keeps coming: many workers tell of what they served at all times
                await self._see_workers()
                look = time.monotonic() + LOOK_S
            if self._plan.placement is None:
                continue
            if self._classes != self._fleet.table.classes:
                self._classes = self._fleet.table.classes
                self._decide(self._plan.placement)
            routes = (dict(self._plan.placement.classes), self._plan.placement.explore(self._there()))
            if routes != self._routed:
                await self._route(*routes)

    # ---- inside

    def _heard(self, event: tuple[float, dict[str, Any]]) -> None:
        news = News.read(event[1])
        for (task, wanted, used), count in news.fallen.items():
            self._fell_back(task, "generate", self._plan.names[wanted], self._plan.names[used], count)
        if self._plan.placement is not None and news.used:
            for (task, resource), usage in news.used.items():
                self._plan.placement.used(task, self._plan.names[resource], usage)
            self._news.set()

    def _fell_back(self, task: str, stage: Stage, wanted: str, used: str, count: int) -> None:
        key = (task, stage, wanted, used)
        self._fallen[key] += count
        if key not in self._told:
            self._told.add(key)
            figures = {"kind": "fallback", "task": task, "stage": stage, "wanted": wanted, "used": used}
            self._tell(f"{used} stands in for {wanted}, which is full or gone, in {stage} of {task}", figures)

    def _decide(self, placement: Placement) -> Decision:
        decision = placement.decide(self._there())
        for task, before, after in decision.moved:
            figures = {"kind": "move", "task": task, "from": before, "to": after, "step_s": decision.step_s, "before_s": decision.before_s}
            self._tell(f"{task} moved from {before} to {after}: {decision.why}", {**figures, "why": decision.why})
        if decision.moved:
            self._news.set()
        return decision

    def _there(self) -> dict[str, EngineClass]:
        counts = Counter(self._plan.names[e.hardware_class] for e in self._fleet.table.entries)
        return {name: dataclasses.replace(engines, engines=counts[name]) for name, engines in self._plan.engines.items()}

    async def _route(self, wanted: Mapping[str, str], probes: Mapping[str, str]) -> None:
        self._routed = (wanted, probes)
        await self._fleet.route({t: self._resource[c] for t, c in wanted.items()}, {t: self._resource[c] for t, c in probes.items()})

    async def _see_workers(self) -> None:
        """Notes which of the classes that another may stand in for have been without a worker for long, and has what waits there tried again."""
        replaceable = self.places.replaceable()
        if not replaceable:
            return
        there = {r for w in await workers_of(self._client) for r, n in w.resources.items() if n >= 1}
        now = time.monotonic()
        for resource, others in replaceable.items():
            if resource in there:
                self._absent.pop(resource, None)
                self.places.away.discard(resource)
            elif now - self._absent.setdefault(resource, now) > AWAY_S and resource not in self.places.away and there.intersection(others):
                self.places.away.add(resource)
                error = ClassGone(f"hardware class {self._plan.names[resource]} has no worker any more; another class stands in for it")
                log.warning("%s", error)
                for sender in self._senders():
                    await sender.fail(sender.waiting_for(resource), error)

    def _count_sent(self) -> None:
        sent = sum((sender.sent for sender in self._senders()), Counter[tuple[str, Place]]())
        new, self._seen = sent - self._seen, sent
        stages: tuple[Stage, Stage] = ("environment", "reward")
        for (task, place), count in new.items():
            for stage, wanted, used in zip(stages, self.places.declared(task), place, strict=True):
                if wanted is not None and used is not None and wanted != used:
                    self._fell_back(task, stage, self._plan.names[wanted], self._plan.names[used], count)
