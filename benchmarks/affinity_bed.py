"""A run's own parts between tasks of known tokens and engines of known pace: scheduler, worker, plugin, router, client, dispatcher and placing.

Scripted are the environments, which answer at once, and the engines, which wait. All of it is in this process, since it mostly waits.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from distributed import Client, Scheduler, Worker
from distributed.utils import silence_logging_cmgr

from benchmarks.affinity_engine import Profile, ThrottledEngine, serving
from benchmarks.byte_policy import byte_policy
from rollart.control.placement import EngineClass, Placement
from rollart.control.staleness import StalenessWindow
from rollart.engines.router import EngineEntry, EngineTable, Routes
from rollart.environments.protocol import StepResult
from rollart.rollout.dispatcher import Dispatcher
from rollart.rollout.episode import Limits
from rollart.rollout.placing import Places, Placing, PlacingPlan
from rollart.rollout.routing import TELL_S, RoutingPlan
from rollart.rollout.window import SubmissionWindow
from rollart.rollout.worker import EnvironmentPlugin, RolloutPlan, TaskPlan, push_table
from rollart.types import Attempt, Episode, SamplingTransform
from storage.version import Version

PLAY, TOPIC = "PLAY", "usage"
SETTLE_S = TELL_S + 0.25
"""After which the workers have told of what ended."""


@dataclass(frozen=True, slots=True)
class Load:
    """A task's share of a step: trajectories, turns of each, tokens of an observation and of a response."""

    trajectories: int
    turns: int
    observation: int
    response: int


class Reading:
    """Shows observations of `tokens` bytes for `turns` turns, and scores 1."""

    def __init__(self, turns: int, tokens: int) -> None:
        self._left, self._text = turns, "x" * tokens

    async def reset(self, seed: int) -> str:
        return self._text

    async def step(self, action: str) -> StepResult:
        self._left -= 1
        return StepResult(self._text, 1.0, terminated=not self._left)

    async def close(self) -> None:
        """Nothing to give back."""


@dataclass
class Told:
    """The fleet of a run whose engines never change: has the worker follow the routes."""

    client: Client
    table: EngineTable
    revision: int = 0

    async def route(self, wanted: Mapping[str, str], probes: Mapping[str, str]) -> None:
        self.revision += 1
        await self.client.run(push_table, self.table, 0, Routes(dict(wanted), dict(probes), revision=self.revision))


@dataclass
class Bed:
    """Plays steps of the mix. `fleet.route` sets a map by hand; `placing` does it by what it has measured."""

    loads: Mapping[str, Load]
    fleet: Told
    placing: Placing
    placement: Placement
    dispatcher: Dispatcher
    _episode: int = 0
    notes: list[str] = field(default_factory=list)

    async def step(self) -> float:
        """Seconds from the first trajectory's dispatch to the last one's end."""
        self._episode += 1000
        attempts = {task: [Attempt(Episode(task, self._episode + i), 0) for i in range(load.trajectories)] for task, load in self.loads.items()}
        left = sum(map(len, attempts.values()))
        started = time.perf_counter()
        for of_task in attempts.values():
            self.dispatcher.dispatch(of_task)
        async for ended in self.dispatcher.ended(300.0):
            if failed := [e for e in ended if e.error is not None]:
                raise RuntimeError(f"{failed[0].attempt} failed") from failed[0].error
            left -= len(ended)
            if not left:
                break
        seconds = time.perf_counter() - started
        await asyncio.sleep(SETTLE_S)
        return seconds


@asynccontextmanager
async def bed(
    loads: Mapping[str, Load], classes: Mapping[str, tuple[Profile, int]], places: int, placement: Placement
) -> AsyncIterator[Bed]:  # fmt: skip
    """`classes`: name -> what its engines are like, and how many there are; each serves `places` requests at once. All ends with the context."""
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rollart-affinity-"))
        version = Version(0, 0)
        entries = [
            EngineEntry(await stack.enter_async_context(serving(ThrottledEngine(profile, places))), name, version)
            for name, (profile, count) in classes.items()
            for _ in range(count)
        ]
        slots = sum(load.trajectories for load in loads.values())
        stack.enter_context(silence_logging_cmgr(logging.CRITICAL))
        scheduler = await stack.enter_async_context(Scheduler(protocol="inproc", dashboard=False, dashboard_address=":0"))
        worker = Worker(scheduler.address, nthreads=slots + 4, resources={PLAY: slots}, dashboard=False)
        await stack.enter_async_context(worker)
        client = await stack.enter_async_context(Client(scheduler.address, asynchronous=True))
        tasks = {
            name: TaskPlan(
                f"{__name__}:{Reading.__name__}", {"turns": load.turns, "tokens": load.observation},
                Limits(load.turns, load.response, 2**20), SamplingTransform(), "loop", placement.classes[name], verifier="environment",
            )
            for name, load in loads.items()
        }  # fmt: skip
        plan = RolloutPlan(
            f"{folder}/run", {}, byte_policy(Path(folder, "policy")), 0, 0, StalenessWindow(0), tasks, SamplingTransform(), flush_s=0.05,
            routing=RoutingPlan(topic=TOPIC, measuring=True),
        )  # fmt: skip
        await worker.plugin_add(EnvironmentPlugin(plan), name=EnvironmentPlugin.name)
        fleet = Told(client, EngineTable(tuple(entries), 1))
        engines = {name: EngineClass(0, places, profile.price) for name, (profile, _) in classes.items()}
        names: dict[str, str] = {**dict(zip(classes, classes, strict=True)), PLAY: PLAY}
        spread = Places(dict.fromkeys(loads, ((PLAY,), None)))
        notes: list[str] = []
        placing = Placing(
            client, fleet, PlacingPlan(TOPIC, names, dict(placement.classes), engines, placement), spread, list, lambda text, _: notes.append(text)
        )
        await placing.start()
        dispatcher = Dispatcher(client, spread, "affinity", SubmissionWindow({PLAY: slots}))
        stack.push_async_callback(dispatcher.close)
        stack.callback(placing.close)
        yield Bed(loads, fleet, placing, placement, dispatcher, notes=notes)


def all_maps(tasks: Sequence[str], classes: Sequence[str]) -> list[dict[str, str]]:
    """Every map of tasks to classes."""
    found: list[dict[str, str]] = [{}]
    for task in tasks:
        found = [{**known, task: name} for known in found for name in classes]
    return found
