"""What part of a tensor is asked for, in Python's words for it; owns the reading of slices, and no bytes."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from storage.errors import SliceRefused
from storage.format.boxes import Box, whole

Cut = int | slice
Slices = Cut | tuple[Cut, ...]
"""As between the brackets of a tensor: an int, a slice with step 1, or a tuple of them, for the first dimensions."""


@dataclass(frozen=True)
class Selection:
    """The `box` of a tensor that is asked for, and the `shape` that it comes back in: without the dimensions cut by an int."""

    bounds: tuple[tuple[int, int], ...]
    shape: tuple[int, ...]

    @cached_property
    def box(self) -> Box:
        return tuple(slice(start, stop) for start, stop in self.bounds)


@lru_cache(maxsize=4096)
def all_of(shape: tuple[int, ...]) -> Selection:
    """All of a tensor. Kept, since the layers of a model are alike."""
    return Selection(tuple((cut.start, cut.stop) for cut in whole(shape)), shape)


def selected(name: str, shape: Sequence[int], slices: Slices) -> Selection:
    """What `slices` cut out of tensor `name` of `shape`. SliceRefused, naming the tensor, for anything that isn't plain."""
    cuts = slices if isinstance(slices, tuple) else (slices,)
    if len(cuts) > len(shape):
        raise SliceRefused(f"tensor {name!r} has {len(shape)} dimensions, and {len(cuts)} of them can't be cut")
    bounds: list[tuple[int, int]] = []
    kept: list[int] = []
    for dimension, size in enumerate(shape):
        cut = cuts[dimension] if dimension < len(cuts) else slice(None)
        if isinstance(cut, slice):
            start, stop = _range(name, dimension, size, cut)
            kept.append(stop - start)
        else:
            start = _index(name, dimension, size, cut)
            stop = start + 1
        bounds.append((start, stop))
    return Selection(tuple(bounds), tuple(kept))


def _range(name: str, dimension: int, size: int, cut: slice) -> tuple[int, int]:
    try:
        start, stop, step = cut.indices(size)
    except (TypeError, ValueError) as error:
        raise SliceRefused(f"dimension {dimension} of tensor {name!r} can't be cut by {cut}: {error}") from error
    if step != 1:
        raise SliceRefused(
            f"dimension {dimension} of tensor {name!r} can't be cut in steps of {step}: only step 1 is read alone; cut what was pulled"
        )
    return start, max(start, stop)


def _index(name: str, dimension: int, size: int, cut: int) -> int:
    try:
        index = operator.index(cut)
    except TypeError as error:
        raise SliceRefused(f"dimension {dimension} of tensor {name!r} can't be cut by {type(cut).__name__}: use ints and slices") from error
    if isinstance(cut, bool) or not -size <= index < size:
        raise SliceRefused(f"dimension {dimension} of tensor {name!r} has indices 0 to {size - 1}, and {cut} is none of them")
    return index % size
