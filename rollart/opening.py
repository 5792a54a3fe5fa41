"""Opens a run: starts or finds the cluster, checks it, sets every worker up for its class, starts anew or from a checkpoint."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import cloudpickle
from distributed import Client, Worker, WorkerPlugin

from rollart.agents.worker import AgentLimits
from rollart.cluster import ClusterWorker, check_cluster, connect, interrupts_here, local_cluster, scratch_folder, torch_threads
from rollart.config import Config, ConfigError
from rollart.control.affinity import Stage
from rollart.control.ledger import Ledger
from rollart.control.seeds import derive
from rollart.dashboard.metrics import MetricsWriter
from rollart.dashboard.progress import Mode, Progress
from rollart.dashboard.status import RunStatus
from rollart.draft_publisher import DRAFTS
from rollart.engines.fleet import RECOVERY_S, EngineFleet
from rollart.engines.host import EngineHost
from rollart.engines.settings import EngineLaunch, EngineSettings
from rollart.engines.sglang.settings import SglangSettings
from rollart.engines.speculative.settings import SpeculationSettings
from rollart.fence import claim, is_newest
from rollart.preparation import prepare_policy_task
from rollart.rewards.worker import RewardPlugin
from rollart.rollout.coordinator import begun_topic
from rollart.rollout.episode import Limits
from rollart.rollout.leaving import told_topic
from rollart.rollout.placing import Placing
from rollart.rollout.reader import StoredTrajectories
from rollart.rollout.tables import abandon_after
from rollart.rollout.watchdog import Watchdog
from rollart.rollout.window import SubmissionWindow, cluster_slots
from rollart.rollout.worker import EnvironmentPlugin, RolloutPlan, TaskPlan
from rollart.routes import places, placing_plan, routing_plan
from rollart.run import RunFolder
from rollart.session import CUT, REFERENCE, Handles, Session
from rollart.telemetry import Telemetry
from rollart.tenure import Tenure
from rollart.training.handle import Trainer
from rollart.training.logprobs.stage import LogprobStage
from rollart.training.logprobs.worker import LogprobPlugin
from rollart.training.settings import LearnerSettings
from rollart.training.trainer_group import TrainerGroup
from rollart.training.worker import LearnerPlugin
from rollart.types import Version
from storage.errors import Damaged

POLICY = "policy"
"""The part of a run's folder that holds the policy's config and tokenizer."""

BEYOND_S = 60.0
"""How long turns wait for an engine after the control side has stopped trying to bring one back, which ends the run."""


class ForClass(WorkerPlugin):
    """Sets `plugin` up on the workers that have one of `resources`, also on those that come late, and does nothing on any other.

    It travels packed: unpacking imports what the plugin needs, torch among it, which no other worker should pay for.
    """

    def __init__(self, resources: frozenset[str], plugin: WorkerPlugin) -> None:
        self.resources, self.name = resources, plugin.name
        self._packed = cloudpickle.dumps(plugin)

    async def setup(self, worker: Worker) -> None:
        if self.resources & set(worker.state.total_resources):
            if (profile := worker.periodic_callbacks.pop("profile", None)) is not None:
                profile.stop()  # as in `cluster.LOOKS`: on somebody else's cluster too, it may lock the process up
            plugin = await asyncio.to_thread(cloudpickle.loads, self._packed)
            worker.plugins[self.name] = plugin  # it is what tasks look for, and what is torn down
            result: Any = plugin.setup(worker)
            if result is not None:
                await result


@asynccontextmanager
async def open_session(config: Config, folder: RunFolder, tenure: Tenure, *, resume: bool, mode: Mode = "auto") -> AsyncIterator[Session]:
    """The run in `folder`, ready for a flow; everything that was started ends with the context."""
    async with AsyncExitStack() as stack:
        progress = stack.enter_context(Progress(mode))
        client = await _client(stack, config)
        workers = await check_cluster(client, config)
        namespace = f"{folder.name}-{id(client):x}"
        await client.run_on_scheduler(claim, folder.url, tenure.number, client.id)
        trainer = _trainer(client, config, workers, namespace, tenure.number)
        if not folder.store.exists(f"{POLICY}/config.json"):
            await trainer.run("prepare-policy", prepare_policy_task, config, folder.child(POLICY), folder.storage_options)
        register = partial(_register, stack, client, config, partial(is_newest, folder.url, tenure.number))
        await register("train", learner_plugin(config, folder, tenure.number))
        await trainer.open()
        ledger, parent, reference = await _ledger(config, folder, trainer, resume)
        kept = ledger.next_step if parent is not None else -1  # without a checkpoint not even version 0 is gone on from
        abandoned = 0
        if resume:  # from here on, since a checkpoint that is damaged must leave the run as it was
            await asyncio.to_thread(folder.keep, config)
            abandoned = await asyncio.to_thread(abandon_after, folder.store, kept)
        writers = len(_addresses(config, workers, "environment"))
        plugins: list[tuple[Stage, WorkerPlugin]] = [
            ("generate", engine_host(config, folder, tenure.number)),
            ("environment", EnvironmentPlugin(rollout_plan(config, folder, ledger.lineage, tenure.number, writers))),
        ]
        if apart := {t.name: t.reward for t in config.tasks if t.scored_apart}:
            limits_s, topic = {t.name: t.reward_timeout for t in config.tasks}, told_topic(folder.name, ledger.lineage)
            plugins.append(("reward", RewardPlugin(folder.url, folder.storage_options, apart, limits_s, topic)))
        logprobs = None
        if config.logprobs_elsewhere:
            plugins.append(("logprobs", logprob_plugin(config, folder)))
            logprobs = LogprobStage(client, _resource(config, "logprobs"), namespace, reference, config.run.step_timeout)
        await asyncio.gather(*(register(stage, plugin) for stage, plugin in plugins))
        engines = EngineFleet(client, _resources(config, "generate"), _resources(config, "environment"), tenure.number, recovery_s(config))
        window = SubmissionWindow(await client.run_on_scheduler(cluster_slots))
        metrics = MetricsWriter(folder.url, folder.storage_options, resume_step=kept if resume else None, ours=tenure.holds)
        stack.enter_context(metrics)
        status = RunStatus(
            step=ledger.next_step, steps=config.train.steps, version=f"{ledger.lineage}-{ledger.next_step}", dashboard=client.dashboard_link
        )
        telemetry = Telemetry(metrics, progress, status)
        trainer.tell = telemetry.note
        session = Session(config, folder, Handles(tenure, client, trainer, engines, window, places(config), logprobs), telemetry, ledger, parent)
        if resume:
            telemetry.note(_what_resuming_means(ledger, parent, abandoned))
        client.subscribe_topic(told_topic(folder.name, ledger.lineage), lambda event: telemetry.event(event[1], {"kind": "told", "text": event[1]}))
        stack.push_async_callback(session.close)
        session.beside(telemetry.sample(engines.tokens, session.in_flight, session.awaited))
        placing = Placing(client, engines, placing_plan(config, folder.name, ledger.lineage), session.places, session.dispatchers, telemetry.event)
        stack.callback(placing.close)
        await placing.start()
        telemetry.more.append(placing.stepped)
        session.beside(placing.keep())
        session.beside(engines.keep())
        session.beside(Watchdog(client, session.dispatchers, config.rollout.silence, config.rollout.worker_wait, telemetry.event).keep())
        session.beside(window.keep(client))
        yield session


async def _client(stack: AsyncExitStack, config: Config) -> Client:
    if config.run.scheduler is not None:
        return await stack.enter_async_context(await connect(config.run.scheduler))
    stack.enter_context(interrupts_here())
    scratch = stack.enter_context(scratch_folder())
    starting = asyncio.ensure_future(stack.enter_async_context(local_cluster(config, scratch)))
    try:
        cluster = await asyncio.shield(starting)
    except asyncio.CancelledError:
        await asyncio.wait((starting,))  # what is half started nobody could end
        raise
    return await stack.enter_async_context(Client(cluster, asynchronous=True))


def _trainer(client: Client, config: Config, workers: Sequence[ClusterWorker], namespace: str, coordinator: int) -> Trainer:
    """The trainer on one worker, or on as many as the training class wants, one a rank; those beyond are there for ranks that are lost."""
    hardware = config.hardware[config.stages["train"]]
    addresses = _addresses(config, workers, "train")[: hardware.workers]
    if len(addresses) == 1:
        return Trainer(client, addresses[0], hardware.resource, namespace, coordinator)
    return TrainerGroup(client, addresses, hardware.resource, namespace, config.training, coordinator)


async def _ledger(config: Config, folder: RunFolder, trainer: Trainer, resume: bool) -> tuple[Ledger, Version | None, Version]:
    """A ledger to start with, the checkpoint that it and the learner now come from, None if they start anew, and the version that training
    began from, whose weights are the reference policy's."""
    quotas, window, policy, redundancy = config.quotas, config.window, config.failure_policy, config.redundancy

    def anew(lineage: int = 0) -> tuple[Ledger, None, Version]:
        ledger = Ledger(quotas, window, policy, lineage, redundancy=redundancy, short=config.train.short)
        return ledger, None, Version(ledger.lineage, ledger.next_step)

    if not resume:
        return anew()
    try:
        found = await trainer.resume()
    except Damaged as error:
        raise ConfigError(
            f"--resume: {error}; to go on from the checkpoint before, remove the newest file of {folder.child('checkpoints')}/commits"
        ) from error
    if found.version is None:
        return anew(found.lineage)
    cut = CUT.validate_python(found.documents["ledger"])
    if config.logprobs_elsewhere and REFERENCE not in found.documents:
        raise ConfigError(f"--resume: checkpoint {found.version} doesn't say which version the reference policy is; start the run anew")
    reference = Version.parse(found.documents.get(REFERENCE, str(found.version)))  # where it isn't said, the learner itself has it
    ledger = Ledger.restore(cut, quotas, window, policy, found.lineage, redundancy=redundancy, short=config.train.short)
    return ledger, found.version, reference


def _what_resuming_means(ledger: Ledger, parent: Version | None, abandoned: int) -> str:
    if parent is None:
        return f"no checkpoint to go on from: starting anew as lineage {ledger.lineage}; {abandoned} trajectories of the earlier try are dropped"
    kept = sum(m.state == "scored" for g in ledger.cut().open for m in g.members)
    return (
        f"resumed from checkpoint {parent} as lineage {ledger.lineage}: {kept} scored trajectories wait to be trained on, "
        f"{len(ledger.running())} are played again, {abandoned} that were used after the checkpoint are dropped"
    )


async def _register(
    stack: AsyncExitStack, client: Client, config: Config, still_ours: Callable[..., bool], stage: Stage, plugin: WorkerPlugin
) -> None:
    if config.run.scheduler is not None:  # a cluster of our own goes with everything on it
        stack.push_async_callback(_unregister, client, still_ours, plugin.name)
    await client.register_plugin(ForClass(_resources(config, stage), plugin))


async def _unregister(client: Client, still_ours: Callable[..., bool], name: str) -> None:
    if not await client.run_on_scheduler(still_ours):
        return  # a later coordinator of the run has put its own in the place of ours
    with contextlib.suppress(ValueError):  # the scheduler knows none of that name: registering it was interrupted
        await client.unregister_worker_plugin(name)


def _resources(config: Config, stage: Stage) -> frozenset[str]:
    """The resources of all classes that serve a stage of the run's tasks, or may have to."""
    return frozenset(config.hardware[name].resource for name in config.affinity.serving(stage, [t.name for t in config.tasks]))


def _resource(config: Config, stage: Stage) -> str:
    """The resource of a stage that serves all tasks at once."""
    return config.hardware[config.affinity.hardware_class(stage)].resource


def _addresses(config: Config, workers: Sequence[ClusterWorker], stage: Stage) -> list[str]:
    resources = _resources(config, stage)
    return [w.address for w in workers if resources & {r for r, n in w.resources.items() if n >= 1}]


def learner_plugin(config: Config, folder: RunFolder, coordinator: int) -> LearnerPlugin:
    """What the training worker owns."""
    return LearnerPlugin(
        folder.child(POLICY), learner_settings(config), StoredTrajectories(folder.url, folder.storage_options),
        weights_url=folder.child("weights"), checkpoints_url=folder.child("checkpoints"), storage_options=folder.storage_options,
        full_every=config.weights.full_every, elsewhere=config.logprobs_elsewhere, coordinator=coordinator, drafts_url=folder.child(DRAFTS),
    )  # fmt: skip


def logprob_plugin(config: Config, folder: RunFolder) -> LogprobPlugin:
    """What each worker owns that computes log-probabilities for the ones that train."""
    settings, own = learner_settings(config), config.logprobs
    model = {"device": own.device or settings.model.device, "lora": None, "shard": False, "recompute": False}
    batch = {"token_budget": own.token_budget or settings.batch.token_budget}
    settings = settings.model_copy(update={"model": settings.model.model_copy(update=model), "batch": settings.batch.model_copy(update=batch)})
    return LogprobPlugin(
        folder.child(POLICY), settings, StoredTrajectories(folder.url, folder.storage_options), weights_url=folder.child("weights"),
        storage_options=folder.storage_options, wait_s=config.run.step_timeout,
    )  # fmt: skip


def learner_settings(config: Config) -> LearnerSettings:
    """The learner's settings with what follows from the rest: threads from the cores, the seed from the run's."""
    model = config.training.model.model_copy(
        update={"threads": 1 if config.run.deterministic else torch_threads(config), "seed": derive(config.run.seed, "weights")}
    )
    return config.training.model_copy(
        update={
            "model": model,
            "optimiser": config.training.optimiser.over(config.train.steps * config.training.batch.minibatches),
            "advantage": config.advantages,
        }
    )


def engine_host(config: Config, folder: RunFolder, coordinator: int) -> EngineHost:
    """What each generation worker owns."""
    return EngineHost(
        _engine_launch(config, folder), folder.child("weights"), folder.storage_options, sorted(_resources(config, "generate")), coordinator
    )


def _engine_launch(config: Config, folder: RunFolder) -> EngineLaunch:
    e = config.engine
    if e.kind == "sglang":
        s = e.sglang
        return SglangSettings(
            folder.child(POLICY), folder.storage_options, s.python, e.slots, e.max_length, e.chunk, e.dtype, e.device, e.kv, s.tensor_parallel,
            s.memory_fraction, s.attention_backend, s.flags, start_seconds=s.start_timeout, head=s.head,
            speculation=_speculation(config, folder),
        )  # fmt: skip
    return EngineSettings(
        model_url=folder.child(POLICY), storage_options=folder.storage_options, slots=e.slots, max_length=e.max_length, chunk=e.chunk,
        threads=1 if config.run.deterministic else torch_threads(config), dtype=e.dtype, device=e.device, kv=e.kv,
        deterministic=config.run.deterministic, speculation=_speculation(config, folder),
    )  # fmt: skip


def _speculation(config: Config, folder: RunFolder) -> SpeculationSettings:
    """What the configuration says of drafts; a head that learns in this run is followed unless others are named."""
    s = config.engine.speculation
    if s.draft == "head" and s.versions is None and config.training.draft.online:
        s = s.model_copy(update={"versions": folder.child(DRAFTS), "follow": True})
    return SpeculationSettings(**s.model_dump())


def recovery_s(config: Config) -> float:
    """Seconds that a lost engine may take to serve again: its server may need minutes to load a model."""
    return RECOVERY_S + (config.engine.sglang.start_timeout if config.engine.kind == "sglang" else 0.0)


def rollout_plan(config: Config, folder: RunFolder, lineage: int, coordinator: int, writers: int) -> RolloutPlan:
    """What every environment worker has to know."""
    tasks = {
        t.name: TaskPlan(
            t.environment, t.settings, Limits(t.max_turns, t.max_new_tokens, t.max_tokens, t.reset_timeout, t.step_timeout, t.reward_timeout),
            t.sampling.transform, t.run_in,
            config.hardware[config.affinity.hardware_class("generate", t.name)].resource, t.system,
            None if t.scored_apart else t.reward,
            AgentLimits(t.agent.run_timeout, t.agent.requests, t.agent.max_body, t.agent.parameters, t.agent.tool_format),
        )
        for t in config.tasks
    }  # fmt: skip
    return RolloutPlan(
        folder.url, folder.storage_options, folder.child(POLICY), config.run.seed, lineage, config.window, tasks,
        config.evaluate.transform, config.rollout.flush, config.rollout.flush_rows,
        writers, sum(q.quota * q.group_size for q in config.quotas), config.policy.chat,
        begun_topic(config.redundancy, folder.name, lineage), told_topic(folder.name, lineage),
        routing_plan(config, folder.name, lineage), coordinator, recovery_s(config) + BEYOND_S,
        config.rollout.agent_host,
    )  # fmt: skip
