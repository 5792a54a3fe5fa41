"""Whether what a commit says of its changes can be true; owns that check, which nothing is read before."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from storage.format.codec import largest
from storage.format.dtypes import ITEMSIZE
from storage.format.index import ArrayEntry, DeltaEntry, IndexRefused, check_array_name, check_array_sizes
from storage.format.numbers import Numbers, numbers_of

_LARGEST_SEGMENT = 64 << 20
"""A reader takes memory for a few segments on the index's word."""


def segments_per_chunk(delta: DeltaEntry) -> int:
    """Segments of every chunk but the last one, which has as many or fewer."""
    return -(-delta.chunk_bytes // delta.segment)


def check_deltas(deltas: Mapping[str, DeltaEntry], arrays: Mapping[str, ArrayEntry]) -> None:
    """IndexRefused unless every change is consistent with itself and with the array that its stream is."""
    for name, delta in deltas.items():
        check_array_name(name)
        if name in arrays:
            raise IndexRefused(f"array {name!r} is there both in full and as changes")
        _check_delta(name, delta, arrays)


def _check_delta(name: str, delta: DeltaEntry, arrays: Mapping[str, ArrayEntry]) -> None:
    check_array_sizes(name, delta.dtype, delta.length, delta.chunk)
    itemsize = ITEMSIZE[delta.dtype]
    if not 1 <= delta.segment <= _LARGEST_SEGMENT or delta.segment % itemsize:
        raise IndexRefused(f"changes of {name!r} can't come in segments of {delta.segment} bytes")
    sizes, sums = _numbers(name, delta.sizes), _numbers(name, delta.crc32c)
    full, rest = divmod(delta.length, delta.chunk)
    count = full * segments_per_chunk(delta) + -(-rest * itemsize // delta.segment)
    if not len(sizes) == len(sums) == count:
        raise IndexRefused(f"changes of {name!r} list {len(sizes)} sizes and {len(sums)} checksums for {count} segments")
    total = int(sizes.sum(dtype=np.uint64))
    if int(sizes.max()) > largest(delta.segment):
        raise IndexRefused(f"a change of {name!r} has {int(sizes.max())} bytes, more than any of a segment of {delta.segment}")
    if delta.stream is None:
        if total:
            raise IndexRefused(f"changes of {name!r} have {total} bytes and no array")
        return
    stream = arrays.get(delta.stream)
    if stream is None or stream.dtype != "uint8" or stream.length != total:
        raise IndexRefused(f"changes of {name!r} are said to be in array {delta.stream[:60]!r}, which doesn't hold their {total} bytes")


def _numbers(name: str, text: str) -> Numbers:
    try:
        return numbers_of(text)
    except ValueError as error:
        raise IndexRefused(f"a list of changes of {name!r} can't be read: {error}") from error
