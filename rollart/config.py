"""The whole configuration as typed models; owns what may be said and what contradicts what. Starts nothing, imports no torch.

A configuration is a YAML file plus `--set a.b=c` overrides. Every refusal names the field's path and what to do.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ByteSize, ConfigDict, Field, ValidationError, field_validator, model_validator

from rollart.control.affinity import STAGES, AffinityMap, Stage, wrong_fallbacks
from rollart.control.failures import FailurePolicy
from rollart.control.placement import PlacementRule
from rollart.control.quotas import ShortRule, TaskQuota
from rollart.control.redundancy import Redundancy, RedundancyRule
from rollart.control.staleness import StalenessWindow
from rollart.environments.protocol import RunIn
from rollart.rewards.registry import LIGHT, why_unknown
from rollart.training.keeping import Keeping
from rollart.training.settings import DEVICE, AdvantageOverride, AdvantagePlan, LearnerSettings, OptimiserSettings
from rollart.types import SamplingTransform
from rollart.yaml_text import WrongYaml, read_yaml
from storage.objects.credentials import credential_fields, without_user

ScoreIn = Literal["episode", "future"]


class ConfigError(ValueError):
    """The configuration can't be used; the message is one line a problem, each with the field's path and a remedy."""


class Section(BaseModel):
    """Base of every section: unknown keys are refused, and so are numbers that are not finite; nothing changes after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


_CREDENTIALS = (
    "take it out, and give it by the environment or the usual files (AWS_PROFILE, AWS_ACCESS_KEY_ID, ~/.aws/credentials, "
    "GOOGLE_APPLICATION_CREDENTIALS), on every machine of the run"
)


class RunSettings(Section):
    """Which run this is and where its folder lies."""

    root: str = Field("runs", min_length=1, description="folder that holds the runs: a path or any fsspec URL (s3://bucket/runs)")
    name: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="the run's name; default: the flow and the time")
    storage_options: dict[str, Any] = Field(
        default_factory=dict, description="fsspec options of `root` (never credentials: they come from the environment)"
    )
    seed: int = Field(0, ge=0, lt=2**31, description="every seed of the run follows from it")
    deterministic: bool = Field(False, description="equal runs are equal bit for bit; needs alpha 0, fp32 and the embedded engine, and is slow")
    dashboard_port: int = Field(8787, ge=0, le=65535, description="port of the Dask dashboard; 0 takes any free one")
    scheduler: str | None = Field(None, description="address of a running Dask scheduler; default: a local cluster is started")
    step_timeout: float = Field(
        900.0, gt=0, description="seconds without any trajectory, step or version after which the run fails and says what it awaits"
    )
    lease: float = Field(
        15.0, ge=1, description="seconds for which a process that runs the run may be silent before another one may take the run over"
    )

    @field_validator("root")
    @classmethod
    def _no_user(cls, root: str) -> str:
        if without_user(root) != root:
            raise ValueError(f"a URL with a user or password would be kept in the run's folder; {_CREDENTIALS}")
        return root

    @field_validator("storage_options")
    @classmethod
    def _no_credentials(cls, options: dict[str, Any]) -> dict[str, Any]:
        if found := credential_fields(options):
            raise ValueError(f"{', '.join(found)}: a credential would be kept in the run's folder; {_CREDENTIALS}")
        return options


class HardwareClass(Section):
    """A kind of worker: a Dask resource with a price."""

    resource: str = Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$", description="name of the Dask worker resource")
    slots: int = Field(1, ge=1, description="units of the resource a worker process has: how many tasks run there at once")
    workers: int = Field(1, ge=1, description="worker processes that the local cluster starts; of the class that trains: ranks")
    price_per_hour: float = Field(0.0, ge=0, description="price of one worker, in the currency of your choice per hour")
    fallback: str | None = Field(
        None,
        description="the class that stands in for this one: for generation while every engine here is full or there is none, for environments and "
        "rewards while no worker is here",
    )
    memory: ByteSize | None = Field(
        None,
        ge=2**26,
        description="memory that one of the local cluster's worker processes may take (2 GiB): at four fifths it takes no more tasks and is started "
        "anew once those that it has have ended, at 95 % at once; for environments and rewards only; default: no limit",
    )
    queue: int = Field(32, ge=0, description="requests that may wait at an engine of this class, over engine.slots, before it is full for `fallback`")


class TinyPolicy(Section):
    """A small Llama-shaped policy and its tokenizer, made here from nothing."""

    vocab: int = Field(512, ge=258, description="most tokens of the tokenizer; 256 bytes and two special ones are the least")
    hidden_size: int = Field(128, ge=16, multiple_of=8, description="width of the residual stream")
    layers: int = Field(4, ge=1, description="decoder layers")
    heads: int = Field(4, ge=1, description="attention heads")
    intermediate_size: int = Field(352, ge=16, description="width of the feed-forward layer")
    max_length: int = Field(512, ge=32, description="positions, in tokens")

    @model_validator(mode="after")
    def _pairs(self) -> TinyPolicy:
        if self.hidden_size % (2 * self.heads):
            raise ValueError(
                f"hidden_size {self.hidden_size} is no multiple of {2 * self.heads}, twice the heads, since rotary positions work on pairs: "
                "change hidden_size or heads"
            )
        return self


class PolicySettings(Section):
    """The policy: a Hugging Face folder, a version that another run published, a GGUF file, or a tiny one built here."""

    model: str | None = Field(
        None,
        description="a Hugging Face causal language model: its folder or URL (config, tokenizer, safetensors), or `URL@VERSION` of weights, or "
        "the path or URL of a `.gguf` file, or `package:NAME` for the one in an installed Python package (`rollart[smollm2]` reads them)",
    )
    tiny: TinyPolicy | None = Field(None, description="build a small policy instead")
    chat: bool = Field(
        False, description="observations and responses are messages of the model's chat template; else they follow each other as they are"
    )

    @model_validator(mode="after")
    def _one_source(self) -> PolicySettings:
        if (self.model is None) == (self.tiny is None):
            raise ValueError("give either policy.model or policy.tiny, not both and not neither")
        if self.chat and self.tiny is not None:
            raise ValueError("policy.tiny has no chat template: set policy.chat to false")
        return self


class Sampling(Section):
    """How responses are sampled for training."""

    temperature: float = Field(1.0, gt=0, le=10, description="softmax temperature; the trainer applies the same")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus; must stay 1 for training, whose log-probabilities it would change")
    top_k: int = Field(-1, ge=-1, description="cut to the k likeliest tokens; must stay -1 for training")

    @model_validator(mode="after")
    def _uncut(self) -> Sampling:
        if self.top_p < 1 or self.top_k > 0:
            raise ValueError(
                "top_p and top_k change the distribution in a way that the trainer can't replay: leave them at 1 and -1, use temperature"
            )
        return self

    @property
    def transform(self) -> SamplingTransform:
        return SamplingTransform(temperature=self.temperature)


class FilterSettings(Section):
    """Which groups are not worth a step. What is filtered out is counted by its reason, and another group is played in its place."""

    no_signal: Literal["skip", "replace"] = Field(
        "skip",
        description="a group whose members all scored the same takes its place in the batch untrained (skip), or gives it to another (replace), "
        "where the advantage estimator compares within groups",
    )
    long_share: float = Field(
        1.0, ge=0, le=1, description="largest share of a group that may run over max_tokens; a group over it is dropped as too_long (1: none is)"
    )


class TaskSettings(Section):
    """One task of the mix."""

    name: str = Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$", description="name in metrics, tables and on the dashboard")
    environment: str = Field(description="a registered environment's name, or `module:Class`")
    settings: dict[str, Any] = Field(default_factory=dict, description="the environment's own settings")
    system: str = Field("", description="the system message that its episodes begin with; needs policy.chat")
    reward: str = Field("environment", description="a registered verifier's name, or `module:function`")
    score_in: ScoreIn | None = Field(
        None,
        description="where the verifier runs: in the trajectory's own task, on its environment's worker (episode), or as a future of its own, on "
        "the reward stage's class (future); default: episode for the verifiers that are quick by nature (environment, reasoning), else future",
    )
    weight: float = Field(1.0, gt=0, le=1e6, description="share of the groups of a batch, relative to the other tasks")
    group_size: int = Field(8, ge=2, description="trajectories a group (G)")
    min_members: int | None = Field(None, ge=2, description="survivors below which a group is dropped whole; default: group_size")
    max_turns: int = Field(1, ge=1, description="turns after which an episode is cut off")
    max_new_tokens: int = Field(16, ge=1, description="tokens a response may have")
    max_tokens: int = Field(256, ge=8, description="tokens a trajectory may have, prompts included")
    reset_timeout: float = Field(120.0, gt=0, description="seconds after which a reset fails the attempt (none for a plain function in the loop)")
    step_timeout: float = Field(60.0, gt=0, description="the same for a step")
    reward_timeout: float = Field(
        60.0, gt=0, description="seconds after which its verifier fails the attempt (none for those that are quick by nature, in an episode's task)"
    )
    run_in: RunIn = Field("thread", description="where the environment's calls run: in a thread, or in the worker's loop if none takes over 1 ms")
    sampling: Sampling = Field(default_factory=lambda: Sampling())
    advantage: AdvantageOverride = Field(default_factory=lambda: AdvantageOverride())
    filters: FilterSettings = Field(default_factory=lambda: FilterSettings())
    classes: dict[Stage, str] = Field(
        default_factory=dict, description="hardware class by stage, where this task wants another one than `stages` says"
    )

    @model_validator(mode="after")
    def _members(self) -> TaskSettings:
        if self.min_members is not None and self.min_members > self.group_size:
            raise ValueError(f"min_members {self.min_members} is over group_size {self.group_size}: lower it")
        if self.max_new_tokens >= self.max_tokens:
            raise ValueError(f"max_new_tokens {self.max_new_tokens} leaves no room in max_tokens {self.max_tokens}: raise max_tokens")
        return self

    @property
    def scored_apart(self) -> bool:
        """Whether its scores are futures of their own."""
        return self.score_in == "future" or (self.score_in is None and self.reward not in LIGHT)


class WarmUpSettings(Section):
    """Supervised warm-up on imperfect scripted play, so that actions parse and reinforcement learning has something to improve."""

    steps: int = Field(0, ge=0, description="supervised steps; 0: no warm-up")
    batch: int = Field(64, ge=1, description="trajectories a supervised step")
    episodes: dict[str, int] = Field(default_factory=dict, description="scripted episodes by task name, to learn from")
    optimiser: OptimiserSettings = Field(
        default_factory=lambda: OptimiserSettings(lr=1e-3, decay="linear"),
        description="AdamW of the warm-up; total_steps defaults to warm_up.steps",
    )

    @model_validator(mode="after")
    def _something(self) -> WarmUpSettings:
        if any(n < 0 for n in self.episodes.values()):
            raise ValueError("warm_up.episodes counts episodes: give numbers from 0")
        if self.steps and not any(self.episodes.values()):
            raise ValueError("warm_up.steps needs scripted play: set warm_up.episodes.TASK for at least one task, or steps to 0")
        return self


class TrainSettings(Section):
    """The reinforcement-learning loop."""

    steps: int = Field(100, ge=1, description="training steps in all; version n is the weights after n of them")
    groups: int = Field(24, ge=1, description="groups a batch, shared among the tasks by weight")
    alpha: int = Field(1, ge=0, le=64, description="staleness bound, in versions; 0 is synchronous")
    short: ShortRule = Field(
        "wait",
        description="while a task's groups are not there: wait for them, or fill their places with other tasks' groups, whose shares grow by it",
    )
    checkpoint_every: int = Field(20, ge=1, description="steps between checkpoints")
    max_skipped: int = Field(
        10,
        ge=1,
        description="steps in a row without anything to train on, or batches' worth of a task filtered out in a row, after which the run fails",
    )


class WeightSettings(Section):
    """How the run's versions and checkpoints are stored, and how long they stay; tagged and leased ones always do."""

    full_every: int = Field(
        1, ge=1, le=256, description="a version is whole at least every so many, and between stored as what changed; 1: all are whole"
    )
    keep_last: int = Field(8, ge=0, description="versions that stay, the newest ones and those in the staleness window; 0: all")
    keep_every: int = Field(0, ge=0, description="versions that stay besides: those whose step is a multiple of this; 0: none")
    keep_checkpoints: int = Field(3, ge=0, description="checkpoints that stay, with the versions at their steps; 0: all")
    grace: float = Field(600.0, ge=0, description="seconds that data stays after its version went, for readers that are at it")


class RedundancySettings(Section):
    """Second tries at members that are late, on slots that are free."""

    rule: RedundancyRule = Field(
        "none",
        description="before_first_token: a member that is late to ask for its first token gets a second one, and who begins first goes on; "
        "first_finished: groups are launched larger and whoever is last is stopped, which favours short responses",
    )
    factor: float = Field(1.3, ge=1, le=4, description="tries that may be out for a group, over its size")
    patience: float = Field(0.9, ge=0, lt=1, description="share of a task's measured delays that a try has to outlast before it gets a second one")


class RolloutSettings(Section):
    """How trajectories run."""

    attempts: int = Field(
        3, ge=1, description="tries at a member before it is given up, counting those that its environment, its verifier or its silence ended"
    )
    machine_attempts: int = Field(10, ge=1, description="the same, counting those that an engine, a worker or a store ended, which take many at once")
    rest: float = Field(0.5, ge=0, description="seconds before a member is tried again after its first failure, twice as long after each further one")
    most_rest: float = Field(60.0, ge=0, description="seconds that it rests at most")
    lease: float = Field(300.0, gt=0, description="seconds after which a silent attempt counts as failed")
    silence: float = Field(60.0, gt=0, description="seconds in which nothing ends after which it is told where everything in flight is")
    worker_wait: float = Field(
        180.0, gt=0, description="seconds that work may wait for a worker with its resource while the cluster has none, after which the run fails"
    )
    redundancy: RedundancySettings = Field(default_factory=lambda: RedundancySettings())
    flush: float = Field(
        0.25,
        gt=0,
        description="seconds that a finished trajectory waits for others before it is written; longer where workers are so many, or "
        "steps so long, that a step would cost the store over some eighty files",
    )
    flush_rows: int = Field(64, ge=1, description="finished trajectories that are written at once at the latest; more in large batches")


class EvaluateSettings(Section):
    """Evaluation on held-out seeds, each on one version held to its end."""

    episodes: int = Field(256, ge=1, description="held-out episodes a task, the same ones every time")
    every: int = Field(50, ge=0, description="steps between evaluations; 0: only before and after")
    every_episodes: int = Field(64, ge=1, description="episodes a task of those in between")
    temperature: float = Field(1.0, ge=0, le=10, description="sampling temperature; 0 is greedy")


class PlacementSettings(Section):
    """Which class generates for which task, where that is found out by measuring and not declared for good."""

    rule: Literal["declared", "measured"] = Field(
        "declared",
        description="declared: as `stages` and tasks[].classes say; measured: they say where tasks begin, and tasks move to where the mix is "
        "finished soonest for its price (rollart/control/placement.py)",
    )
    classes: list[str] = Field(
        default_factory=list, description="hardware classes with engines beside those that `stages` and tasks[].classes name for generate"
    )
    gain: float = Field(0.1, ge=0, description="how much better than the map in force another must be, of 1, before tasks move")
    patience: int = Field(3, ge=1, description="decisions (one a step) in a row in which it must be so")
    explore: int = Field(16, ge=1, description="requests of a task that a class serves before it is judged for it")
    price_weight: float = Field(
        0.5, ge=0, le=1, description="what hardware.NAME.price_per_hour counts: 0 nothing, 1 as much as time; without prices it doesn't matter"
    )


class EngineSettings(Section):
    """The generation engine that each generation worker owns."""

    kind: Literal["embedded"] = Field("embedded", description="embedded: torch in a process of the worker's, for small models")
    slots: int = Field(128, ge=1, description="sequences in the KV cache: those that decode, and those whose prefix waits for its next turn")
    max_length: int = Field(512, ge=32, description="tokens a request may reach, prompt included")
    chunk: int = Field(1024, ge=1, description="prompt tokens of one pass, over all requests")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="number format of the weights")
    device: str = Field("cpu", pattern=DEVICE, description="torch device")
    kv: Literal["recomputed", "kept"] = Field("recomputed", description="what happens to the KV cache of responses in flight at a weight swap")


class LogprobSettings(Section):
    """Reference and proximal log-probabilities on workers of their own: what `stages.logprobs` names another class than `stages.train` for."""

    device: str | None = Field(None, pattern=DEVICE, description="torch device of those workers; default: training.model.device")
    token_budget: int | None = Field(
        None, ge=1, description="tokens of one forward pass there, padding included; default: training.batch.token_budget"
    )


class Config(Section):
    """Everything a run needs to be repeated."""

    run: RunSettings = Field(default_factory=lambda: RunSettings())
    hardware: dict[str, HardwareClass] = Field(min_length=1, description="hardware classes by name")
    stages: dict[Stage, str] = Field(
        description="hardware class by stage: train, generate, environment, reward (needed where a task's scores are futures of their own, see "
        "tasks[].score_in), and logprobs (reference and proximal log-probabilities; default: that of train, whose workers then compute them)"
    )
    policy: PolicySettings
    tasks: list[TaskSettings] = Field(min_length=1, description="the mix")
    warm_up: WarmUpSettings = Field(default_factory=lambda: WarmUpSettings())
    train: TrainSettings = Field(default_factory=lambda: TrainSettings())
    training: LearnerSettings = Field(default_factory=lambda: LearnerSettings())
    logprobs: LogprobSettings = Field(default_factory=lambda: LogprobSettings())
    weights: WeightSettings = Field(default_factory=lambda: WeightSettings())
    rollout: RolloutSettings = Field(default_factory=lambda: RolloutSettings())
    evaluate: EvaluateSettings = Field(default_factory=lambda: EvaluateSettings())
    engine: EngineSettings = Field(default_factory=lambda: EngineSettings())
    placement: PlacementSettings = Field(default_factory=lambda: PlacementSettings())

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        names = [t.name for t in self.tasks]
        apart = [t.name for t in self.tasks if t.scored_apart and why_unknown(t.reward) is None]
        problems = [f"tasks: {n!r} stands twice; give every task its own name" for n in sorted({n for n in names if names.count(n) > 1})]
        problems += [
            f"stages.{s}: missing; map it to one of {sorted(self.hardware)}"
            for s in STAGES
            if s not in self.stages and s not in ("logprobs", "reward")
        ]
        problems += [f"tasks.{t.name}.reward: {unknown}" for t in self.tasks if (unknown := why_unknown(t.reward)) is not None]
        if apart and "reward" not in self.stages:
            problems.append(
                f"stages.reward: missing, and the scores of {', '.join(apart)} are futures of their own; map it to one of "
                f"{sorted(self.hardware)}, or set tasks[].score_in to episode where the verifier is quick"
            )
        mapped = {f"stages.{s}": c for s, c in self.stages.items()}
        mapped |= {f"tasks.{t.name}.classes.{s}": c for t in self.tasks for s, c in t.classes.items()}
        problems += [
            f"{path}: no hardware class {c!r}; declare hardware.{c} or use one of {sorted(self.hardware)}"
            for path, c in mapped.items()
            if c not in self.hardware
        ]
        problems += [
            f"tasks.{t.name}.classes.{s}: it serves all tasks at once; set stages.{s}"
            for t in self.tasks
            for s in ("train", "logprobs")
            if s in t.classes
        ]
        if self.logprobs != LogprobSettings() and self.stages.get("logprobs") in (None, self.stages.get("train")):
            problems.append("logprobs: is of workers that stages.logprobs names; name another class there than in stages.train, or leave it out")
        problems += self._misplaced()
        problems += [
            f"hardware.{name}.memory: a limit would end the {stage} workers in the middle of a step or a response; leave it out"
            for name, hardware in self.hardware.items()
            for stage in ("train", "logprobs", "generate")
            if hardware.memory is not None and (self.stages.get(stage) == name or any(t.classes.get(stage) == name for t in self.tasks))
        ]
        resources = [h.resource for h in self.hardware.values()]
        problems += [
            f"hardware: resource {r!r} stands twice; one class, one resource" for r in sorted({r for r in resources if resources.count(r) > 1})
        ]
        problems += [f"warm_up.episodes.{n}: no such task; use one of {names}" for n in self.warm_up.episodes if n not in names]
        problems += [
            f"tasks.{t.name}.max_tokens: {t.max_tokens} is over engine.max_length {self.engine.max_length}; raise that or lower this"
            for t in self.tasks
            if t.max_tokens > self.engine.max_length
        ]
        if self.policy.tiny is not None and self.policy.tiny.max_length < self.engine.max_length:
            problems.append(f"engine.max_length: {self.engine.max_length} is over policy.tiny.max_length {self.policy.tiny.max_length}; lower it")
        problems += [f"tasks.{t.name}.system: needs policy.chat, which makes it a message" for t in self.tasks if t.system and not self.policy.chat]
        problems += [
            f"rollout.lease: {self.rollout.lease:g} s end before tasks.{t.name}.reset_timeout, step_timeout and reward_timeout "
            f"({t.reset_timeout:g} s, {t.step_timeout:g} s and {t.reward_timeout:g} s) can; raise it or lower them"
            for t in self.tasks
            if self.rollout.lease <= t.reset_timeout + t.step_timeout + t.reward_timeout
        ]
        if self.run.step_timeout <= self.rollout.lease + self.rollout.most_rest:
            problems.append(
                f"run.step_timeout: {self.run.step_timeout:g} s end the run before a silent attempt is tried again, rollout.lease "
                f"{self.rollout.lease:g} s and rollout.most_rest {self.rollout.most_rest:g} s later; raise it or lower them"
            )
        problems += [
            f"rollout.{name}: {seconds:g} s are not under run.step_timeout, {self.run.step_timeout:g} s, which would end the run before; lower it"
            for name, seconds in (("silence", self.rollout.silence), ("worker_wait", self.rollout.worker_wait))
            if seconds >= self.run.step_timeout
        ]
        if len(self.tasks) > self.train.groups:
            problems.append(f"train.groups: {self.train.groups} leaves a task out of {len(self.tasks)} without a group; raise it")
        if self.run.deterministic:
            if self.train.alpha != 0:
                problems.append("run.deterministic: needs train.alpha 0, since asynchronous work ends in no fixed order")
            if self.engine.dtype != "float32" or self.training.model.dtype != "float32":
                problems.append("run.deterministic: needs engine.dtype and training.model.dtype float32")
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def _misplaced(self) -> list[str]:
        """What is wrong with the classes that stand in for others, or that tasks may move to."""
        problems = [
            f"placement.classes: no hardware class {c!r}; declare hardware.{c} or use one of {sorted(self.hardware)}"
            for c in self.placement.classes
            if c not in self.hardware
        ]
        mapped: list[tuple[Stage, str]] = [*self.stages.items(), *(pair for t in self.tasks for pair in t.classes.items())]
        mapped += [("generate", c) for c in self.placement.classes]
        serves = {name: sorted({s for s, c in mapped if c == name}) for name in self.hardware}
        fallbacks = {name: h.fallback for name, h in self.hardware.items() if h.fallback is not None}
        problems += [f"hardware.{n}.fallback: {wrong}" for n, wrong in wrong_fallbacks(fallbacks, self.hardware, serves).items()]
        if self.placement.rule == "measured" and sum("generate" in stages for stages in serves.values()) < 2:
            problems.append("placement.rule: measured needs two classes with engines to choose from; name another one in placement.classes")
        if self.placement.rule == "declared" and self.placement.classes:
            problems.append("placement.classes: only placement.rule measured uses them; set it, or leave them out")
        return problems

    @property
    def placement_rule(self) -> PlacementRule:
        p = self.placement
        return PlacementRule(p.gain, p.patience, p.explore, p.price_weight)

    @property
    def affinity(self) -> AffinityMap:
        stages = self.stages if self.logprobs_elsewhere else {**self.stages, "logprobs": self.stages["train"]}
        if not any(t.scored_apart for t in self.tasks):
            stages = {**stages, "reward": stages["environment"]}
        tasks = {(t.name, s): c for t in self.tasks for s, c in t.classes.items()}
        for t in self.tasks:
            if not t.scored_apart:
                tasks[t.name, "reward"] = t.classes.get("environment", stages["environment"])
        fallbacks = {name: h.fallback for name, h in self.hardware.items() if h.fallback is not None}
        return AffinityMap(stages, tasks, fallbacks, frozenset(self.placement.classes))

    @property
    def logprobs_elsewhere(self) -> bool:
        """Whether training steps need log-probabilities beside the current policy's, and workers of another class compute them."""
        needed = self.training.needs_reference or self.training.needs_proximal
        return needed and self.stages.get("logprobs", self.stages["train"]) != self.stages["train"]

    @property
    def idle(self) -> dict[Stage, str]:
        """Why a stage that has a class of its own has nothing to do in this run; no worker is started or asked for on its account."""
        found: dict[Stage, str] = {}
        if not self.logprobs_elsewhere and self.stages.get("logprobs", self.stages["train"]) != self.stages["train"]:
            found["logprobs"] = "no training step needs it with training.loss.kl 0 and training.batch.minibatches 1"
        if "reward" in self.stages and not any(t.scored_apart for t in self.tasks):
            found["reward"] = "every task's verifier runs in its trajectories' own tasks (tasks[].score_in)"
        return found

    @property
    def window(self) -> StalenessWindow:
        return StalenessWindow(self.train.alpha)

    @property
    def keeping(self) -> Keeping:
        """What of the run's versions stays; those in the staleness window may be in use."""
        return Keeping(self.weights.keep_checkpoints, self.weights.keep_last, self.weights.keep_every, self.train.alpha, self.weights.grace)

    @property
    def failure_policy(self) -> FailurePolicy:
        r = self.rollout
        return FailurePolicy(r.attempts, r.lease, self.train.max_skipped, machine_attempts=r.machine_attempts, rest_s=r.rest, most_rest_s=r.most_rest)

    @property
    def redundancy(self) -> Redundancy:
        return Redundancy(**self.rollout.redundancy.model_dump())

    @property
    def advantages(self) -> AdvantagePlan:
        """How each task's scores turn into advantages."""
        common = self.training.advantage
        tasks = {t.name: t.advantage.over(common) for t in self.tasks}
        return AdvantagePlan(**common.model_dump(), tasks=tasks)

    @property
    def quotas(self) -> list[TaskQuota]:
        """Groups a batch by task: shares of `train.groups` by weight, whole by largest remainder, at least one each."""
        total = sum(t.weight for t in self.tasks)
        exact = [self.train.groups * t.weight / total for t in self.tasks]
        whole = [max(1, int(x)) for x in exact]
        while sum(whole) != self.train.groups:
            short = sum(whole) < self.train.groups
            gaps = [(x - w if short else w - x, -i) for i, (x, w) in enumerate(zip(exact, whole, strict=True)) if short or w > 1]
            whole[-max(gaps)[1]] += 1 if short else -1
        return [
            TaskQuota(
                t.name, w, t.group_size, t.min_members or t.group_size, spread=self.advantages.of(t.name).needs_spread,
                replace_flat=t.filters.no_signal == "replace", long_share=t.filters.long_share,
            )
            for t, w in zip(self.tasks, whole, strict=True)
        ]  # fmt: skip

    def task(self, name: str) -> TaskSettings:
        return next(t for t in self.tasks if t.name == name)

    def to_yaml(self) -> str:
        """The resolved configuration, which `load` reads back equal."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, width=140)


RESUMABLE = {
    "run.dashboard_port", "run.lease", "run.scheduler", "run.step_timeout", "train.steps", "train.checkpoint_every",
    "train.max_skipped", "training.ranks", "evaluate", "rollout", "hardware", "weights", "placement",
}  # fmt: skip
"""Fields (and sections) that may differ when a run is resumed; any other would make the curve one of two different experiments."""


def load(path: str | Path, overrides: list[str] | None = None) -> Config:
    """Reads a YAML file and applies `a.b=c` overrides. ConfigError with one line a problem."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--config: {path} can't be read ({error.strerror}); give the path of a YAML file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--config: {path} is no UTF-8 text; give the path of a YAML file") from error
    return parse(text, overrides, source=str(path))


def parse(text: str, overrides: list[str] | None = None, source: str = "configuration") -> Config:
    """The configuration that YAML `text` and `overrides` say."""
    try:
        data = read_yaml(text)
    except WrongYaml as error:
        raise ConfigError(f"{source}:{error.where} is no valid YAML ({error}); mend that line") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{source}: must be a mapping of sections ({', '.join(Config.model_fields)}), found {type(data).__name__}")
    for override in overrides or []:
        _set(data, override)
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(e) for e in error.errors())) from error


def changed_fields(old: Config, new: Config) -> list[str]:
    """Paths whose values differ, without those that `RESUMABLE` allows."""
    differing = _differing(old.model_dump(mode="json"), new.model_dump(mode="json"))
    return [p for p in differing if not any(p == r or p.startswith(r + ".") for r in RESUMABLE)]


def _differing(old: Any, new: Any, path: str = "") -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [*old, *(k for k in new if k not in old)]
        return [p for k in keys for p in _differing(old.get(k), new.get(k), f"{path}.{k}".lstrip("."))]
    return [] if old == new else [path]


_NUMBER = re.compile(r"[0-9]{1,9}")


def _set(data: dict[str, Any], override: str) -> None:
    """Applies one `a.b=c`; `c` is read as YAML, a number in the path indexes a list, a name in a list finds the item of that name."""
    path, sign, value = override.partition("=")
    if not sign or not re.fullmatch(r"[\w-]+(\.[\w-]+)*", path):
        raise ConfigError(f"--set {override}: write a path, an equals sign and a value, such as train.steps=50")
    *parents, last = path.split(".")
    here: Any = data
    for i, key in enumerate(parents):
        where = ".".join(parents[: i + 1])
        if isinstance(here, dict):
            if here.get(key) is None:
                here[key] = {}
            here = here[key]
        else:
            here = _item(here, key, where)
    try:
        parsed = read_yaml(value)
    except WrongYaml as error:
        raise ConfigError(f"--set {override[:80]}: the value is no valid YAML ({error}); quote it if it is text") from error
    if isinstance(parsed, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", parsed):
        parsed = float(parsed)  # YAML 1.1 wants a dot in 1e-3; people don't write one
    if isinstance(here, dict):
        here[last] = parsed
    elif isinstance(here, list) and _NUMBER.fullmatch(last) and int(last) < len(here):
        here[int(last)] = parsed
    else:
        raise ConfigError(f"--set {override}: {'.'.join(parents)} holds no field {last!r}; name a section's field")


def _item(here: Any, key: str, where: str) -> Any:
    if isinstance(here, list):
        if _NUMBER.fullmatch(key) and int(key) < len(here):
            return here[int(key)]
        for item in here:
            if isinstance(item, dict) and item.get("name") == key:
                return item
    raise ConfigError(f"--set {where}: there is no such entry; use a field's path, and in a list an item's name or number")


def _explain(error: Any) -> str:
    path = ".".join(str(p) for p in error["loc"])
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        return f"{path}: unknown field; remove it or correct its spelling"
    if error["type"] == "missing":
        return f"{path}: missing; set it"
    if not path:
        return message
    if error["type"] == "value_error":
        return f"{path}: {message}"
    return f"{path}: {message[0].lower() + message[1:]}, got {error['input']!r}; correct the value"
