"""The configuration as a whole, and what follows from it for the parts of a run; starts nothing, imports no torch."""

from __future__ import annotations

import yaml
from pydantic import Field, model_validator

from rollart.config.contradictions import contradictions
from rollart.config.draft import DraftTrainingSettings
from rollart.config.engine import EngineSettings, LogprobSettings
from rollart.config.hardware import HardwareClass, PlacementSettings
from rollart.config.policy import PolicySettings
from rollart.config.rollout import EvaluateSettings, RolloutSettings
from rollart.config.run import RunSettings
from rollart.config.section import Section
from rollart.config.tasks import TaskSettings, WarmUpSettings
from rollart.config.train import TrainSettings, WeightSettings
from rollart.control.affinity import AffinityMap, Stage
from rollart.control.failures import FailurePolicy
from rollart.control.placement import PlacementRule
from rollart.control.quotas import TaskQuota
from rollart.control.redundancy import Redundancy
from rollart.control.staleness import StalenessWindow
from rollart.training.keeping import Keeping
from rollart.training.settings import AdvantagePlan, LearnerSettings


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
    draft_training: DraftTrainingSettings = Field(default_factory=lambda: DraftTrainingSettings())

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        if problems := list(contradictions(self)):
            raise ValueError("\n".join(problems))
        return self

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
