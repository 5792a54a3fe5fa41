"""crc32c of chunks and of the blocks of chunks; owns the arithmetic, which sees each byte once, and compares nothing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, reduce
from operator import xor

import numpy as np
from crc32c import crc32c as _extended

from storage.objects.spans import Bytes

_Table = tuple[tuple[int, ...], ...]


class Running:
    """The checksum of the first `count` bytes that `add` is given, in turn; while they are in the cache, it costs little."""

    def __init__(self, count: int) -> None:
        self.value = 0
        self._left = count

    def add(self, buffers: Sequence[Bytes]) -> None:
        """Takes in `buffers`, which follow what it had before."""
        for buffer in buffers:
            part = buffer[: self._left]
            self.value = _extended(part.data, self.value)
            self._left -= len(part)


def crc32c(buffers: Sequence[Bytes]) -> int:
    """The checksum of `buffers`, back to back."""
    found = 0
    for buffer in buffers:
        found = _extended(buffer.data, found)
    return found


def block_sums(buffers: Sequence[Bytes], block_bytes: int) -> list[int]:
    """The checksum of each `block_bytes` of `buffers`, back to back; the last block may be shorter."""
    sums: list[int] = []
    found, room = 0, block_bytes
    for buffer in buffers:
        at = 0
        while at < len(buffer):
            part = buffer[at : at + room]
            found = _extended(part.data, found if room < block_bytes else 0)
            at += len(part)
            room -= len(part)
            if not room:
                sums.append(found)
                found, room = 0, block_bytes
    if room < block_bytes:
        sums.append(found)
    return sums


def combined(sums: Sequence[int], block_bytes: int, count: int) -> int:
    """The checksum of `count` bytes whose blocks have the checksums `sums`.

    crc(A + B) = crc(A) shifted by B's length, xor crc(B); the shift is linear over GF(2), so four tables hold it (zlib's
    crc32_combine, with the length fixed).
    """
    whole = count // block_bytes
    found = _shifted_through(0, sums[:whole], _shift(block_bytes)) if whole else 0
    return _shifted_through(found, sums[whole:], _shift(count % block_bytes)) if count % block_bytes else found


def _shifted_through(found: int, sums: Sequence[int], tables: _Table) -> int:
    one, two, three, four = tables
    for value in sums:
        found = one[found & 255] ^ two[found >> 8 & 255] ^ three[found >> 16 & 255] ^ four[found >> 24] ^ value
    return found


@lru_cache(maxsize=32)
def _shift(count: int) -> _Table:
    """For each byte of a checksum, what it becomes after `count` more bytes."""
    zeros = np.zeros(count, dtype=np.uint8)
    nothing = _extended(zeros.data)
    bits = [_extended(zeros.data, 1 << bit) ^ nothing for bit in range(32)]
    return tuple(tuple(reduce(xor, (bits[8 * byte + bit] for bit in range(8) if value >> bit & 1), 0) for value in range(256)) for byte in range(4))
