"""Encodes what changed between two versions of the same values, and applies it; pure functions of bytes, which decide nothing else.

A change of one segment is one byte that says its kind, then streams. Values are taken as little-endian words of 1, 2, 4 or 8 bytes:
a float's bits as an integer move by a few units where the float moves by a few rounding steps, so the difference of the bits,
modulo 2^n and zigzagged (0, -1, 1, -2 -> 0, 1, 2, 3), is small, and its upper bytes are nearly always 0. Words go byte-plane by
byte-plane, each one compressed where that makes it smaller. Kinds:

- sparse: how many words differ (uint32); how many bytes their gaps take (uint32); the gaps, the number of equal words before each
  one that differs, as uint8, where 255 stands for 255 equal words and no end; then the planes of the differences;
- dense: the planes of all differences;
- whole: the planes of the new words themselves.

A stream is one byte, 0 stored or 1 Zstandard, its stored length (uint32), and that many bytes.
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt
from numcodecs import zstd

from storage.objects.spans import Bytes

_EMPTY, _SPARSE, _DENSE, _WHOLE = 0, 1, 2, 3
_STORED, _ZSTD = 0, 1
_LEVEL = 1
"""Higher Zstandard levels gain under 2 % on these streams, at a tenth of the speed."""

_ESCAPE = 255
_STREAM = struct.Struct("<BI")
_COUNTS = struct.Struct("<II")

_SPARSE_BELOW = 0.6
"""From this share of changed words on, a dense change has been the smaller one on weights, and a sparse one isn't tried."""

_DENSE_FROM = 0.25
"""Below this share of changed words, a sparse change has been smaller (or 2 % larger, where all changes lie side by side), and a
dense one isn't tried. Between the two both are made."""

_WHOLE_FROM = 0.5
"""A change that takes this part of the new bytes or less is kept without looking whether the values alone take less."""


class ChangeRefused(ValueError):
    """Bytes that are no change of a segment of this size."""


def largest(size: int) -> int:
    """The most bytes that the change of a segment of `size` bytes takes."""
    return 1 + 8 * _STREAM.size + size


def encode(base: Bytes, new: Bytes, word: int) -> bytes:
    """The change that makes `base` into `new` [same size, words of `word` bytes], empty if they are equal; the smallest kind."""
    before, after = _words(base, word), _words(new, word)
    at = np.flatnonzero(before != after)
    if not len(at):
        return b""
    share = len(at) / len(after)
    found = []
    if share < _SPARSE_BELOW:
        found.append(_sparse(before, after, at))
    if share >= _DENSE_FROM:
        found.append(bytes([_DENSE]) + _planes(_zigzag(after - before)))
    if min(map(len, found)) > _WHOLE_FROM * len(new):
        found.append(bytes([_WHOLE]) + _planes(after))
    return min(found, key=len)


def apply(base: Bytes, change: Bytes, word: int) -> None:
    """Makes `base`, in place, into what `change` was encoded for. ChangeRefused if it can't be a change of this many bytes;
    `base` is then as it was. Whether it is the right one, only a checksum of the result tells."""
    if not len(change):
        return
    values = _words(base, word)
    streams = _Streams(change[1:])
    kind = int(change[0])
    if kind == _SPARSE:
        at, differences = streams.sparse(len(values), word)
        values[at] += differences
    elif kind == _DENSE:
        differences = _unzigzag(streams.words(len(values), word))
        values += differences
    elif kind == _WHOLE:
        values[:] = streams.words(len(values), word)
    else:
        raise ChangeRefused(f"kind {kind} is unknown")


def _words(data: Bytes, word: int) -> npt.NDArray[np.unsignedinteger]:
    return data.view(f"<u{word}")


def _zigzag(differences: npt.NDArray[np.unsignedinteger]) -> npt.NDArray[np.unsignedinteger]:
    bits = 8 * differences.dtype.itemsize
    signs = np.negative(differences >> (bits - 1))  # 0, or all ones
    return (differences << 1) ^ signs


def _unzigzag(coded: npt.NDArray[np.unsignedinteger]) -> npt.NDArray[np.unsignedinteger]:
    return (coded >> 1) ^ np.negative(coded & 1)


def _sparse(before: npt.NDArray[np.unsignedinteger], after: npt.NDArray[np.unsignedinteger], at: npt.NDArray[np.intp]) -> bytes:
    gaps = np.diff(at, prepend=-1) - 1
    escapes = gaps // _ESCAPE
    coded = np.full(len(at) + int(escapes.sum()), _ESCAPE, dtype=np.uint8)
    coded[np.cumsum(escapes + 1) - 1] = gaps % _ESCAPE
    differences = _zigzag(after[at] - before[at])
    return bytes([_SPARSE]) + _COUNTS.pack(len(at), len(coded)) + _stream(coded) + _planes(differences)


def _planes(words: npt.NDArray[np.unsignedinteger]) -> bytes:
    planes = words.view(np.uint8).reshape(len(words), -1)
    return b"".join(_stream(np.ascontiguousarray(planes[:, byte])) for byte in range(planes.shape[1]))


def _stream(data: Bytes) -> bytes:
    packed = zstd.compress(data, _LEVEL)
    if len(packed) < len(data):
        return _STREAM.pack(_ZSTD, len(packed)) + packed
    return _STREAM.pack(_STORED, len(data)) + data.tobytes()


class _Streams:
    """Takes the streams of a change one after another; every size is checked before anything of that size is made."""

    def __init__(self, data: Bytes) -> None:
        self._rest = data

    def sparse(self, room: int, word: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.unsignedinteger]]:
        """Which of `room` words differ, ascending, and their differences."""
        count, length = _COUNTS.unpack(self._take(_COUNTS.size).tobytes())
        if not count <= length <= count + room // _ESCAPE or count > room:
            raise ChangeRefused(f"{count} changes with gaps of {length} bytes don't fit into {room} values")
        gaps = self._bytes(length)
        ends = gaps != _ESCAPE
        if np.count_nonzero(ends) != count or (length and not ends[-1]):
            raise ChangeRefused(f"its gaps don't lead to {count} changes")
        at = np.cumsum(gaps, dtype=np.int64)[ends] + np.arange(count)
        if count and at[-1] >= room:
            raise ChangeRefused(f"it changes value {at[-1]} of {room}")
        return at, _unzigzag(self.words(count, word))

    def words(self, count: int, word: int) -> npt.NDArray[np.unsignedinteger]:
        """`count` words from their planes, which have to be all that is left."""
        planes = np.empty((count, word), dtype=np.uint8)
        for byte in range(word):
            planes[:, byte] = self._bytes(count)
        if len(self._rest):
            raise ChangeRefused(f"{len(self._rest)} bytes follow its end")
        return _words(planes.reshape(-1), word)

    def _bytes(self, size: int) -> Bytes:
        how, length = _STREAM.unpack(self._take(_STREAM.size).tobytes())
        data = self._take(length)
        if how == _STORED and length == size:
            return data
        if how != _ZSTD or _content_size(data) != size:
            raise ChangeRefused(f"a stream isn't one of {size} bytes")
        found = np.zeros(size, dtype=np.uint8)
        try:
            zstd.decompress(data, found)  # never writes beyond the array it is given
        except (RuntimeError, ValueError) as error:
            raise ChangeRefused(f"a stream can't be decompressed: {error}") from error
        return found

    def _take(self, size: int) -> Bytes:
        if size > len(self._rest):
            raise ChangeRefused("it is cut short")
        taken, self._rest = self._rest[:size], self._rest[size:]
        return taken


def _content_size(frame: Bytes) -> int | None:
    """What a Zstandard frame's header says that it holds (RFC 8878, 3.1.1.1); None if it says nothing."""
    head = frame[:18].tobytes()
    if len(head) < 6 or head[:4] != b"\x28\xb5\x2f\xfd":
        return None
    flag, single, dictionary = head[4] >> 6, head[4] >> 5 & 1, head[4] & 3
    width = (single, 2, 4, 8)[flag]
    start = 5 + (1 - single) + (0, 1, 2, 4)[dictionary]
    field = head[start : start + width]
    if not width or len(field) < width:
        return None
    return int.from_bytes(field, "little") + (256 if width == 2 else 0)
