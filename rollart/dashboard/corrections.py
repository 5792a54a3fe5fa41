"""How far the trained tokens were from the policy that trained on them, by staleness, over a whole run; reads metrics lines, draws nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Agreement", "Correction", "agreement", "corrections"]


@dataclass(frozen=True, slots=True)
class Correction:
    """Trained tokens of one staleness: `weight` is the mean probability ratio of proximal to behaviour policy, `effective` the mean
    effective sample share of a step, `highest` the largest 0.99 quantile of a step's weights; `shares` as in StepMetrics. Means are over
    tokens."""

    tokens: int
    weight: float
    effective: float
    highest: float | None
    shares: Mapping[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Agreement:
    """Trainer against engine on tokens of the trainer's own version, in nats: the mean over steps, the largest difference of a token, and
    how many steps raised an alarm."""

    mean: float
    highest: float
    alarms: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def corrections(lines: Iterable[Mapping[str, Any]]) -> dict[int, Correction]:
    """By staleness, from the lines of training steps; numbers that were not finite are left out."""
    found: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for step in _trained(lines):
        for age, told in (step.get("by_staleness") or {}).items():
            if told.get("tokens"):
                found[int(age)].append(told)
    return {age: _over(steps) for age, steps in sorted(found.items())}


def agreement(lines: Iterable[Mapping[str, Any]]) -> Agreement | None:
    """None where no token of the trainer's own version was trained on."""
    steps = [s for s in _trained(lines) if s.get("drift") is not None]
    if not steps:
        return None
    highest = max((s["drift_max"] for s in steps if s.get("drift_max") is not None), default=0.0)
    return Agreement(sum(s["drift"] for s in steps) / len(steps), highest, sum(s.get("drift_alarm") or 0 for s in steps))


def _trained(lines: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [line["train"] for line in lines if line.get("kind") == "step" and line.get("train")]


def _over(steps: list[Mapping[str, Any]]) -> Correction:
    names = sorted({name for s in steps for name in s.get("shares") or {}})
    top = [q for s in steps if (q := (s.get("quantiles") or {}).get("0.99")) is not None]
    return Correction(
        sum(s["tokens"] for s in steps),
        _mean([(s["tokens"], s.get("weight")) for s in steps]),
        _mean([(s["tokens"], s.get("effective_sample_share")) for s in steps]),
        max(top, default=None),
        {name: _mean([(s["tokens"], (s.get("shares") or {}).get(name)) for s in steps]) for name in names},
    )


def _mean(pairs: list[tuple[int, float | None]]) -> float:
    known = [(tokens, value) for tokens, value in pairs if value is not None]
    total = sum(tokens for tokens, _ in known)
    return sum(tokens * value for tokens, value in known) / total if total else 0.0
