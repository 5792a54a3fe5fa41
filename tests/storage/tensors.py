"""Tensors of any bits, and equality that sees every one of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from storage.arrays.packing import byte_view
from storage.format.dtypes import TORCH_OF


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in type, shape and every bit."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return np.array_equal(byte_view(plain(a)), byte_view(plain(b)))


def plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def of_bits(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """A tensor of random bits, NaNs and infinities included; for bool, of true and false."""
    generator = np.random.default_rng(seed)
    if dtype is torch.bool:
        return torch.from_numpy(generator.integers(0, 2, shape).astype(bool)).reshape(shape)
    size = int(np.prod(shape)) * dtype.itemsize
    if not size:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(generator.integers(0, 256, size, dtype=np.uint8)).view(dtype).reshape(shape)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Of any type, shape and strides: transposed, cut in steps, expanded, of no dimensions, of no values."""
    shape = draw(st.lists(st.integers(0, 7), max_size=4))
    tensor = of_bits(TORCH_OF[draw(st.sampled_from(sorted(TORCH_OF)))], *shape, seed=draw(st.integers(0, 9)))
    if tensor.ndim > 1 and draw(st.booleans()):
        tensor = tensor.transpose(0, -1)
    if tensor.ndim and draw(st.booleans()):
        tensor = tensor[:: draw(st.integers(1, 3))]
    if draw(st.integers(0, 4)) == 0:
        tensor = tensor.unsqueeze(0).expand(draw(st.integers(1, 3)), *tensor.shape)
    return tensor


@st.composite
def states(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    """State dicts with names of any text, and some tensors under two names."""
    state: dict[str, torch.Tensor] = {}
    for i in range(draw(st.integers(0, 6))):
        name = draw(st.text(min_size=1, max_size=8)) + str(i)
        if state and draw(st.integers(0, 4)) == 0:
            state[name] = draw(st.sampled_from(list(state.values())))
        else:
            state[name] = draw(tensors())
    return state


@st.composite
def cuts(draw: st.DrawFn, shape: tuple[int, ...]) -> Any:
    """What may stand between the brackets of a tensor of `shape`, without steps; seldom an index, since those need a value."""
    found: list[Any] = []
    for size in shape[: draw(st.integers(0, len(shape)))]:
        ends = st.none() | st.integers(-size - 2, size + 2)
        choices = [st.builds(slice, ends, ends)] * 2 + ([st.integers(-size, size - 1)] if size else [])
        found.append(draw(st.one_of(choices)))
    return found[0] if len(found) == 1 and draw(st.booleans()) else tuple(found)
