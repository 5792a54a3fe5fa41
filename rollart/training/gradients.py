"""Gradients over ranks: their sum, and the clip by their norm, whether parameters are whole on every rank or spread over them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rollart.training.ranks import Ranks

__all__ = ["add_up", "clip"]


@torch.no_grad()
def add_up(parameters: Iterable[nn.Parameter], numbers: Sequence[float], ranks: Ranks) -> list[float]:
    """Sums the gradients of `parameters` and `numbers` over the ranks; the sums of the numbers.

    A parameter without gradient here counts as 0 if any rank has one; where none has, none gets one. Those of spread parameters
    were summed in the backward pass already.
    """
    if ranks.count == 1:
        return list(numbers)
    whole = [p for p in parameters if not isinstance(p, DTensor)]
    there = torch.tensor([*map(float, numbers), *(float(p.grad is not None) for p in whole)], dtype=torch.float64)
    ranks.add([there])
    trained = [p for p, found in zip(whole, there[len(numbers) :].tolist(), strict=True) if found]
    ranks.add([_gradient(p) for p in trained])
    return there[: len(numbers)].tolist()


def clip(parameters: Iterable[nn.Parameter], highest: float) -> Tensor:
    """Scales the gradients down to an L2 norm of `highest` if theirs, over all of them, is larger; theirs, a scalar."""
    held = [p for p in parameters if p.grad is not None]
    spread: list[Any] = [p for p in held if isinstance(p, DTensor)]
    if not spread:
        return nn.utils.clip_grad_norm_(held, highest, foreach=True)
    kinds: list[list[nn.Parameter]] = [[*spread], [p for p in held if not isinstance(p, DTensor)]]  # torch computes no norm over both at once
    norms = [_whole(nn.utils.get_total_norm([p.grad for p in kind if p.grad is not None], foreach=True)) for kind in kinds if kind]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    for kind in kinds:
        nn.utils.clip_grads_with_norm_(kind, highest, norm, foreach=True)
    return norm


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _whole(norm: Any) -> Tensor:
    found: Tensor = norm.full_tensor() if isinstance(norm, DTensor) else norm
    return found
