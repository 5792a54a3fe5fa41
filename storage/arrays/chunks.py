"""Writes the chunks of arrays and reads verified parts of them; a chunk that is absent or changed is Damaged, never zeros."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from storage.arrays.packing import ArrayValues
from storage.errors import Damaged, ObjectMissing
from storage.format import layout
from storage.format.checksums import Running, block_sums, combined
from storage.format.dtypes import ITEMSIZE
from storage.format.index import ArrayEntry, ChunkEntry
from storage.format.numbers import Numbers, numbers_of, spelled
from storage.objects.spans import Bytes, Content, Seen, cut, total
from storage.objects.store import ObjectStore
from storage.version import Version

_SUMMED_BYTES = 1 << 20
"""Whole blocks that are summed up and then written, before the next: they are read from memory once."""


class ArrayReader(Protocol):
    """Verified values of one array of one version, however they are stored. Safe to use from several threads."""

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk's values, padding of the last one included; a read stays within a chunk."""
        ...

    @property
    def block_bytes(self) -> int:
        """What is read and verified at least; reads that are no further apart are better made one."""
        ...

    def read(self, number: int, start: int, buffers: Sequence[Bytes], tensor: str) -> None:
        """Fills `buffers`, back to back, with the bytes of chunk `number`'s values from byte `start` on.

        Damaged, naming `tensor`, if anything differs from what the commit says; the buffers' content is then undefined.
        """
        ...

    def check_sizes(self, numbers: Iterable[int], tensor: str) -> None:
        """Damaged, naming `tensor`, unless the store has what these chunks are read from, in the sizes that the commit says: a
        reader takes memory for many chunks only after this, so that a false index can't ask for more than is stored."""
        ...


class Folder:
    """The folder of a version's attempt and, once asked for, the sizes of what is in it."""

    def __init__(self, store: ObjectStore, version: Version) -> None:
        self.store = store
        self.version = version

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Bytes of each object by its key."""
        return {info.path: info.bytes for info in self.store.infos()}


@dataclass(frozen=True, slots=True)
class ChunkReader:
    """An array whose chunks hold its values themselves, under `folder`. See ArrayReader."""

    folder: Folder
    array: ArrayEntry

    @property
    def chunk_bytes(self) -> int:
        return self.array.chunk_bytes

    @property
    def block_bytes(self) -> int:
        return self.array.block_bytes

    def read(self, number: int, start: int, buffers: Sequence[Bytes], tensor: str) -> None:
        # Whole blocks are read, against the blocks' checksums, and whole chunks against Zarr's. What was asked for goes straight
        # to its place and is verified there; what is around it, at most a block on either side, to memory that is dropped.
        entry = self.array.chunks[number]
        size, block = self.array.chunk_bytes, self.array.block_bytes
        end = start + total(buffers)
        first, last = start // block * block, min(-(-end // block) * block, size)
        if not entry.blocks:
            first, last = 0, size
        seal = np.empty(layout.CHECKSUM_BYTES if (first, last) == (0, size) else 0, dtype=np.uint8)
        spans = [np.empty(start - first, dtype=np.uint8), *buffers, np.empty(last - end, dtype=np.uint8)]
        while True:
            try:
                self._read_verified(entry, first, spans, seal, tensor)
            except Damaged:
                # A copy of the chunk, on another host, may have been read: then the store itself is asked before this is final.
                if not self.folder.store.doubt(entry.key):
                    raise
            else:
                return

    def _read_verified(self, entry: ChunkEntry, first: int, spans: Sequence[Bytes], seal: Bytes, tensor: str) -> None:
        if len(seal):
            running = Running(self.array.chunk_bytes)
            self._fetch(entry, [*spans, seal], first, tensor, running.add)
            if not running.value == int.from_bytes(seal.tobytes(), "little") == entry.crc32c:
                raise self._damaged(entry, "has changed bytes", tensor)
            return
        self._fetch(entry, spans, first, tensor)
        block, last = self.array.block_bytes, first + total(spans)
        kept = self._kept_sums(entry, tensor)[first // block :]
        for i, found in enumerate(block_sums(spans, block)):
            if found != kept[i]:
                at = first + i * block
                raise self._damaged(entry, f"has changed bytes in [{at}, {min(at + block, last)})", tensor)

    def check_sizes(self, numbers: Iterable[int], tensor: str) -> None:
        for number in numbers:
            entry = self.array.chunks[number]
            found = self.folder.sizes.get(entry.key)
            if found is None:
                raise self._damaged(entry, "is missing", tensor)
            if found != entry.bytes:
                raise self._damaged(entry, _other_size(entry), tensor)

    def _fetch(self, entry: ChunkEntry, buffers: Sequence[Bytes], start: int, tensor: str, seen: Seen | None = None) -> None:
        try:
            end = self.folder.store.read_into(entry.key, buffers, start, seen)
        except ObjectMissing as error:
            raise self._damaged(entry, "is missing", tensor) from error
        wanted = start + total(buffers)
        if end < wanted or (wanted == entry.bytes and end != entry.bytes):
            raise self._damaged(entry, _other_size(entry), tensor)

    def _kept_sums(self, entry: ChunkEntry, tensor: str) -> Numbers:
        try:
            sums = numbers_of(entry.blocks)
        except ValueError as error:
            raise self._damaged(entry, "has a broken list of block checksums", tensor) from error
        if len(sums) != -(-self.array.chunk_bytes // self.array.block_bytes):
            raise self._damaged(entry, "has too few or too many block checksums", tensor)
        return sums

    def _damaged(self, entry: ChunkEntry, reason: str, tensor: str) -> Damaged:
        return Damaged(what=f"chunk {entry.key}", reason=reason, url=self.folder.store.url, version=self.folder.version, tensor=tensor)


def write_chunk(store: ObjectStore, name: str, array: ArrayValues, number: int) -> ChunkEntry:
    """Puts chunk `number` of array `name` into the attempt's folder `store`: its values, then Zarr's crc32c of them."""
    size = array.chunk * ITEMSIZE[array.dtype]
    parts = list(array.chunk_parts(number))
    padding = size - total(parts)
    if padding:
        parts.append(np.zeros(padding, dtype=np.uint8))
    sums: list[int] = []

    def sealed() -> Iterator[Bytes]:
        sums.clear()
        for at in range(0, size, _SUMMED_BYTES):
            piece = cut(parts, at, at + _SUMMED_BYTES)
            sums.extend(block_sums(piece, layout.BLOCK_BYTES))
            yield from piece
        crc = combined(sums, layout.BLOCK_BYTES, size)
        yield np.frombuffer(crc.to_bytes(layout.CHECKSUM_BYTES, "little"), dtype=np.uint8)

    key = layout.chunk_key(name, number)
    store.write(key, Content(size + layout.CHECKSUM_BYTES, sealed))
    return ChunkEntry(key, size + layout.CHECKSUM_BYTES, combined(sums, layout.BLOCK_BYTES, size), spelled(sums))


def _other_size(entry: ChunkEntry) -> str:
    return f"has another size than the {entry.bytes} bytes that were written"
