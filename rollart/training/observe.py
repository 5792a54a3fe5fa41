"""Gathers what the tokens of a step looked like and turns it into the step's numbers; computes nothing that training uses."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rollart.training.losses.terms import LossInputs, LossTerms
from rollart.training.metrics import StalenessMetrics
from rollart.training.ranks import Ranks

__all__ = ["Observations"]


QUANTILES = (0.01, 0.1, 0.5, 0.9, 0.99)
"""Where the distribution of the behaviour weights is reported."""


@dataclass(slots=True)
class Observations:
    """Detached per-token tensors of the micro-batches of a step, in the order they ran."""

    columns: dict[str, list[Tensor]] = field(default_factory=dict)
    marks: dict[str, list[Tensor]] = field(default_factory=dict)

    def add(self, inputs: LossInputs, terms: LossTerms, staleness: Tensor, **extra: Tensor | None) -> None:
        """Keeps one micro-batch's tokens, all [N]; of `extra` what is not None: `entropy`, `kl`, and `value` with its `returns` where it is
        `valued`."""
        seen = {
            "ratio": (inputs.current - inputs.proximal).exp(), "gap": inputs.proximal - inputs.behaviour, "advantage": inputs.advantages,
            "staleness": staleness, **{name: value for name, value in extra.items() if value is not None},
        }  # fmt: skip
        for name, value in seen.items():
            self.columns.setdefault(name, []).append(value.detach())
        for name, mark in terms.marks.items():
            self.marks.setdefault(name, []).append(mark)

    def over(self, ranks: Ranks) -> Observations:
        """These and what the other ranks saw, by rank; the same on each of them."""
        if ranks.count == 1:
            return self
        mine = [{name: torch.cat(parts).cpu() for name, parts in held.items()} for held in (self.columns, self.marks)]
        found = Observations()
        for columns, marks in ranks.gather(mine):
            for name, value in columns.items():
                found.columns.setdefault(name, []).append(value)
            for name, value in marks.items():
                found.marks.setdefault(name, []).append(value)
        return found

    def summary(self) -> dict[str, Any]:
        """The fields of StepMetrics that are means over tokens; empty if there were none."""
        if not self.columns:
            return {}
        column = {name: torch.cat(parts) for name, parts in self.columns.items()}
        marks = {name: torch.cat(parts) for name, parts in self.marks.items()}
        gap, staleness = column["gap"], column["staleness"]
        weight = gap.exp()
        own = gap[staleness == 0].abs()
        return {
            "advantage_mean": float(column["advantage"].mean()),
            "advantage_abs": float(column["advantage"].abs().mean()),
            "ratio_mean": float(column["ratio"].mean()),
            "ratio_max": float(column["ratio"].max()),
            "weight_mean": float(weight.mean()),
            "weight_max": float(weight.max()),
            "effective_sample_share": effective_share(gap),
            "shares": {name: float(mark.double().mean()) for name, mark in marks.items()},
            "entropy": float(column["entropy"].mean()) if "entropy" in column else 0.0,
            "kl": float(column["kl"].mean()) if "kl" in column else 0.0,
            "drift": float(own.mean()) if len(own) else None,
            "drift_max": float(own.max()) if len(own) else None,
            "drift_tokens": len(own),
            "by_staleness": {age: _of_age(staleness == age, gap, marks) for age in staleness.unique().tolist()},
            **_of_values(column),
        }


def effective_share(gap: Tensor) -> float:
    """(sum w)^2 / (n sum w^2) of the weights w = exp(gap) [N]: Kong's effective sample size, over n. Kong 1992, A Note on Importance Sampling."""
    weight = (gap - gap.max()).exp()  # the largest is 1: squares of the weights themselves could overflow
    return float(weight.sum() ** 2 / (weight**2).sum() / len(weight))


def _of_age(chosen: Tensor, gap: Tensor, marks: dict[str, Tensor]) -> StalenessMetrics:
    mine = gap[chosen]
    weight = mine.exp()
    quantiles = _quantiles(weight)
    shares = {name: float(mark[chosen].double().mean()) for name, mark in marks.items()}
    return StalenessMetrics(len(mine), float(mine.abs().mean()), float(weight.mean()), quantiles, effective_share(mine), shares)


def _quantiles(values: Tensor) -> dict[str, float]:
    """The lowest value that at least that share of all is no higher than; by sorting, since torch.quantile refuses many values."""
    ordered = values.sort().values
    return {str(q): float(ordered[min(len(ordered) - 1, max(0, math.ceil(q * len(ordered)) - 1))]) for q in QUANTILES}


def _of_values(column: dict[str, Tensor]) -> dict[str, float]:
    if "value" not in column:
        return {}
    there = column["valued"]
    value, returns = column["value"][there], column["returns"][there]
    if not len(value):
        return {}
    error = ((value - returns) ** 2).mean()
    spread = returns.var(unbiased=False)
    explained = {"explained": float(1.0 - (value - returns).var(unbiased=False) / spread)} if float(spread) > 0 else {}
    return {"value_loss": 0.5 * float(error), **explained}
