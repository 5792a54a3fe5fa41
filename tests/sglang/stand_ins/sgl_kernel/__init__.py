"""Stands for SGLang's compiled kernels, which have no CPU build on package indexes: in plain torch what a dense text model calls there.

Nothing is registered under torch.ops.sgl_kernel, so SGLang takes this CPU for one without AMX, and its layers run their native torch code.
What is missing can be imported, and says so when it is called.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from rollart_stand_in import stand_in

__version__ = "0.4.10"


class Missing:
    """A kernel that nothing here should need."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self._name}.{name}")

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        raise NotImplementedError(f"the stand-in for sgl_kernel has no {self._name}")


__getattr__ = stand_in("sgl_kernel", Missing)


def copy_all_layer_kv_cache_cpu(pointers: torch.Tensor, strides: torch.Tensor, target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies rows of each layer's cache, all of which are read before one is written."""
    for base, stride in zip(pointers.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(base + stride * s, stride) for s in source.tolist()]
        for t, row in zip(target.tolist(), rows, strict=True):
            ctypes.memmove(base + stride * t, row, stride)


def assign_req_to_token_pool_cpu(
    requests: torch.Tensor, pool: torch.Tensor, start: torch.Tensor, end: torch.Tensor, locations: torch.Tensor, pool_length: int
) -> None:
    """Writes the cache locations of the positions [start, end) of each request, which follow each other in `locations`."""
    first = 0
    for request, s, e in zip(requests.tolist(), start.tolist(), end.tolist(), strict=True):
        pool[request, s:e] = locations[first : first + e - s].to(pool.dtype)
        first += e - s


def assign_extend_cache_locs_cpu(
    requests: torch.Tensor, pool: torch.Tensor, start: torch.Tensor, end: torch.Tensor, locations: torch.Tensor, pool_length: int
) -> None:
    """The reverse: reads them into `locations`."""
    first = 0
    for request, s, e in zip(requests.tolist(), start.tolist(), end.tolist(), strict=True):
        locations[first : first + e - s] = pool[request, s:e].to(locations.dtype)
        first += e - s
