"""Plays scripts on a real scheduler and workers with a run's own parts: ledger, coordinator, dispatcher, plugins, writer, verifier.

Scripted are only the environment, the engine and the training step (a sleep). All seconds that come out are the trace's: what the clock showed,
over the scale.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from distributed import Client

from benchmarks.byte_policy import byte_policy
from benchmarks.rollout.machines import JUDGE, PLAY, engine
from benchmarks.rollout.parts import TracedPlugin
from rollart.control import ledger as control
from rollart.control.ledger import Ledger
from rollart.engines.client import EngineClient
from rollart.engines.router import EngineEntry, EngineTable
from rollart.opening import ForClass
from rollart.rewards.worker import RewardPlugin
from rollart.rollout import coordinator
from rollart.rollout.coordinator import Rollout, begun_topic
from rollart.rollout.dispatcher import Dispatcher
from rollart.rollout.episode import Limits
from rollart.rollout.window import SubmissionWindow, cluster_slots
from rollart.rollout.worker import RolloutPlan, TaskPlan, push_table
from rollart.types import Batch, Member, SamplingTransform
from storage.version import Version

TASK = "traced"
VERIFIER = "environment"
GENERATE = "GENERATE"
LIMITS = Limits(max_turns=64, max_new_tokens=4096, max_tokens=2**20, reset_s=1e6, step_s=1e6)

FLUSH_S = 0.05
"""Trajectories are written this soon: where time is scaled down, the default, a quarter of a second, would count for seconds."""


@dataclass(frozen=True, slots=True)
class Script:
    """`trace` (see `script.play`), in groups of `group`, `scale` seconds for each of its seconds; `barrier`: rollout by batches; `apart`: each
    score is a future of its own, rather than part of its trajectory's; `flush_s`: seconds that a trajectory waits to be written."""

    trace: str
    group: int
    scale: float
    barrier: int = 0
    apart: bool = False
    flush_s: float = FLUSH_S

    @property
    def settings(self) -> dict[str, Any]:
        return {"trace": self.trace, "group": self.group, "scale": self.scale}


@dataclass(slots=True)
class Run:
    """What a run came to, in the trace's seconds from its start: when each batch was `ready`, when its step had `trained`; what was kept.
    `wall_s` and the machine's `load` at its end are real."""

    wall_s: float = 0.0
    load: float = 0.0
    ready: list[float] = field(default_factory=list)
    trained: list[float] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)
    members: list[Member] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        """What every row tells of a run."""
        return {
            "seconds": self.trained[-1], "wall_s": self.wall_s, "load_1min": round(self.load, 2),
            "ready": [round(s, 3) for s in self.ready], "trained": [round(s, 3) for s in self.trained],
        }  # fmt: skip


class Fleet:
    """The one engine, and the workers that are told what it serves."""

    def __init__(self, client: Client, http: EngineClient, url: str) -> None:
        self._client, self._http, self._url = client, http, url

    async def serve(self, version: Version) -> None:
        """Has the engine serve `version` and every worker know it."""
        await self._http.update_weights(self._url, "none", str(version))
        table = EngineTable((EngineEntry(self._url, GENERATE, version),), version.step + 1)
        await self._client.run(push_table, table, version.step)


@contextlib.asynccontextmanager
async def prepared(client: Client, script: Script, ledger: Ledger, run: str) -> AsyncIterator[tuple[Dispatcher, Fleet]]:
    """Workers with the run's plugins, a dispatcher and the one engine; all that was made ends with the context."""
    with (
        tempfile.TemporaryDirectory(prefix="rollart-bed-", ignore_cleanup_errors=True) as folder,
        engine({**script.settings, "barrier": script.barrier}) as url,
    ):
        verifier = None if script.apart else VERIFIER
        task = TaskPlan(
            "benchmarks.rollout.parts:ScriptedEnvironment", script.settings, LIMITS, SamplingTransform(), "loop", GENERATE, verifier=verifier
        )
        plan = RolloutPlan(
            f"{folder}/run", {}, byte_policy(Path(folder, "policy")), 0, ledger.lineage, ledger.window, {TASK: task}, SamplingTransform(),
            flush_s=script.flush_s, begun_topic=begun_topic(ledger.redundancy, run, ledger.lineage),
        )  # fmt: skip
        plugins = {PLAY: TracedPlugin(plan), JUDGE: RewardPlugin(f"{folder}/run", {}, {TASK: VERIFIER})}
        for resource, plugin in plugins.items():
            await client.register_plugin(ForClass(frozenset({resource}), plugin))
        async with EngineClient() as http:
            fleet = Fleet(client, http, url)
            await fleet.serve(Version(0, 0))
            window = SubmissionWindow(await client.run_on_scheduler(cluster_slots))
            yield Dispatcher(client, {TASK: (PLAY, JUDGE if script.apart else None)}, run, window), fleet
        for plugin in plugins.values():
            await client.unregister_worker_plugin(plugin.name)


async def train(client: Client, script: Script, ledger: Ledger, steps: int, train_s: float, run: str) -> Run:
    """`steps` steps as `flows/train.py` makes them: a batch, a training step, and the version that it makes, brought to the engine beside what
    comes next."""
    found = Run()
    topic = begun_topic(ledger.redundancy, run, ledger.lineage)
    async with prepared(client, script, ledger, run) as (dispatcher, fleet):
        rollout = Rollout(ledger, dispatcher, stall_s=600.0, served=0, observe=found.members.append, begun_topic=topic)
        with scaled_tick(script.scale):
            started, publishing = time.perf_counter(), asyncio.create_task(asyncio.sleep(0))

            async def publish(step: int) -> None:
                await fleet.serve(Version(0, step))
                rollout.advance(step)

            async with rollout:
                for step in range(steps):
                    batch = await rollout.next_batch()
                    found.ready.append((time.perf_counter() - started) / script.scale)
                    await asyncio.sleep(train_s * script.scale)
                    ledger.settle(batch)
                    found.trained.append((time.perf_counter() - started) / script.scale)
                    found.batches.append(batch)
                    await publishing
                    if step + 1 < steps:
                        publishing = asyncio.create_task(publish(batch.step + 1))
            found.wall_s = time.perf_counter() - started
    found.load = psutil.getloadavg()[0]
    return found


@contextlib.contextmanager
def scaled_tick(scale: float) -> Iterator[None]:
    """Coordinator and ledger look at the time as often as they would in the trace's seconds: what takes minutes there takes seconds here."""
    before = coordinator.TICK_S, control.LOOK_S
    coordinator.TICK_S, control.LOOK_S = (max(0.02, seconds * scale) for seconds in before)
    try:
        yield
    finally:
        coordinator.TICK_S, control.LOOK_S = before
