"""Gathers what the tokens of a step looked like and turns it into the step's numbers; computes nothing that training uses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rollart.training.losses.terms import LossInputs, LossTerms
from rollart.training.metrics import StalenessMetrics

__all__ = ["Observations"]


@dataclass(slots=True)
class Observations:
    """Detached per-token tensors of the micro-batches of a step, in the order they ran."""

    columns: dict[str, list[Tensor]] = field(default_factory=dict)
    marks: dict[str, list[Tensor]] = field(default_factory=dict)

    def add(self, inputs: LossInputs, terms: LossTerms, entropy: Tensor, kl: Tensor | None, staleness: Tensor) -> None:
        """Keeps one micro-batch's tokens, all [N]."""
        seen = {
            "ratio": (inputs.current - inputs.proximal).exp(), "gap": inputs.proximal - inputs.behaviour, "advantage": inputs.advantages,
            "entropy": entropy, "staleness": staleness,
        }  # fmt: skip
        if kl is not None:
            seen["kl"] = kl
        for name, value in seen.items():
            self.columns.setdefault(name, []).append(value.detach())
        for name, mark in terms.marks.items():
            self.marks.setdefault(name, []).append(mark)

    def summary(self) -> dict[str, Any]:
        """The fields of StepMetrics that are means over tokens; empty if there were none."""
        if not self.columns:
            return {}
        column = {name: torch.cat(parts) for name, parts in self.columns.items()}
        gap, staleness = column["gap"], column["staleness"]
        weight = gap.exp()
        own = gap[staleness == 0]
        by_staleness = {}
        for age in staleness.unique().tolist():
            chosen = staleness == age
            by_staleness[age] = StalenessMetrics(int(chosen.sum()), float(gap[chosen].abs().mean()), float(weight[chosen].mean()))
        return {
            "advantage_mean": float(column["advantage"].mean()),
            "advantage_abs": float(column["advantage"].abs().mean()),
            "ratio_mean": float(column["ratio"].mean()),
            "ratio_max": float(column["ratio"].max()),
            "weight_mean": float(weight.mean()),
            "weight_max": float(weight.max()),
            # Divided by the largest weight first: its square could overflow.
            "effective_sample_share": float((weight / weight.max()).sum() ** 2 / ((weight / weight.max()) ** 2).sum() / len(weight)),
            "shares": {name: float(torch.cat(parts).double().mean()) for name, parts in self.marks.items()},
            "entropy": float(column["entropy"].mean()),
            "kl": float(column["kl"].mean()) if "kl" in column else 0.0,
            "drift": float(own.abs().mean()) if len(own) else None,
            "by_staleness": by_staleness,
        }
