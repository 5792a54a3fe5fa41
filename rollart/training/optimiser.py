"""AdamW over a policy's parameters: schedule, clipping, skips and their counts; owns the moments, knows no loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rollart.training.errors import NonFiniteError, StateError
from rollart.training.gradients import clip
from rollart.training.schedule import learning_rate
from rollart.training.settings import OptimiserSettings
from rollart.training.state import fits, take

__all__ = ["Optimiser", "Update"]

_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Update:
    """What one optimiser step did: the gradient's L2 norm before clipping, the learning rate, and whether it was taken."""

    grad_norm: float
    lr: float
    taken: bool


class Optimiser:
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) on named parameters, with a learning rate that follows from `steps` alone.

    With `masters`, bfloat16 parameters are rounded copies of float32 ones that are kept here, and gradients are summed in float32
    (Micikevicius et al. 2018, Mixed Precision Training, arXiv 1710.03740): a step smaller than half a unit in a weight's
    last place would otherwise be lost.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], settings: OptimiserSettings, *, masters: bool = False) -> None:
        self.settings = settings
        self.parameters = dict(parameters)
        self.steps = 0
        self.skips_in_a_row = 0
        self._masters: dict[str, nn.Parameter] = {}
        if masters:
            narrow = {name: p for name, p in self.parameters.items() if p.dtype in (torch.bfloat16, torch.float16)}
            self._masters = {name: nn.Parameter(p.detach().float()) for name, p in narrow.items()}
        self._stepped: dict[str, nn.Parameter] = self.parameters | self._masters
        # Norms and biases are vectors; pulling them to 0 is no regularisation.
        groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
        for p in self._stepped.values():
            groups.setdefault((p.ndim < 2, not isinstance(p, DTensor)), []).append(p)  # torch steps whole and spread ones apart
        decays = [{"params": groups[kind], "weight_decay": 0.0 if kind[0] else settings.weight_decay} for kind in sorted(groups)]
        self._adam = torch.optim.AdamW(decays, lr=settings.lr, betas=settings.betas, fused=True)

    @property
    def stepped(self) -> list[nn.Parameter]:
        """What the steps are taken on, in a fixed order: the parameters or, of those that have one, the masters."""
        return list(self._stepped.values())

    def collect(self) -> None:
        """Adds the gradients of a backward pass to the masters', so that sums over passes do not round; without masters there is nothing to do."""
        for name, master in self._masters.items():
            gradient = self.parameters[name].grad
            if gradient is not None:
                master.grad = gradient.float() if master.grad is None else master.grad.add_(gradient)
                self.parameters[name].grad = None

    def discard(self) -> None:
        """Forgets the gradients that have been summed up."""
        self.collect()
        self._adam.zero_grad(set_to_none=True)

    def update(self, loss: Tensor) -> Update:
        """Takes one step along the gradients that have been summed up, and clears them.

        `loss` is the scalar that they belong to. If it or they are not finite, nothing changes but the count of skips;
        NonFiniteError if more than `max_skips` come in a row.
        """
        self.collect()
        lr = learning_rate(self.settings, self.steps)
        norm = clip(self._stepped.values(), self.settings.clip_norm)
        finite = bool(torch.isfinite(loss.detach()) & torch.isfinite(norm))
        if finite:
            for group in self._adam.param_groups:
                group["lr"] = lr
            self._adam.step()
            self._round()
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
        """Copies of the moments, as `FIELD/PARAMETER`, none before the first step, and of the masters, as `master/PARAMETER`."""
        found: dict[str, Tensor] = {}
        for name, parameter in self._stepped.items():
            for moment, value in self._adam.state.get(parameter, {}).items():
                found[f"{moment}/{name}"] = value.detach().clone()
        return found | {f"master/{name}": value.detach().clone() for name, value in self._masters.items()}

    def counts(self) -> dict[str, Any]:
        """What JSON can hold of the state."""
        return {"steps": self.steps, "skips_in_a_row": self.skips_in_a_row}

    def load(self, arrays: Mapping[str, Tensor], counts: Mapping[str, Any]) -> None:
        """Puts back what `arrays` and `counts` gave; StateError, before anything changes, if they belong to other parameters.

        The parameters themselves become the masters' rounded copies.
        """
        stepped = any(not key.startswith("master/") for key in arrays)
        expected = {f"{m}/{name}" for m in _MOMENTS for name in self._stepped} if stepped else set()
        expected |= {f"master/{name}" for name in self._masters}
        if set(arrays) != expected:
            raise StateError(f"the optimiser's state does not fit this model: {sorted(set(arrays) ^ expected)[:3]} are missing or too many")
        for key, value in arrays.items():
            moment, name = key.split("/", 1)
            if moment != "step" and not fits(self.parameters[name], value):
                raise StateError(f"{key} has shape {tuple(value.shape)}, the parameter {tuple(self.parameters[name].shape)}")
        self._adam.state.clear()
        with torch.no_grad():
            for name, master in self._masters.items():
                take(master, arrays[f"master/{name}"])
        self._round()
        if stepped:
            for name, p in self._stepped.items():
                self._adam.state[p] = {m: _own(arrays[f"{m}/{name}"], p, scalar=m == "step") for m in _MOMENTS}
        self.steps = int(counts["steps"])
        self.skips_in_a_row = int(counts["skips_in_a_row"])

    @torch.no_grad()
    def _round(self) -> None:
        for name, master in self._masters.items():
            self.parameters[name].copy_(master)


def _own(value: Tensor, parameter: nn.Parameter, *, scalar: bool) -> Tensor:
    if scalar:
        return value.detach().to(parameter.device, copy=True)
    held = torch.empty_like(parameter, dtype=value.dtype).detach()
    take(held, value)
    return held
