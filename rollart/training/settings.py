"""The trainer's part of the configuration; owns the fields, their units and their bounds, and reads nothing else."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

__all__ = [
    "AdvantageName", "AdvantageSettings", "BatchSettings", "Decay", "Denominator", "LearnerSettings", "LossName", "LossSettings",
    "ModelSettings", "OptimiserSettings",
]  # fmt: skip

AdvantageName = Literal["grpo"]
LossName = Literal["decoupled_ppo", "ppo_clip"]
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


class LossSettings(_Settings):
    """Which policy loss runs, and what is added to it."""

    name: LossName = Field(default="decoupled_ppo", description="policy loss")
    clip_low: float = Field(default=0.2, gt=0, lt=1, description="how far below 1 the probability ratio counts")
    clip_high: float = Field(default=0.28, gt=0, description="how far above 1 the probability ratio counts (above clip_low: DAPO's clip-higher)")
    truncate: float = Field(default=2.0, ge=1, description="cap of the behaviour weight, the probability ratio of proximal to behaviour policy")
    entropy: float = Field(default=0.0, ge=0, description="weight of the entropy bonus, per nat")
    kl: float = Field(default=0.0, ge=0, description="weight of the KL penalty to the weights that training began with, per nat")


class AdvantageSettings(_Settings):
    """How scores turn into advantages."""

    name: AdvantageName = Field(default="grpo", description="advantage estimator")
    divide_by_std: bool = Field(default=True, description="whether a group's advantages are divided by the standard deviation of its scores")


class BatchSettings(_Settings):
    """How a batch is cut up: into optimiser steps, and those into what fits in memory at once."""

    token_budget: int = Field(
        default=8192, gt=0, description="tokens of one forward and backward pass, padding included; a longer sequence runs alone"
    )
    minibatches: int = Field(default=1, gt=0, description="optimiser steps that one batch is split into")
    denominator: Denominator = Field(default="token", description="what counts the same: every trained token, or every trajectory")


class ModelSettings(_Settings):
    """Precision and place of the policy in the trainer."""

    dtype: Literal["float32", "float64", "bfloat16"] = Field(default="float32", description="number format of weights, gradients and optimiser state")
    device: str = Field(default="cpu", pattern=DEVICE, description="torch device of the trainer, such as cpu or cuda:0")
    threads: int = Field(default=1, gt=0, description="torch threads of the training process")
    seed: int = Field(default=0, ge=0, description="seed of the initial weights where the model's folder holds none")


class LearnerSettings(_Settings):
    """Everything that a learner is made from, but the model's folder."""

    model: ModelSettings = ModelSettings()
    optimiser: OptimiserSettings = OptimiserSettings()
    loss: LossSettings = LossSettings()
    advantage: AdvantageSettings = AdvantageSettings()
    batch: BatchSettings = BatchSettings()
