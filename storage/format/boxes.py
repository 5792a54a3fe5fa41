"""Boxes of row-major tensors and the flat ranges that they cover; owns this arithmetic, on shapes alone."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_MOST_CUT = 6

Box = tuple[slice, ...]
"""One slice(start, stop) a dimension, both set, within the shape."""


def whole(shape: Sequence[int]) -> Box:
    """The box of all of a tensor."""
    return tuple(slice(0, size) for size in shape)


def box_at(start: Sequence[int], shape: Sequence[int]) -> Box:
    """The box of `shape` from index `start` on."""
    return tuple(slice(at, at + size) for at, size in zip(start, shape, strict=True))


def sizes(box: Box) -> tuple[int, ...]:
    """The shape of what is in a box."""
    return tuple(cut.stop - cut.start for cut in box)


def within(box: Box, start: Sequence[int]) -> Box:
    """The same box, counted from index `start`."""
    return tuple(slice(cut.start - at, cut.stop - at) for cut, at in zip(box, start, strict=True))


def common(one: Box, other: Box) -> Box | None:
    """What is in both boxes; None if nothing is."""
    found = tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(one, other, strict=True))
    return None if any(cut.stop <= cut.start for cut in found) else found


def covers(region: Box, boxes: Sequence[Box]) -> bool:
    """Whether `boxes`, none of them empty, make up `region` exactly: without a gap, an overlap or anything outside.

    How often a point is covered is a function that its signed corners (its mixed derivative) determine; so the corners of all boxes
    have to cancel but for the region's. Linear in the number of boxes; more than six dimensions that are cut are refused.
    """
    cut = [dimension for dimension, full in enumerate(region) if any(box[dimension] != full for box in boxes)]
    if not boxes or len(cut) > _MOST_CUT:
        return False
    corners: Counter[tuple[int, ...]] = Counter()
    for sign, box in itertools.chain([(-1, region)], ((1, box) for box in boxes)):
        for ends in itertools.product((False, True), repeat=len(cut)):
            corner = tuple(box[dimension].stop if end else box[dimension].start for dimension, end in zip(cut, ends, strict=True))
            corners[corner] += -sign if sum(ends) % 2 else sign
    return not any(corners.values())


def boxes_of(shape: Sequence[int], start: int, end: int) -> Iterator[Box]:
    """Boxes that hold the values [start, end) of a row-major tensor, in order; at most two a dimension."""
    if end <= start:
        return
    if not shape:
        yield ()
        return
    row = math.prod(shape[1:])
    first, head = divmod(start, row)
    last, tail = divmod(end, row)
    if first == last:
        yield from ((slice(first, first + 1), *inner) for inner in boxes_of(shape[1:], head, tail))
        return
    if head:
        yield from ((slice(first, first + 1), *inner) for inner in boxes_of(shape[1:], head, row))
        first += 1
    if first < last:
        yield slice(first, last), *whole(shape[1:])
    if tail:
        yield from ((slice(last, last + 1), *inner) for inner in boxes_of(shape[1:], 0, tail))


@dataclass(frozen=True, slots=True)
class Runs:
    """Flat ranges of `length` values from each of `starts`; `exact` if they hold the box's values and none between."""

    starts: tuple[int, ...]
    length: int
    exact: bool


def runs_of(shape: Sequence[int], box: Box, gap: int) -> Runs:
    """Ranges of a row-major tensor that hold `box`, which isn't empty; those at most `gap` values apart are one."""
    if sizes(box) == tuple(shape):
        return Runs((0,), math.prod(shape), True)
    strides = [math.prod(shape[dimension + 1 :]) for dimension in range(len(shape))]
    length, exact = 1, True
    outer = len(shape)
    for dimension in reversed(range(len(shape))):
        count, between = box[dimension].stop - box[dimension].start, strides[dimension] - length
        if count > 1 and between > gap:
            break
        exact = exact and (between == 0 or count == 1)
        length += (count - 1) * strides[dimension]
        outer = dimension
    inside = sum(box[dimension].start * strides[dimension] for dimension in range(outer, len(shape)))
    indices = itertools.product(*(range(box[dimension].start, box[dimension].stop) for dimension in range(outer)))
    starts = tuple(inside + sum(i * stride for i, stride in zip(index, strides, strict=False)) for index in indices)
    return Runs(starts, length, exact)
