"""Which tensors have values in a chunk; owns that arithmetic for whole tensors, shards and changes, reads nothing."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator

import numpy as np

from storage.format.commit import Commit
from storage.format.dtypes import ITEMSIZE
from storage.format.index import DeltaEntry


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
    owners = {
        name for name, holder, start, end in _extents(commit) for other, first, last in spans if holder == other and start < last and first < end
    }
    aliases = {name for name, tensor in commit.tensors.items() if tensor.alias_of in owners}
    return tuple(sorted(owners | aliases))


def _extents(commit: Commit) -> Iterator[tuple[str, str, int, int]]:
    for name, tensor in commit.tensors.items():
        if tensor.array is not None and tensor.alias_of is None:
            yield name, tensor.array, tensor.offset, tensor.offset + tensor.numel
        for shard in tensor.shards:
            yield name, shard.array, shard.offset, shard.offset + math.prod(shard.shape)


def _changed(delta: DeltaEntry, first: int, last: int) -> Iterator[tuple[int, int]]:
    """[start, end) of the values whose encoded changes have bytes in [first, last) of the stream."""
    ends = np.cumsum(np.frombuffer(base64.b64decode(delta.sizes), dtype="<u4").astype(np.int64))
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
