"""What a training step reports; plain numbers that cross processes, so this module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

__all__ = ["DraftMetrics", "SkipReason", "StalenessMetrics", "StepMetrics", "SupervisedMetrics"]

SkipReason = Literal["no_tokens", "no_signal", "masked", "non_finite"]
"""Why an optimiser step left the parameters as they were: nothing was sampled; all advantages are 0; the loss's mask left out every token
that has one; loss or gradient were not finite."""


@dataclass(frozen=True, slots=True)
class StalenessMetrics:
    """Trained tokens of one staleness (in versions): `drift` is mean |log p proximal - log p behaviour| in nats, `weight` the mean of
    their probability ratio, untruncated, and `quantiles` its distribution (`0.01`: what a hundredth of the tokens is under);
    `effective_sample_share` and `shares` as in StepMetrics, over these tokens."""

    tokens: int
    drift: float
    weight: float
    quantiles: dict[str, float] = field(default_factory=dict)
    effective_sample_share: float = 1.0
    shares: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DraftMetrics:
    """What a draft head was found to do before it was stepped: its `loss`, and by drafted token, from the first, the mean cross entropy in nats
    against the policy's distribution and the mean chance of `acceptance`, given that the ones before were accepted, for the text as it was
    sampled. `grad_norm` is before clipping, `seconds` what it cost the training step."""

    loss: float
    entropies: tuple[float, ...]
    acceptance: tuple[float, ...]
    grad_norm: float
    seconds: float


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One training step on one batch: the step that starts from version `step`.

    Means run over the trained tokens. `ratio_*` are of the current to the proximal policy, `weight_*` of the proximal to the
    behaviour policy before truncation; `effective_sample_share` is (sum w)^2 / (n sum w^2) of those weights, 1 when on policy.
    `shares` says which part of the tokens the loss marked (`clipped`: the clip stopped their gradient; `truncated`: their weight was
    capped; `masked`: left out). `drift` and `drift_max` are mean and largest |log p proximal - log p behaviour| in nats on tokens that
    version `step` itself sampled, and on those of a sample that the stored version `rescored` (spelled `0-42`; None: there was no sample)
    had sampled and was asked again for, `drift_tokens` in all (None if there are none): rounding, and nothing else, as long as trainer and
    engine agree; `alarms` says where they do not, and `drift_alarm` counts that. `value_loss` is the value head's mean squared error over
    2, `explained` the share of the returns' variance that it explains (None without one). `padding_share` is the part of the forwarded
    positions that was padding. `skipped` holds a reason for each optimiser step that was not taken; `grad_norm`, before clipping, and
    `lr` are of the last that was. `draft` is the draft head's last step, where one is trained beside the policy.
    """

    step: int
    loss: float = 0.0
    grad_norm: float = 0.0
    lr: float = 0.0
    optimiser_steps: int = 0
    skipped: tuple[SkipReason, ...] = ()
    tokens: int = 0
    forwarded_tokens: int = 0
    padding_share: float = 0.0
    sequences: int = 0
    trajectories: int = 0
    micro_batches: int = 0
    advantage_mean: float = 0.0
    advantage_abs: float = 0.0
    ratio_mean: float = 1.0
    ratio_max: float = 1.0
    weight_mean: float = 1.0
    weight_max: float = 1.0
    effective_sample_share: float = 1.0
    shares: dict[str, float] = field(default_factory=dict)
    entropy: float = 0.0
    kl: float = 0.0
    value_loss: float | None = None
    explained: float | None = None
    drift: float | None = None
    drift_max: float | None = None
    drift_tokens: int = 0
    rescored: str | None = None
    drift_alarm: int = 0
    alarms: tuple[str, ...] = ()
    by_staleness: dict[int, StalenessMetrics] = field(default_factory=dict)
    draft: DraftMetrics | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class SupervisedMetrics:
    """One supervised step: `loss` is mean cross entropy and `entropy` that of the policy, in nats, both before the step."""

    loss: float
    entropy: float
    grad_norm: float
    lr: float
    tokens: int
    sequences: int
    padding_share: float
    skipped: tuple[SkipReason, ...]
    seconds: float
