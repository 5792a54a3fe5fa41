"""Makes a version's data out of what changed since another; owns when that is worth it, and reads and writes no store."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from storage.arrays.packing import ArrayValues, Packed, chunk_count, chunk_length
from storage.format import codec
from storage.format.checksums import crc32c
from storage.format.dtypes import ITEMSIZE, WORD
from storage.format.index import DeltaEntry
from storage.format.layout import SEGMENT_BYTES
from storage.format.numbers import spelled
from storage.objects.spans import Bytes, cut, joined, total
from storage.version import Version

WORTH = 0.75
"""Changes that take more than this part of the values are not kept: one who pulls them without the base at hand reads the base's
values too, and all who pull them spend the time to decode them."""

_STREAM_SUFFIX = "-delta"


@dataclass(frozen=True, slots=True)
class Base:
    """A version that exists, its values in memory, and how many versions from the full one on it needs, itself included."""

    version: Version
    packed: Packed
    depth: int


@dataclass(frozen=True, slots=True)
class _Stream:
    """Encoded changes, back to back, as an array of bytes."""

    length: int
    chunk: int
    starts: list[int]
    changes: list[bytes]
    dtype: str = "uint8"

    def chunk_parts(self, number: int) -> list[Bytes]:
        start = number * self.chunk
        end = min(start + self.chunk, self.length)
        first, last = bisect.bisect_right(self.starts, start) - 1, bisect.bisect_left(self.starts, end)
        parts = [np.frombuffer(change, dtype=np.uint8) for change in self.changes[first:last]]
        return cut(parts, start - self.starts[first], end - self.starts[first])


def as_changes(new: Packed, base: Base) -> Packed | None:
    """`new` as changes of `base`, whose values are of before and stay as they are; None if it has to be, or had better be, written in full.

    It has to be if it isn't laid out like the base: the same names, types, shapes and ties, and values in the same order.
    """
    old = base.packed
    if not new.arrays or new.tensors != old.tensors or _cuts(new) != _cuts(old):
        return None
    room = WORTH * sum(array.length * ITEMSIZE[array.dtype] for array in new.arrays.values())
    streams: dict[str, ArrayValues] = {}
    deltas: dict[str, DeltaEntry] = {}
    for name, values in new.arrays.items():
        sizes: list[int] = []
        sums: list[int] = []
        starts: list[int] = []
        changes: list[bytes] = []
        at = 0
        for change, crc in _segments(old.arrays[name], values):
            sizes.append(len(change))
            sums.append(crc)
            if change:
                starts.append(at)
                changes.append(change)
                at += len(change)
            if at > room:
                return None
        room -= at
        stream = name + _STREAM_SUFFIX if changes else None
        if stream is not None:
            streams[stream] = _Stream(at, chunk_length(at, "uint8"), starts, changes)
        deltas[name] = DeltaEntry(values.dtype, values.length, values.chunk, SEGMENT_BYTES, stream, spelled(sizes), spelled(sums))
    return Packed(streams, new.tensors, base.version, deltas)


def _cuts(packed: Packed) -> dict[str, tuple[str, int, int]]:
    return {name: (array.dtype, array.length, array.chunk) for name, array in packed.arrays.items()}


def _segments(old: ArrayValues, new: ArrayValues) -> Iterator[tuple[bytes, int]]:
    """Each segment's change, and the checksum of its new values."""
    word = WORD[new.dtype]
    for number in range(chunk_count(new)):
        before, after = list(old.chunk_parts(number)), list(new.chunk_parts(number))
        size = total(after)
        for at in range(0, size, SEGMENT_BYTES):
            values = joined(cut(after, at, at + SEGMENT_BYTES))
            yield codec.encode(joined(cut(before, at, at + SEGMENT_BYTES)), values, word), crc32c([values])
