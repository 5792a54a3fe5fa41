"""Watches how far the trainer is from the engine on the same tokens at the same version; a wider gap than rounding makes has a cause."""

from __future__ import annotations

from rollart.training.settings import AgreementSettings, ModelSettings

__all__ = ["alarms"]

_BOUNDS = {"float64": (1e-3, 0.05), "float32": (1e-3, 0.05), "bfloat16": (0.03, 1.5)}
"""Mean and largest difference in nats: float32 differs by some 1e-5, bfloat16 by up to 0.3 on single tokens of real models."""

_CAUSES = (
    "likely causes: the temperature or another transform of the logits differs; the engine serves other weights than its version says; "
    "the precision differs (engine.dtype, training.model.dtype); or the engine kept the KV cache of older weights (engine.kv: kept)"
)


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
