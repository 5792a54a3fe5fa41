"""The environment worker's side of rollout: a plugin that holds what trajectories share, and the Dask tasks that run them."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from dataclasses import dataclass, field
from typing import Any, cast

from dask.typing import Key
from distributed import Worker, WorkerPlugin, get_worker

from rollart.agents.play import AgentRunner
from rollart.agents.worker import AgentLimits, SharedByAgents
from rollart.control.staleness import StalenessWindow
from rollart.engines.client import EngineClient
from rollart.engines.errors import EngineUnreachable
from rollart.engines.response import Response
from rollart.engines.router import EngineTable, Routes
from rollart.environments import registry as environments
from rollart.environments.calls import CallPool
from rollart.environments.protocol import Environment, RunIn, is_agent
from rollart.fence import admit
from rollart.rewards.registry import is_light
from rollart.rewards.worker import scored, scored_within
from rollart.rollout.doings import Doings
from rollart.rollout.episode import EpisodeFailed, EpisodeRunner, Limits
from rollart.rollout.flush_pace import FlushPace
from rollart.rollout.leaving import Leaving, unprepared
from rollart.rollout.raised import fit_to_travel
from rollart.rollout.reader import StoredTrajectories
from rollart.rollout.recorded import Recorded, own_nonce
from rollart.rollout.routing import Routing, RoutingPlan
from rollart.rollout.vocabulary import Vocabulary
from rollart.rollout.writer import TrajectoryWriter
from rollart.types import NOT_SAMPLED, Attempt, GenerateRequest, GenerateResult, Member, Receipt, SamplingTransform, Trajectory
from storage.models.folders import local_folder
from storage.objects.store import ObjectStore

log = logging.getLogger(__name__)

PLUGIN = "rollout"

BEGUN_S = 0.05
"""How long what has begun waits for others, to be told of in one message."""

LATE_FLUSHES = 8
"""Times `flush_s` that a task begins after its dispatch before it looks for an earlier execution of itself."""

ENGINE_LOSSES = 3
"""Engines that one turn may lose before its attempt fails."""


@dataclass(frozen=True, slots=True)
class TaskPlan:
    """What an environment worker has to know of a task. `verifier`: what scores its trajectories right where they ended; None where their scores
    are futures of their own."""

    environment: str
    settings: dict[str, Any]
    limits: Limits
    transform: SamplingTransform
    run_in: RunIn
    engine_class: str
    system: str = ""
    verifier: str | None = None
    agent: AgentLimits = field(default_factory=AgentLimits)


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """What every trajectory of a run shares; sent to the workers once, so that a task carries only its attempt.

    `writers`: how many workers write trajectories, and `a_step`: how many of these a training step takes. `begun_topic`: where on the scheduler it
    is told which attempts have begun to sample; None if nobody wants to know. `told_topic`: where what
    the run's user should hear is told. `coordinator`: the one that sets the worker up, and that it heeds. `engine_wait_s`: how long a turn waits
    for engines to be announced, at first or after one was lost; longer than the control side tries to bring one back.
    """

    run_url: str
    storage_options: dict[str, Any]
    policy_folder: str
    run_seed: int
    lineage: int
    window: StalenessWindow
    tasks: dict[str, TaskPlan]
    evaluation: SamplingTransform
    flush_s: float = 0.25
    flush_rows: int = 64
    writers: int = 1
    a_step: int = 0
    chat: bool = False
    begun_topic: str | None = None
    told_topic: str = "told"
    routing: RoutingPlan = field(default_factory=RoutingPlan)
    coordinator: int = 0
    engine_wait_s: float = 180.0
    agent_host: str = "127.0.0.1"


@dataclass(slots=True)
class _Shared:
    """What the plugin makes in the worker: none of it can travel."""

    vocabulary: Vocabulary
    writer: TrajectoryWriter
    client: EngineClient
    routing: Routing
    pool: CallPool
    recorded: Recorded
    stored: StoredTrajectories
    agents: SharedByAgents
    table: EngineTable | None = None
    announced: asyncio.Event = field(default_factory=asyncio.Event)
    newest: int = NOT_SAMPLED
    begun: list[Attempt] = field(default_factory=list)


class EnvironmentPlugin(WorkerPlugin):
    """Gives a worker of an environment class the tokenizer, the trajectory writer, the engine client and the engine table."""

    name = PLUGIN

    def __init__(self, plan: RolloutPlan) -> None:
        self.plan = plan
        self.shared: _Shared | None = None
        self.running: dict[str, asyncio.Task[Any]] = {}
        self.playing: dict[Attempt, EpisodeRunner | AgentRunner] = {}
        self.doing = Doings()

    async def setup(self, worker: Worker) -> None:
        self.worker = worker
        store = ObjectStore(self.plan.run_url, self.plan.storage_options)
        leaving = Leaving(worker, self.plan.told_topic, stuck=lambda: pool.waiting)
        pool = CallPool(unfit=leaving.watch_memory().begin)
        self.shared = _Shared(
            Vocabulary(local_folder(self.plan.policy_folder, self.plan.storage_options), self.plan.chat),
            TrajectoryWriter(store, FlushPace(self.plan.flush_s, self.plan.flush_rows, self.plan.writers, self.plan.a_step)),
            EngineClient(),
            Routing(self.plan.routing, {name: task.engine_class for name, task in self.plan.tasks.items()}, worker.log_event),
            pool,
            Recorded(store),
            StoredTrajectories(self.plan.run_url, self.plan.storage_options, keep=4),
            SharedByAgents(self.plan.agent_host, lambda: local_folder(self.plan.policy_folder, self.plan.storage_options)),
        )

    async def teardown(self, worker: Worker) -> None:
        if self.shared is not None:
            await self.shared.agents.close()
            await self.shared.client.close()
            self.shared.pool.close()

    def transition(self, key: Key, start: str, finish: str, **_: Any) -> None:
        """Stops a trajectory whose future was cancelled: Dask forgets a coroutine that runs, which would go on in its slot to its end."""
        if start == "executing" and finish == "released" and key in self.running:
            self.running[str(key)].cancel()

    def push(self, table: EngineTable, newest: int, routes: Routes | None = None) -> None:
        """Takes over a newer engine table, the newest version (a step) that exists, and newer routes. Superseded if they are of another
        coordinator than the plan."""
        admit(table.coordinator, self.plan.coordinator)
        shared = self._shared()
        if routes is not None:
            shared.routing.push(routes)
        if shared.table is None or table.revision > shared.table.revision:
            shared.table = table
            shared.announced.set()
        self._advance(newest)

    def _advance(self, newest: int) -> None:
        """Version `newest` exists: what it makes too old to be trained on is stopped, wherever it is."""
        shared = self._shared()
        if newest <= shared.newest:
            return
        shared.newest = newest
        shared.writer.pace.stepped(time.monotonic())
        stopped = sum([runner.stop_for_age(newest) for runner in self.playing.values()])
        if stopped:
            log.info("version %d made %d trajectories too old to be trained on; they are stopped", newest, stopped)

    @property
    def agents(self) -> SharedByAgents:
        """What makes agents' runners."""
        return self._shared().agents

    def _shared(self) -> _Shared:
        if self.shared is None:
            raise EpisodeFailed("the worker's rollout plugin is not set up", "machine")
        return self.shared

    def runner(self, attempt: Attempt) -> EpisodeRunner:
        """The turn loop for this attempt's task and purpose; evaluation has its own temperature and no window."""
        plan, task, shared = self.plan, self.plan.tasks[attempt.episode.task], self._shared()
        training = attempt.episode.purpose == "train"
        return EpisodeRunner(
            codec=shared.vocabulary,
            limits=task.limits,
            transform=plan.evaluation if attempt.episode.purpose == "evaluate" else task.transform,
            run_seed=plan.run_seed,
            lineage=plan.lineage,
            system=task.system,
            run_in=task.run_in,
            window=plan.window if training else None,
            current_version=lambda: shared.newest,
            pool=shared.pool,
            tell=lambda doing: self.doing.note(attempt, doing),
        )

    async def generate(self, attempt: Attempt, request: GenerateRequest) -> GenerateResult:
        """Sends one turn to the engine that the router picks: the task's class, then where the trajectory's KV is, then load.

        Where that engine is lost or sends its requests away, the turn goes on elsewhere with what was heard of the response: the same seed draws
        the same tokens. EngineUnreachable or EpisodeFailed after `ENGINE_LOSSES`, the latter also if none is announced within `engine_wait_s`.
        """
        response, revision, losses = Response(request), -1, 0
        while True:
            self.doing.note(attempt, "for an engine to be announced")
            table = await self._table_after(revision)
            if attempt not in self._shared().routing.last_engine:
                self._tell_begun(attempt)
            try:
                result = await self._ask(table, attempt, response)
            except EngineUnreachable:
                response.lost()
                losses += 1
                if losses == ENGINE_LOSSES:
                    raise
                revision = table.revision
            else:
                if result.finish_reason != "abort":
                    return response.ended(result)
                losses += not response.lost(result)
                if losses == ENGINE_LOSSES:
                    raise EpisodeFailed(f"engines aborted {request.rid} {losses} times without a token", "generation")
            if (whole := response.whole) is not None:
                return whole

    def _tell_begun(self, attempt: Attempt) -> None:
        """Tells whoever follows that an attempt asks an engine for its first token: nothing of how long that took was the policy's doing.
        Many that begin at about the same time are one message."""
        if self.plan.begun_topic is None or attempt.episode.purpose != "train":
            return
        begun = self._shared().begun
        if not begun:
            asyncio.get_running_loop().call_later(BEGUN_S, self._send_begun, self.plan.begun_topic)
        begun.append(attempt)

    def _send_begun(self, topic: str) -> None:
        shared = self._shared()
        self.worker.log_event(topic, [[a.episode.task, a.episode.index, a.member, a.number] for a in shared.begun])
        shared.begun.clear()

    async def _ask(self, table: EngineTable, attempt: Attempt, response: Response) -> GenerateResult:
        shared, request = self._shared(), response.left
        wanted = shared.routing.wanted(attempt, table)
        entry = shared.routing.pick(table, attempt, wanted)
        self.doing.note(attempt, f"for engine {entry.url}")
        with shared.routing.asking(entry, attempt, wanted) as served:
            heard = response.heard if response.worth_streaming else None
            request = dataclasses.replace(request, extra_key=str(entry.version), draft_key=attempt.episode.task)
            result = await shared.client.generate(entry.url, request, heard)
            served(result)
        if result.versions:
            self._advance(result.versions[-1].step)
        return result

    async def _table_after(self, revision: int) -> EngineTable:
        """The engine table once its revision is over `revision`; EpisodeFailed if none comes within the plan's `engine_wait_s`."""
        shared = self._shared()
        try:
            async with asyncio.timeout(self.plan.engine_wait_s):
                while shared.table is None or shared.table.revision <= revision:
                    shared.announced.clear()
                    await shared.announced.wait()
        except TimeoutError:
            reason = f"no engine was announced to this worker within {self.plan.engine_wait_s:.0f} s; look at the generation workers"
            raise EpisodeFailed(reason, "generation") from None
        return shared.table

    def forget(self, attempt: Attempt) -> None:
        self._shared().routing.forget(attempt)
        self.doing.forget(attempt)

    async def keep(self, trajectory: Trajectory) -> Receipt:
        """Makes the trajectory durable and returns where it stands."""
        self.doing.note(trajectory.attempt, "being written")
        file, row = await self._shared().writer.write(trajectory)
        first, last = trajectory.version_span
        receipt = Receipt(
            trajectory.attempt, trajectory.nonce, trajectory.lineage, file, row, trajectory.outcome, first, last,
            sum(map(len, trajectory.segments)), trajectory.sampled, len(trajectory.turns), trajectory.seconds,
        )  # fmt: skip
        self._shared().recorded.note(receipt)
        return receipt

    async def played_before(self, attempt: Attempt, key: str, sent: float) -> Receipt | Member | None:
        """What an earlier execution of the task `key`, dispatched at `sent`, came to, whose result was lost with its worker; None if none is
        recorded. Most tasks begin before that could be, or soon after, and don't look: what is lost so soon is not worth a look."""
        if time.time() - sent <= LATE_FLUSHES * self.plan.flush_s:
            return None
        receipt = await self._shared().recorded.find(attempt, key, sent)
        if receipt is None:
            return None
        log.warning("%s was played already, and its result lost: it is taken from %s", attempt, receipt.file)
        if self.plan.tasks[attempt.episode.task].verifier is None:
            return receipt
        return await self.judge(receipt, await asyncio.to_thread(self._shared().stored.read, receipt))

    async def judge(self, receipt: Receipt, trajectory: Trajectory) -> Receipt | Member:
        """The trajectory's score, where its task's verifier runs here; else its receipt as it is. VerifierFailed."""
        task = self.plan.tasks[receipt.attempt.episode.task]
        if task.verifier is None or is_light(task.verifier, trajectory):
            return receipt if task.verifier is None else scored(task.verifier, receipt, trajectory)
        self.doing.note(receipt.attempt, "being scored")
        return await scored_within(task.limits.reward_s, self._shared().pool, task.verifier, receipt, trajectory)


async def _plugin() -> EnvironmentPlugin:
    """The worker's plugin; where setting it up has failed, the worker leaves, and the task goes on elsewhere."""
    plugin = get_worker().plugins.get(PLUGIN)
    if isinstance(plugin, EnvironmentPlugin) and plugin.shared is not None:
        return plugin
    await unprepared(get_worker(), "what trajectories share", plugin.plan.told_topic if isinstance(plugin, EnvironmentPlugin) else "told")


@fit_to_travel
async def trajectory_task(attempt: Attempt, key: str, sent: float) -> Receipt | Member:
    """One trajectory as one Dask task, whose key is `key`: plays the attempt to its end and returns a receipt once it is durable, with the
    score where its task's verifier runs here. Run again, it returns what was recorded first; `sent`: when it was dispatched, in unix seconds."""
    plugin, this = await _plugin(), asyncio.current_task()
    if this is None:
        raise EpisodeFailed("a trajectory runs as a task of the worker's event loop", "machine")
    plugin.running[key] = this
    try:
        if (found := await plugin.played_before(attempt, key, sent)) is not None:
            return found
        trajectory = await _played(plugin, attempt)
        trajectory.nonce = own_nonce(key)
        receipt = await plugin.keep(trajectory)
        return await plugin.judge(receipt, trajectory)
    finally:
        del plugin.running[key]
        plugin.forget(attempt)


async def _played(plugin: EnvironmentPlugin, attempt: Attempt) -> Trajectory:
    task = plugin.plan.tasks[attempt.episode.task]
    try:
        environment = environments.make(task.environment, **task.settings)
    except Exception as error:
        raise EpisodeFailed(f"tasks.{attempt.episode.task}: its environment could not be made: {type(error).__name__}: {error}") from error

    async def generate(request: GenerateRequest) -> GenerateResult:
        return await plugin.generate(attempt, request)

    try:
        runner = plugin.runner(attempt)
        if is_agent(environment):
            playing = plugin.playing[attempt] = await plugin.agents.runner(runner, task.agent)
            return await playing.play(environment, attempt, generate)
        plugin.playing[attempt], environment = runner, cast(Environment, environment)
        if attempt.episode.purpose == "warm_up":
            return await runner.play_script(environment, attempt)
        return await runner.play(environment, attempt, generate)
    finally:
        plugin.playing.pop(attempt, None)


async def push_table(table: EngineTable, newest: int, routes: Routes | None = None, *, dask_worker: Worker) -> bool:
    """Hands table and routes to the plugin of the worker that it runs on, for `Client.run`, which fills in `dask_worker`; False if it has none."""
    plugin = dask_worker.plugins.get(PLUGIN)
    if not isinstance(plugin, EnvironmentPlugin) or plugin.shared is None:
        return False
    plugin.push(table, newest, routes)
    return True
