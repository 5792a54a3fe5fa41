"""Reads and writes the chunks of packed arrays, with checksums both ways; a chunk that is absent or changed is Damaged, never zeros."""

from __future__ import annotations

import base64
from dataclasses import dataclass

import google_crc32c
import numpy as np
import numpy.typing as npt

from storage import layout
from storage.errors import Damaged, ObjectMissing
from storage.index import ArrayEntry, ChunkEntry
from storage.objects import ObjectStore
from storage.packing import PackedArray
from storage.version import Version

Bytes = npt.NDArray[np.uint8]


def crc32c(data: Bytes) -> int:
    return int(google_crc32c.value(data))


def write_chunk(store: ObjectStore, name: str, array: PackedArray, number: int) -> ChunkEntry:
    """Puts chunk `number` of array `name` into the attempt's folder `store`: its values, then Zarr's crc32c of them."""
    stored = array.image[number]
    values = stored[: -layout.CHECKSUM_BYTES]
    total = crc32c(values)
    stored[-layout.CHECKSUM_BYTES :] = np.frombuffer(total.to_bytes(layout.CHECKSUM_BYTES, "little"), dtype=np.uint8)
    starts = range(0, len(values), layout.BLOCK_BYTES)
    blocks = np.fromiter((crc32c(values[at : at + layout.BLOCK_BYTES]) for at in starts), dtype="<u4", count=len(starts))
    key = layout.chunk_key(name, number)
    store.write(key, stored)
    return ChunkEntry(key, len(stored), total, base64.b64encode(blocks.tobytes()).decode())


@dataclass(frozen=True, slots=True)
class ChunkReader:
    """Verified bytes of the chunks of one array; `version` and the tensor a read is for go into its error."""

    store: ObjectStore
    version: Version
    array: ArrayEntry

    def read(self, number: int, start: int, end: int, buffer: Bytes, tensor: str) -> int:
        """Puts bytes [start, end) of a chunk's values, or more around them, into `buffer`; the byte of the chunk that came first.

        A part is read in whole blocks, against the blocks' checksums; all of a chunk against Zarr's. `buffer` has to have
        room for a chunk as stored. Damaged if anything differs from what the commit says.
        """
        entry = self.array.chunks[number]
        size = self.array.chunk_bytes
        block = self.array.block_bytes
        first = start // block * block
        last = min(-(-end // block) * block, size)
        if (first, last) == (0, size) or not entry.blocks:
            self._fetch(entry, buffer[: entry.bytes], 0, tensor)
            kept = int.from_bytes(buffer[size : entry.bytes].tobytes(), "little")
            if not crc32c(buffer[:size]) == kept == entry.crc32c:
                raise self._damaged(entry, "has changed bytes", tensor)
            return 0
        self._fetch(entry, buffer[: last - first], first, tensor)
        sums = self._block_sums(entry, tensor)
        for at in range(first, last, block):
            if crc32c(buffer[at - first : min(at + block, last) - first]) != sums[at // block]:
                raise self._damaged(entry, f"has changed bytes in [{at}, {min(at + block, last)})", tensor)
        return first

    def _fetch(self, entry: ChunkEntry, buffer: Bytes, start: int, tensor: str) -> None:
        try:
            end = self.store.read_into(entry.key, buffer, start)
        except ObjectMissing as error:
            raise self._damaged(entry, "is missing", tensor) from error
        whole = start + len(buffer) == entry.bytes
        if end < start + len(buffer) or (whole and end != entry.bytes):
            raise self._damaged(entry, f"has another size than the {entry.bytes} bytes that were written", tensor)

    def _block_sums(self, entry: ChunkEntry, tensor: str) -> npt.NDArray[np.uint32]:
        try:
            sums = np.frombuffer(base64.b64decode(entry.blocks, validate=True), dtype="<u4")
        except ValueError as error:
            raise self._damaged(entry, "has a broken list of block checksums", tensor) from error
        if len(sums) != -(-self.array.chunk_bytes // self.array.block_bytes):
            raise self._damaged(entry, "has too few or too many block checksums", tensor)
        return sums

    def _damaged(self, entry: ChunkEntry, reason: str, tensor: str) -> Damaged:
        return Damaged(what=f"chunk {entry.key}", reason=reason, url=self.store.url, version=self.version, tensor=tensor)
