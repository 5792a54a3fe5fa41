"""Where each tensor lies in a version's arrays, and whether that can be true; owns the check that nothing read is believed before."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from storage.format import layout
from storage.format.boxes import box_at, covers, whole
from storage.format.dtypes import ITEMSIZE

_ARRAY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
_ATTEMPT = re.compile(r"[0-9a-f]{32}")
_MOST_DIMENSIONS = 64
_LARGEST_CHUNK = 1 << 30


class IndexRefused(ValueError):
    """An index that contradicts itself or points outside of its arrays."""


@dataclass(frozen=True, slots=True)
class ChunkEntry:
    """One chunk as stored: its values' bytes, then Zarr's own crc32c of them.

    `bytes` counts both; `crc32c` is that checksum; `blocks` are those of each `block_bytes` of the values, as little-endian
    uint32 in base64, for reads of a part.
    """

    key: str
    bytes: int
    crc32c: int
    blocks: str = ""


@dataclass(frozen=True, slots=True)
class ArrayEntry:
    """A 1-D Zarr array of `length` values of torch type `dtype`, `chunk` values a chunk (the last one is padded to that)."""

    dtype: str
    length: int
    chunk: int
    block_bytes: int
    chunks: tuple[ChunkEntry, ...]

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk's values, without the checksum."""
        return self.chunk * ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class DeltaEntry:
    """An array of the version that is stored as what changed since the base version's array of the same name.

    `dtype`, `length` and `chunk` are those of that array. Each chunk's values (without padding) are cut into pieces of `segment`
    bytes, the last one shorter; `sizes` are the bytes of each piece's encoded change, 0 where nothing changed, and `crc32c` the
    checksums of each piece's values once it is applied, both little-endian uint32 in base64, in order. The encoded changes
    stand back to back in the uint8 array `stream`, None if nothing changed at all.
    """

    dtype: str
    length: int
    chunk: int
    segment: int
    stream: str | None
    sizes: str = field(repr=False)
    crc32c: str = field(repr=False)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk's values."""
        return self.chunk * ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """A box of a tensor, from index `start` in each dimension, of `shape`: values of `array` from value `offset`, in row-major order."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    array: str
    offset: int


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor: `numel` values of `array` from value `offset`, in row-major order, unless it is another name for `alias_of`.

    One that several ranks wrote has `shards` instead, boxes that cover it without overlap, and array None. Empty tensors have
    neither. `array` names one of the version's arrays or deltas. `encoding` `raw` means that the values stand there themselves.
    """

    dtype: str
    shape: tuple[int, ...]
    array: str | None = None
    offset: int = 0
    numel: int = 0
    alias_of: str | None = None
    encoding: str = "raw"
    shards: tuple[ShardEntry, ...] = ()


@dataclass(frozen=True, slots=True)
class ObjectEntry:
    """Another object of the version (Zarr's metadata, a document) with its size and SHA-256."""

    key: str
    bytes: int
    sha256: str = field(repr=False)


def check_attempt(attempt: str) -> None:
    """IndexRefused unless `attempt` is the 32 hexadecimal digits that make it a part of a path."""
    if _ATTEMPT.fullmatch(attempt) is None:
        raise IndexRefused(f"attempt {attempt[:40]!r} isn't 32 hexadecimal digits")


def check_index(arrays: Mapping[str, ArrayEntry], deltas: Mapping[str, DeltaEntry], tensors: Mapping[str, TensorEntry]) -> None:
    """IndexRefused unless every chunk, tensor and alias is consistent, inside of its array, and no two tensors overlap.

    Since they don't overlap, what a reader allocates is bounded by what is stored. `deltas` have been checked already.
    """
    for name, array in arrays.items():
        check_array(name, array)
    places: dict[str, ArrayEntry | DeltaEntry] = {**arrays, **deltas}
    spans: dict[str, list[tuple[int, int, str]]] = {name: [] for name in places}
    for name, tensor in tensors.items():
        _check_tensor(name, tensor, places, tensors)
        for place, offset, count in places_of(tensor):
            spans[place].append((offset, offset + count, name))
    for taken in spans.values():
        taken.sort()
        for (_, end, one), (start, _, other) in itertools.pairwise(taken):
            if start < end:
                raise IndexRefused(f"tensors {one!r} and {other!r} overlap")


def places_of(tensor: TensorEntry) -> Iterator[tuple[str, int, int]]:
    """Array, first value and count of each run of values that a tensor calls its own."""
    if tensor.array is not None and tensor.alias_of is None:
        yield tensor.array, tensor.offset, tensor.numel
    for shard in tensor.shards:
        yield shard.array, shard.offset, math.prod(shard.shape)


def check_array_name(name: str) -> None:
    """IndexRefused unless an array's name can be a part of a path."""
    if _ARRAY_NAME.fullmatch(name) is None:
        raise IndexRefused(f"array name {name[:40]!r} isn't plain")


def check_array_sizes(name: str, dtype: str, length: int, chunk: int) -> None:
    """IndexRefused unless `length` values of `dtype` in chunks of `chunk` can be an array."""
    if dtype not in ITEMSIZE:
        raise IndexRefused(f"array {name!r} has unknown type {dtype[:40]!r}")
    if length < 1 or chunk < 1 or chunk * ITEMSIZE[dtype] > _LARGEST_CHUNK:
        raise IndexRefused(f"array {name!r} has impossible sizes: length {length}, chunk {chunk}")


def check_array(name: str, array: ArrayEntry) -> None:
    """IndexRefused unless an array's name, sizes and chunks can be true."""
    check_array_name(name)
    check_array_sizes(name, array.dtype, array.length, array.chunk)
    if array.block_bytes < 1:
        raise IndexRefused(f"array {name!r} can't have blocks of {array.block_bytes} bytes")
    if len(array.chunks) != -(-array.length // array.chunk):
        raise IndexRefused(f"array {name!r} lists {len(array.chunks)} chunks for {array.length} values of {array.chunk} each")
    for number, chunk in enumerate(array.chunks):
        if chunk.key != layout.chunk_key(name, number) or chunk.bytes != array.chunk_bytes + layout.CHECKSUM_BYTES:
            raise IndexRefused(f"chunk {number} of array {name!r} has a wrong key or size: {chunk.key[:60]!r}, {chunk.bytes} bytes")


def _check_tensor(name: str, tensor: TensorEntry, places: Mapping[str, ArrayEntry | DeltaEntry], tensors: Mapping[str, TensorEntry]) -> None:
    if tensor.dtype not in ITEMSIZE:
        raise IndexRefused(f"tensor {name!r} has unknown type {tensor.dtype[:40]!r}")
    if len(tensor.shape) > _MOST_DIMENSIONS or min(tensor.shape, default=0) < 0 or math.prod(tensor.shape) != tensor.numel or _too_wide(tensor):
        raise IndexRefused(f"tensor {name!r} can't have shape {tensor.shape[:_MOST_DIMENSIONS]} and {tensor.numel} values")
    if tensor.shards:
        _check_shards(name, tensor, places)
    elif tensor.alias_of is not None:
        target = tensors.get(tensor.alias_of)
        if target is None or target.alias_of is not None or (target.dtype, target.shape) != (tensor.dtype, tensor.shape):
            raise IndexRefused(f"tensor {name!r} can't be another name for {tensor.alias_of!r}")
    elif tensor.array is None:
        if tensor.numel:
            raise IndexRefused(f"tensor {name!r} has {tensor.numel} values and no array")
    else:
        _check_place(name, tensor.dtype, tensor.array, tensor.offset, tensor.numel, places)


def _too_wide(tensor: TensorEntry) -> bool:
    """Whether no tensor can have this shape, however empty it is: its strides wouldn't fit their 64 bits."""
    return math.prod(max(size, 1) for size in tensor.shape) >= 1 << 63


def _check_shards(name: str, tensor: TensorEntry, places: Mapping[str, ArrayEntry | DeltaEntry]) -> None:
    if tensor.array is not None or tensor.alias_of is not None:
        raise IndexRefused(f"tensor {name!r} has shards and is said to be elsewhere too")
    boxes = []
    for shard in tensor.shards:
        if not len(shard.start) == len(shard.shape) == len(tensor.shape) or min(shard.start, default=0) < 0 or min(shard.shape, default=1) < 1:
            raise IndexRefused(f"a shard of tensor {name!r} has impossible sizes")
        _check_place(name, tensor.dtype, shard.array, shard.offset, math.prod(shard.shape), places)
        boxes.append(box_at(shard.start, shard.shape))
    if not covers(whole(tensor.shape), boxes):
        raise IndexRefused(f"tensor {name!r} isn't made up exactly once by its {len(boxes)} shards")


def _check_place(name: str, dtype: str, array: str, offset: int, count: int, places: Mapping[str, ArrayEntry | DeltaEntry]) -> None:
    place = places.get(array)
    if place is None or place.dtype != dtype:
        raise IndexRefused(f"tensor {name!r} of {dtype} is said to be in array {array[:60]!r}, which can't hold it")
    if offset < 0 or count < 1 or offset + count > place.length:
        raise IndexRefused(f"tensor {name!r} reaches outside of array {array!r}")
