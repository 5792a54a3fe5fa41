"""AdamW over a policy's parameters: schedule, clipping, skips and their counts; owns the moments, knows no loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rollart.training.errors import NonFiniteError, StateError
from rollart.training.schedule import learning_rate
from rollart.training.settings import OptimiserSettings

__all__ = ["Optimiser", "Update"]

_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Update:
    """What one optimiser step did: the gradient's L2 norm before clipping, the learning rate, and whether it was taken."""

    grad_norm: float
    lr: float
    taken: bool


class Optimiser:
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) on named parameters, with a learning rate that follows from `steps` alone."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], settings: OptimiserSettings) -> None:
        self.settings = settings
        self.parameters = dict(parameters)
        self.steps = 0
        self.skips_in_a_row = 0
        # Norms and biases are vectors; pulling them to 0 is no regularisation.
        matrices = [p for p in self.parameters.values() if p.ndim >= 2]
        vectors = [p for p in self.parameters.values() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self._adam = torch.optim.AdamW([g for g in groups if g["params"]], lr=settings.lr, betas=settings.betas, fused=True)

    def update(self, loss: Tensor) -> Update:
        """Takes one step along the gradients that have been summed up, and clears them.

        `loss` is the scalar that they belong to. If it or they are not finite, nothing changes but the count of skips;
        NonFiniteError if more than `max_skips` come in a row.
        """
        lr = learning_rate(self.settings, self.steps)
        norm = nn.utils.clip_grad_norm_(self.parameters.values(), self.settings.clip_norm, foreach=True)
        finite = bool(torch.isfinite(loss.detach()) & torch.isfinite(norm))
        if finite:
            for group in self._adam.param_groups:
                group["lr"] = lr
            self._adam.step()
            self.steps += 1
        self._adam.zero_grad(set_to_none=True)
        self.skips_in_a_row = 0 if finite else self.skips_in_a_row + 1
        if self.skips_in_a_row > self.settings.max_skips:
            raise NonFiniteError(
                f"{self.skips_in_a_row} optimiser steps in a row had a loss ({float(loss)}) or a gradient norm ({float(norm)}) that is not "
                "finite; lower optimiser.lr, or look at the log-probabilities of the samples"
            )
        return Update(float(norm), lr, finite)

    def arrays(self) -> dict[str, Tensor]:
        """Copies of the moments, as `FIELD/PARAMETER`; empty before the first step."""
        found: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            for moment, value in self._adam.state.get(parameter, {}).items():
                found[f"{moment}/{name}"] = value.detach().clone()
        return found

    def counts(self) -> dict[str, Any]:
        """What JSON can hold of the state."""
        return {"steps": self.steps, "skips_in_a_row": self.skips_in_a_row}

    def load(self, arrays: Mapping[str, Tensor], counts: Mapping[str, Any]) -> None:
        """Puts back what `arrays` and `counts` gave; StateError, before anything changes, if they belong to other parameters."""
        expected = {f"{m}/{name}" for m in _MOMENTS for name in self.parameters} if arrays else set()
        if set(arrays) != expected:
            raise StateError(f"the optimiser's state does not fit this model: {sorted(set(arrays) ^ expected)[:3]} are missing or too many")
        for key, value in arrays.items():
            moment, name = key.split("/", 1)
            if moment != "step" and value.shape != self.parameters[name].shape:
                raise StateError(f"{key} has shape {tuple(value.shape)}, the parameter {tuple(self.parameters[name].shape)}")
        self._adam.state.clear()
        if arrays:
            for name, p in self.parameters.items():
                self._adam.state[p] = {m: _own(arrays[f"{m}/{name}"], p) for m in _MOMENTS}
        self.steps = int(counts["steps"])
        self.skips_in_a_row = int(counts["skips_in_a_row"])


def _own(value: Tensor, parameter: nn.Parameter) -> Tensor:
    return value.detach().to(parameter.device, copy=True)
