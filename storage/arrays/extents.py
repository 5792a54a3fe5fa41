"""Which tensors have values in a chunk; owns that arithmetic for whole tensors, shards and changes, reads nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from storage.format.commit import Commit
from storage.format.dtypes import ITEMSIZE
from storage.format.index import DeltaEntry, places_of
from storage.format.numbers import numbers_of


def tensors_in(commit: Commit, array: str, number: int) -> tuple[str, ...]:
    """Names, sorted, of the tensors that can't be read without chunk `number` of `array`, other names for them included.

    If the array holds encoded changes, those of the tensors that the chunk has changes of.
    """
    entry = commit.arrays[array]
    first, last = number * entry.chunk, min((number + 1) * entry.chunk, entry.length)
    spans = [(array, first, last)]
    for name, delta in commit.deltas.items():
        if delta.stream == array:
            spans += [(name, start, end) for start, end in _changed(delta, first, last)]
    return _holders(commit, spans)


def tensors_within(commit: Commit, array: str, first: int, last: int) -> tuple[str, ...]:
    """Names, sorted, of the tensors that have any of values [first, last) of `array`, other names for them included."""
    return _holders(commit, [(array, first, last)])


def _holders(commit: Commit, spans: Sequence[tuple[str, int, int]]) -> tuple[str, ...]:
    owners = {
        name
        for name, tensor in commit.tensors.items()
        for place, offset, count in places_of(tensor)
        for other, first, last in spans
        if place == other and offset < last and first < offset + count
    }
    aliases = {name for name, tensor in commit.tensors.items() if tensor.alias_of in owners}
    return tuple(sorted(owners | aliases))


def _changed(delta: DeltaEntry, first: int, last: int) -> Iterator[tuple[int, int]]:
    """[start, end) of the values whose encoded changes have bytes in [first, last) of the stream."""
    ends = np.cumsum(numbers_of(delta.sizes), dtype=np.int64)
    itemsize = ITEMSIZE[delta.dtype]
    at = 0
    for chunk in range(-(-delta.length // delta.chunk)):
        values = min(delta.chunk, delta.length - chunk * delta.chunk)
        for piece in range(-(-values * itemsize // delta.segment)):
            start, end = (int(ends[at - 1]) if at else 0), int(ends[at])
            at += 1
            if start < last and first < end:
                begin = chunk * delta.chunk + piece * delta.segment // itemsize
                yield begin, min(begin + -(-delta.segment // itemsize), chunk * delta.chunk + values)
