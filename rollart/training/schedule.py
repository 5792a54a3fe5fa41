"""The learning rate as a pure function of the optimiser step, so that a resumed run needs no scheduler's state."""

from __future__ import annotations

import math

from rollart.training.settings import OptimiserSettings

__all__ = ["learning_rate"]


def learning_rate(settings: OptimiserSettings, step: int) -> float:
    """The learning rate of optimiser step `step`, counted from 0: linear warm-up to `lr`, then constant, linear or cosine decay
    to `min_lr_share * lr` at `total_steps`. ValueError if it is to decay over a number of steps that nothing said."""
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    if settings.decay == "constant":
        return settings.lr
    if settings.total_steps is None:
        raise ValueError(f"optimiser.total_steps: decay {settings.decay} needs the number of steps; set it, or spread it with `over`")
    span = max(1, settings.total_steps - settings.warmup_steps)
    done = min(1.0, (step - settings.warmup_steps) / span)
    left = 1.0 - done if settings.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return settings.lr * (settings.min_lr_share + (1.0 - settings.min_lr_share) * left)
