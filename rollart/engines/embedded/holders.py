"""What a decoder computes with, in the form that computes fastest; owns how checkpoint tensors become that form, and is their only copy.

On a CPU, oneDNN reads matrices in an order of its own: at a few rows a pass, which is all that decoding has, that takes half the time of
reading them as they are stored. There a token embedding that is also the LM head is the one matrix held twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["Embedding", "Holder", "Norm", "Projection", "gathered", "packs"]

_PACKED = (torch.float32, torch.bfloat16)

_PACKED_FROM = 1 << 17
"""Numbers of a matrix from which on packing pays: a smaller one stays in the processor's cache, and oneDNN's call costs more than its arithmetic."""


def packs(device: torch.device, dtype: torch.dtype, numbers: int) -> bool:
    """Whether oneDNN keeps matrices of so many `numbers` of `dtype` in an order of its own here."""
    if device.type != "cpu" or dtype not in _PACKED or numbers < _PACKED_FROM or not torch.backends.mkldnn.is_available():
        return False
    return dtype != torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class Holder(Protocol):
    """Made of the checkpoint tensors `names`. Prepared ones are held at once, so that a swap between two steps takes no time."""

    names: tuple[str, ...]

    def prepare(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What is held when these tensors are served, under names of its own; changes nothing that is."""

    def hold(self, prepared: dict[str, Tensor]) -> None:
        """Takes its own out of `prepared`, and computes with it from now on."""


class Projection:
    """x [N, in] -> [N, out], where `weights` [out_i, in] stand one above the other; each has a bias of the same place in `biases`, or none has."""

    def __init__(self, weights: Iterable[str], biases: Iterable[str], packed: bool) -> None:
        self._weights, self._biases = tuple(weights), tuple(biases)
        self.names = (*self._weights, *self._biases)
        self._packed = packed
        self._weight, self._bias = torch.empty(0), None if not self._biases else torch.empty(0)

    def prepare(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The matrix, fused and in the order that it is read in, and the fused bias."""
        weight = _stacked([tensors[name] for name in self._weights])
        prepared = {f"{self._weights[0]}/fused": torch.ops.mkldnn._reorder_linear_weight(weight) if self._packed else weight}
        if self._biases:
            prepared[f"{self._biases[0]}/fused"] = _stacked([tensors[name] for name in self._biases])
        return prepared

    def hold(self, prepared: dict[str, Tensor]) -> None:
        """Computes with these from now on."""
        self._weight = prepared.pop(f"{self._weights[0]}/fused")
        self._bias = prepared.pop(f"{self._biases[0]}/fused") if self._biases else None

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
            return out
        return torch.nn.functional.linear(x, self._weight, self._bias)


class Norm:
    """RMSNorm over the last dimension; several weights are those of neighbouring heads, each `counts` times, and x is [N, heads, dim] then.

    With `offset` it is Gemma's: scaled by 1 + weight, all in fp32. Otherwise Llama's, which scales after rounding to x's type.
    """

    def __init__(self, names: Iterable[str], epsilon: float, offset: bool, counts: Iterable[int] = ()) -> None:
        self.names = tuple(names)
        self._epsilon = epsilon
        self._offset = offset
        self._counts = tuple(counts)
        self._weight = torch.empty(0)

    def prepare(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The scale, [dim] or [heads, dim]."""
        weights = [tensors[name] for name in self.names]
        weight = torch.cat([w.expand(n, -1) for w, n in zip(weights, self._counts, strict=True)]) if self._counts else weights[0]
        return {f"{self.names[0]}/scale": 1.0 + weight.float() if self._offset else weight}

    def hold(self, prepared: dict[str, Tensor]) -> None:
        """Computes with this from now on."""
        self._weight = prepared.pop(f"{self.names[0]}/scale")

    def __call__(self, x: Tensor) -> Tensor:
        dim = x.shape[-1:]
        if self._offset:
            return (torch.nn.functional.rms_norm(x.float(), dim, None, self._epsilon).mul_(self._weight)).to(x.dtype)
        return torch.nn.functional.rms_norm(x, dim, None, self._epsilon).mul_(self._weight)


class Embedding:
    """The token embedding, which stays the transformers module that it is, with what that does beside looking up."""

    def __init__(self, name: str, module: torch.nn.Embedding) -> None:
        self.names: tuple[str, ...] = (name,)
        self._module = module

    def prepare(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The table as it is."""
        return {self.names[0]: tensors[self.names[0]]}

    def hold(self, prepared: dict[str, Tensor]) -> None:
        """Looks up in this from now on."""
        self._module.weight.data = prepared.pop(self.names[0])

    def __call__(self, ids: Tensor) -> Tensor:
        found: Tensor = self._module(ids)
        return found


def gathered(holders: Iterable[Holder], tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """What all `holders` prepare of `tensors`, each let go of when nothing else is made of it: beyond the result, a few are held at a time."""
    users: dict[str, list[Holder]] = {}
    for holder in holders:
        for name in holder.names:
            users.setdefault(name, []).append(holder)
    waiting: dict[str, Tensor] = {}
    prepared: dict[str, Tensor] = {}
    for name, tensor in tensors:
        waiting[name] = tensor
        del tensor
        for holder in [h for h in users[name] if all(n in waiting for n in h.names)]:
            prepared |= holder.prepare(waiting)
            for used in holder.names:
                users[used].remove(holder)
        for done in [n for n in waiting if not users[n]]:
            del waiting[done]
    return prepared


def _stacked(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
