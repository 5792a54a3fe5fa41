"""Watches how far the trainer is from the engine on the same tokens at the same version; a wider gap than rounding makes has a cause."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollart.training.settings import AgreementSettings, LearnerSettings, ModelSettings
from storage.version import Version

__all__ = ["Rescored", "agreed", "alarms"]

_BOUNDS = {"float64": (1e-3, 0.05), "float32": (1e-3, 0.05), "bfloat16": (0.08, 1.5)}
"""Mean and largest difference in nats: float32 differs by some 1e-5, bfloat16 by up to 0.3 on single tokens of real models."""

_CAUSES = (
    "likely causes: the temperature or another transform of the logits differs; the engine serves other weights than its version says; "
    "the precision differs (engine.dtype, training.model.dtype); or the engine kept the KV cache of older weights (engine.kv: kept)"
)


@dataclass(frozen=True, slots=True)
class Rescored:
    """Of `tokens` that `version` sampled, mean and largest |log p stored with the token - log p of the stored weights| in nats."""

    version: Version
    tokens: int
    mean: float
    highest: float


def agreed(found: Mapping[str, Any], rescored: Rescored | None, settings: LearnerSettings) -> dict[str, Any]:
    """The fields of StepMetrics on how far engine and trainer are apart, of a step's own tokens in `found` and those that were `rescored`."""
    parts = [(found.get("drift_tokens", 0), found.get("drift"), found.get("drift_max"))]
    if rescored is not None:
        parts.append((rescored.tokens, rescored.mean, rescored.highest))
    there = [(tokens, mean, highest) for tokens, mean, highest in parts if tokens and mean is not None and highest is not None]
    tokens = sum(n for n, _, _ in there)
    drift = sum(n * mean for n, mean, _ in there) / tokens if tokens else None
    # (max would pass over what is not a number, depending on where it stands.)
    drift_max = (math.nan if any(math.isnan(h) for _, _, h in there) else max(h for _, _, h in there)) if tokens else None
    said = alarms(drift, drift_max, settings.agreement, settings.model)
    version = None if rescored is None else str(rescored.version)
    return {"drift": drift, "drift_max": drift_max, "drift_tokens": tokens, "rescored": version, "alarms": said, "drift_alarm": len(said)}


def alarms(drift: float | None, drift_max: float | None, settings: AgreementSettings, model: ModelSettings) -> tuple[str, ...]:
    """What to say of a step's mean and largest |log p trainer - log p engine|, in nats; nothing where both are within their bounds.

    A difference that is not a number is over every bound.
    """
    if drift is None or drift_max is None:
        return ()
    mean_bound, max_bound = _BOUNDS[model.dtype]
    mean_bound, max_bound = settings.mean or mean_bound, settings.highest or max_bound
    over = []
    if not drift <= mean_bound:
        over.append(f"{drift:.3g} nats on average (training.agreement.mean: {mean_bound:g})")
    if not drift_max <= max_bound:
        over.append(f"{drift_max:.3g} nats at most (training.agreement.highest: {max_bound:g})")
    if not over:
        return ()
    return (f"trainer and engine disagree on tokens of the same version by {' and '.join(over)}; {_CAUSES}",)
