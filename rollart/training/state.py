"""A model's tensors by name, out and in; refuses what belongs to another model before anything changes.

A tensor that is spread over ranks (a DTensor) goes out as what this rank has of it, and comes in so, or whole.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rollart.training.errors import StateError
from storage.arrays.distributed_tensors import shard_of

__all__ = ["check_fits", "copies", "fill", "fits", "own_tensors", "take", "under"]


def under(prefix: str, arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The arrays whose names begin with `prefix`, by the rest of their names."""
    return {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}


def own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The model's own parameters and stored buffers (not copies), each once: tied ones under their first name."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in seen:
            seen.add(id(value))
            found[name] = value
    return found


def copies(model: nn.Module, prefix: str = "") -> dict[str, Tensor]:
    """Copies of them, their names behind `prefix`."""
    return {f"{prefix}{name}": value.detach().clone() for name, value in own_tensors(model).items()}


def check_fits(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """StateError unless `values` are tensors of this model, by names and shapes."""
    own = own_tensors(model)
    if set(own) != set(values):
        raise StateError(f"the weights are another model's: {sorted(set(own) ^ set(values))[:3]} are missing or too many")
    for name, value in values.items():
        if not fits(own[name], value):
            raise StateError(f"weight {name} has shape {tuple(value.shape)}, the model's has {tuple(own[name].shape)}")


def fill(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Takes `values` over; StateError, before anything changes, if they do not fit."""
    check_fits(model, values)
    own = own_tensors(model)
    with torch.no_grad():
        for name, value in values.items():
            take(own[name], value)


def fits(own: Tensor, value: Tensor) -> bool:
    """Whether `value` can be taken over into `own`, by its shape."""
    return value.shape == own.shape or (isinstance(own, DTensor) and not isinstance(value, DTensor) and value.shape == own.to_local().shape)


@torch.no_grad()
def take(own: Tensor, value: Tensor) -> None:
    """Copies `value` into `own`: all of it or, of a spread tensor, this rank's part."""
    if not isinstance(own, DTensor):
        own.copy_(value)
        return
    part = value.to_local() if isinstance(value, DTensor) else value
    held = own.to_local()
    if part.shape != held.shape:
        place = shard_of(own)
        for dimension, (start, size) in enumerate(zip(place.start, held.shape, strict=True)):
            part = part.narrow(dimension, start, size)
    held.copy_(part)
