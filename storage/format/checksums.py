"""crc32c of chunks and of the blocks of chunks; owns the arithmetic, which sees each byte once, and compares nothing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, reduce
from operator import xor

import google_crc32c
import numpy as np

from storage.objects.spans import Bytes

_Table = tuple[tuple[int, ...], ...]


def crc32c(buffers: Sequence[Bytes]) -> int:
    """The checksum of `buffers`, back to back."""
    found = 0
    for buffer in buffers:
        found = int(google_crc32c.extend(found, buffer))
    return found


def block_sums(buffers: Sequence[Bytes], block_bytes: int) -> list[int]:
    """The checksum of each `block_bytes` of `buffers`, back to back; the last block may be shorter."""
    sums: list[int] = []
    found, room = 0, block_bytes
    for buffer in buffers:
        at = 0
        while at < len(buffer):
            part = buffer[at : at + room]
            found = int(google_crc32c.extend(found, part)) if room < block_bytes else int(google_crc32c.value(part))
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
    nothing = int(google_crc32c.value(zeros))
    bits = [int(google_crc32c.extend(1 << bit, zeros)) ^ nothing for bit in range(32)]
    return tuple(tuple(reduce(xor, (bits[8 * byte + bit] for bit in range(8) if value >> bit & 1), 0) for value in range(256)) for byte in range(4))
