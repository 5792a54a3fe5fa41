"""The trainer's part of the configuration; owns the fields, their units and their bounds, and reads nothing else."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

__all__ = [
    "AdvantageName", "AdvantageOverride", "AdvantagePlan", "AdvantageSettings", "AgreementSettings", "BatchSettings", "Decay",
    "Denominator", "DraftSettings", "KLEstimator", "LearnerSettings", "LoraSettings", "LossName", "LossSettings", "MaskSettings",
    "ModelSettings", "OptimiserSettings", "RankSettings",
]  # fmt: skip

AdvantageName = Literal["grpo", "rloo", "reinforce", "gae"]
Baseline = Literal["batch", "running"]
Normalisation = Literal["none", "task"]
LossName = Literal["decoupled_ppo", "ppo_clip", "cispo", "gspo", "tis"]
CorrectionLevel = Literal["token", "sequence", "none"]
MaskLevel = Literal["token", "sequence", "geometric"]
Measure = Literal["ratio", "divergence"]
KLEstimator = Literal["k1", "k2", "k3"]
Decay = Literal["constant", "linear", "cosine"]
Denominator = Literal["token", "trajectory"]
DEVICE = r"^(cpu|cuda|mps|xpu)(:[0-9]+)?$"
"""How a torch device is spelled; whether a worker has it shows on that worker."""


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class OptimiserSettings(_Settings):
    """AdamW, its learning-rate schedule and its guard against steps that are not finite."""

    lr: float = Field(default=3e-4, gt=0, description="peak learning rate of AdamW (change of a weight per optimiser step, before Adam's scaling)")
    betas: tuple[float, float] = Field(
        default=(0.9, 0.95), description="AdamW's decay of the first and the second moment, per optimiser step, each in [0, 1)"
    )
    weight_decay: float = Field(
        default=0.0, ge=0, description="decoupled weight decay of matrices (share of a weight per unit of lr); vectors decay never"
    )
    warmup_steps: int = Field(default=0, ge=0, description="optimiser steps over which the learning rate rises linearly to its peak")
    decay: Decay = Field(default="constant", description="how the learning rate falls after the warm-up, until total_steps")
    total_steps: int | None = Field(
        default=None, gt=0, description="optimiser steps at whose end the decay reaches min_lr_share; default: all of the run's"
    )
    min_lr_share: float = Field(default=0.1, ge=0, le=1, description="learning rate at the end of the decay, as a share of the peak")
    clip_norm: float = Field(default=1.0, gt=0, description="largest L2 norm of the whole gradient; a longer one is scaled down to it")
    max_skips: int = Field(default=3, ge=0, description="optimiser steps in a row that may be skipped since loss or gradient is not finite")

    @field_validator("betas")
    @classmethod
    def _decays(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"each must be at least 0 and under 1, got {betas}; correct the value")
        return betas

    def over(self, steps: int) -> OptimiserSettings:
        """The same, with the decay spread over `steps` optimiser steps unless it says otherwise itself."""
        return self if self.total_steps is not None else self.model_copy(update={"total_steps": max(1, steps)})


class MaskSettings(_Settings):
    """Leaves out what the trainer's policy at the start of the step finds too unlike what sampled it; it still counts in the denominator."""

    level: MaskLevel = Field(
        default="token", description="what is judged: each token, a trajectory by the sum over its tokens (sequence), or by their mean (geometric)"
    )
    by: Measure = Field(
        default="ratio", description="ratio: probability ratio to the behaviour policy; divergence: KL of the token against all others, in nats"
    )
    low: float | None = Field(default=None, ge=0, description="what is under it is left out (none: no lower bound)")
    high: float | None = Field(default=None, gt=0, description="what is over it is left out (none: no upper bound)")
    negative_only: bool = Field(default=False, description="leave out only where the advantage is negative")

    @model_validator(mode="after")
    def _bounded(self) -> MaskSettings:
        if self.low is None and self.high is None:
            raise ValueError("a mask without bounds leaves nothing out: give low, high or both, or remove the mask")
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ValueError(f"low {self.low} is not under high {self.high}: every token would be left out; lower it")
        return self


class LossSettings(_Settings):
    """Which policy loss runs, how stale samples are corrected for, and what is added."""

    name: LossName = Field(default="decoupled_ppo", description="policy loss")
    clip_low: float = Field(default=0.2, gt=0, lt=1, description="how far below 1 the probability ratio counts")
    clip_high: float = Field(default=0.28, gt=0, description="how far above 1 the probability ratio counts (above clip_low: DAPO's clip-higher)")
    correction: CorrectionLevel = Field(
        default="token",
        description="decoupled_ppo, tis: behaviour weight of each token, or one of the trajectory (unbiased, and of higher variance), or none, "
        "which takes stale samples for fresh ones",
    )
    truncate: float | None = Field(
        default=2.0, ge=1, description="cap of the behaviour weight, the probability ratio of proximal to behaviour policy; null: none"
    )
    mask: MaskSettings | None = Field(default=None, description="what is left out of any loss; none: nothing is")
    entropy: float = Field(default=0.0, ge=0, description="weight of the entropy bonus, per nat")
    kl: float = Field(default=0.0, ge=0, description="weight of the KL penalty to the weights that training began with, per nat")
    kl_estimator: KLEstimator = Field(default="k3", description="how that KL is estimated from the sampled tokens")
    value: float = Field(default=0.5, gt=0, description="gae: weight of the value head's squared error")

    @property
    def over_sequences(self) -> bool:
        """Whether something in the loss looks at all tokens of a trajectory at once."""
        corrected = self.name in ("decoupled_ppo", "tis") and self.correction == "sequence"
        return self.name == "gspo" or corrected or (self.mask is not None and self.mask.level != "token")


class AdvantageSettings(_Settings):
    """How scores turn into advantages. A task may say otherwise for itself in `tasks[].advantage`."""

    name: AdvantageName = Field(
        default="grpo", description="advantage estimator: against the group (grpo, rloo), the task (reinforce), or a value head (gae)"
    )
    divide_by_std: bool = Field(default=True, description="grpo: whether a group's advantages are divided by the standard deviation of its scores")
    baseline: Baseline = Field(default="batch", description="reinforce: the mean of the task's scores in the batch, or a running one of those before")
    baseline_decay: float = Field(default=0.9, ge=0, lt=1, description="reinforce: what a step leaves of the running baseline")
    discount: float = Field(default=1.0, gt=0, le=1, description="gae: discount per token")
    trace: float = Field(default=0.95, ge=0, le=1, description="gae: lambda, from one-step differences (0) to whole returns (1)")
    normalise: Normalisation = Field(
        default="none", description="task: subtract the mean and divide by the standard deviation over the task's trajectories in the batch"
    )
    weight: float = Field(default=1.0, gt=0, le=1e6, description="factor on the advantages")

    def of(self, task: str) -> AdvantageSettings:
        """What holds for `task`."""
        return self

    @property
    def needs_spread(self) -> bool:
        """Whether a group whose members all scored the same teaches nothing."""
        return self.name in ("grpo", "rloo")

    @property
    def needs_values(self) -> bool:
        """Whether a value head has to learn beside the policy."""
        return self.name == "gae"


class AdvantageOverride(_Settings):
    """What a task wants other than `training.advantage` says; a field that is not given stays as it is there."""

    name: AdvantageName | None = Field(default=None, description="advantage estimator of this task")
    divide_by_std: bool | None = Field(default=None, description="grpo: whether to divide by the standard deviation of the group's scores")
    baseline: Baseline | None = Field(default=None, description="reinforce: what this task's scores are compared with")
    baseline_decay: float | None = Field(default=None, ge=0, lt=1, description="reinforce: what a step leaves of the running baseline")
    discount: float | None = Field(default=None, gt=0, le=1, description="gae: discount per token")
    trace: float | None = Field(default=None, ge=0, le=1, description="gae: lambda")
    normalise: Normalisation | None = Field(default=None, description="whether this task's advantages are brought to mean 0 and deviation 1")
    weight: float | None = Field(default=None, gt=0, le=1e6, description="factor on this task's advantages")

    def over(self, common: AdvantageSettings) -> AdvantageSettings:
        """`common` with what is given here in its place."""
        return AdvantageSettings.model_validate(
            {**common.model_dump(include=set(AdvantageSettings.model_fields)), **self.model_dump(exclude_none=True)}
        )


class AdvantagePlan(AdvantageSettings):
    """The settings of a whole mix: `tasks` holds those of the tasks that want other ones."""

    tasks: dict[str, AdvantageSettings] = Field(default_factory=dict, description="settings by task name")

    def of(self, task: str) -> AdvantageSettings:
        return self.tasks.get(task, self)

    @property
    def needs_values(self) -> bool:
        return any(s.name == "gae" for s in (self, *self.tasks.values()))


class BatchSettings(_Settings):
    """How a batch is cut up: into optimiser steps, and those into what fits in memory at once."""

    token_budget: int = Field(
        default=8192,
        gt=0,
        description="tokens of one forward and backward pass, padding included; a longer sequence runs alone, and under a loss over whole "
        "trajectories a longer trajectory",
    )
    packing: bool = Field(
        default=True, description="lay sequences one after the other instead of padding them to one length; families that can't are padded"
    )
    minibatches: int = Field(default=1, gt=0, description="optimiser steps that one batch is split into")
    denominator: Denominator = Field(default="token", description="what counts the same: every trained token, or every trajectory")


class LoraSettings(_Settings):
    """Low-rank adapters that are trained in the weights' place; needs the extra `rollart[lora]`."""

    rank: int = Field(default=16, gt=0, description="rank of each adapter")
    alpha: float = Field(default=32.0, gt=0, description="scale: what an adapter adds is multiplied by alpha / rank")
    targets: tuple[str, ...] | None = Field(default=None, description="names of the linear layers that get one; default: all but the output layer")
    publish: Literal["adapter", "merged"] = Field(
        default="adapter",
        description="what a version holds: the adapter alone, which engines add into the base that they have, or the whole weights with it added in",
    )


class ModelSettings(_Settings):
    """Precision and place of the policy in the trainer."""

    dtype: Literal["float32", "float64", "bfloat16"] = Field(
        default="float32", description="number format of weights and gradients, and of the optimiser's state unless there are masters"
    )
    masters: bool = Field(
        default=True, description="bfloat16: the optimiser keeps float32 weights and sums gradients in float32; else small steps round away"
    )
    recompute: bool = Field(
        default=False, description="activation checkpointing: keep one activation a layer and compute the rest again (a third more time, less memory)"
    )
    head_rows: int = Field(
        default=1024, gt=0, description="trained tokens whose logits over the vocabulary are in memory at once; more go through in chunks"
    )
    shard: bool = Field(
        default=False, description="spread weights, gradients and the optimiser's state over the training workers (FSDP2) instead of a copy on each"
    )
    lora: LoraSettings | None = Field(default=None, description="train adapters instead of the weights; none: the weights themselves")
    device: str = Field(default="cpu", pattern=DEVICE, description="torch device of the trainer, such as cpu or cuda:0")
    threads: int = Field(default=1, gt=0, description="torch threads of the training process")
    seed: int = Field(default=0, ge=0, description="seed of the initial weights where the model's folder holds none")

    @property
    def publishes_adapters(self) -> bool:
        """Whether versions hold adapters, and not whole weights."""
        return self.lora is not None and self.lora.publish == "adapter"

    @model_validator(mode="after")
    def _whole_adapters(self) -> ModelSettings:
        if self.shard and self.lora is not None:
            raise ValueError("shard: adapters are small and are not spread over workers; set shard to false, or leave lora out")
        return self


class AgreementSettings(_Settings):
    """How far the trainer's log-probabilities may be from the engine's at the same version: on tokens that the trainer's own version sampled
    and, where a batch has few of those, on a sample that the stored version which sampled it is asked again for."""

    mean: float | None = Field(default=None, gt=0, description="mean difference in nats over which a step alarms; default: 1e-3, in bfloat16 0.08")
    highest: float | None = Field(default=None, gt=0, description="largest difference of a token in nats that alarms; default: 0.05, in bfloat16 1.5")
    own: int = Field(default=256, ge=1, description="tokens of the trainer's own version under which a batch has too few of them")
    sample: int = Field(
        default=4, ge=0, description="trajectories that are then rescored with the version that sampled most of the stale tokens; 0: none"
    )
    every: int = Field(default=10, ge=1, description="training steps between two such samples, beginning with the second step")


class RankSettings(_Settings):
    """Training over several workers of the training class, one rank each; without effect where there is one."""

    timeout: float = Field(
        default=300.0,
        gt=0,
        description="seconds that a rank waits for one that is silent but not known to be dead; give it longer than a step takes",
    )
    replacement: float = Field(
        default=60.0, ge=0, description="seconds that training waits for a worker in the place of a lost one, before it goes on with fewer ranks"
    )


class DraftSettings(_Settings):
    """A draft head, which proposes tokens to the engine; it learns from what the policy samples and never changes the policy."""

    online: bool = Field(
        default=False, description="train the head beside the policy, on the hidden states of the policy's own passes, and publish its versions"
    )
    model: str | None = Field(default=None, min_length=1, description="head to start with: its folder or URL, or `URL@VERSION`; default: a fresh one")
    kept: int | None = Field(
        default=None, ge=2, description="tokens that a fresh head can propose, the most frequent that `rollart draft` reads; default: the vocabulary"
    )
    width: int | None = Field(default=None, ge=2, description="width of a fresh head; default: the policy's")
    heads: int | None = Field(default=None, ge=1, description="attention heads of a fresh head; default: the policy's")
    steps: int = Field(default=3, ge=1, le=15, description="tokens that it learns to draft one after the other, from its own features")
    optimiser: OptimiserSettings = Field(default=OptimiserSettings(lr=1e-3), description="its own: the policy's gradient is clipped without it")
    publish_every: int = Field(default=1, ge=1, description="training steps between two versions of the head")


class LearnerSettings(_Settings):
    """Everything that a learner is made from, but the model's folder."""

    model: ModelSettings = ModelSettings()
    optimiser: OptimiserSettings = OptimiserSettings()
    loss: LossSettings = LossSettings()
    advantage: AdvantageSettings = AdvantageSettings()
    batch: BatchSettings = BatchSettings()
    agreement: AgreementSettings = AgreementSettings()
    ranks: RankSettings = RankSettings()
    draft: DraftSettings = DraftSettings()

    @property
    def needs_reference(self) -> bool:
        """Whether the loss asks what the policy that training began with says."""
        return self.loss.kl > 0

    @property
    def needs_proximal(self) -> bool:
        """Whether the policy that a step starts from has to be asked before it changes: in the first minibatch it is the current one."""
        return self.batch.minibatches > 1
