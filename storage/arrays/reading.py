"""Plans which bytes of a version's arrays are read, and reads them to their places; owns no tensors' names or rules of asking."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from storage.arrays.chunks import ArrayReader
from storage.arrays.packing import byte_view, is_plain
from storage.format.boxes import Box, Runs, boxes_of, common, runs_of, sizes, within
from storage.objects.parallel import side_by_side
from storage.objects.spans import Bytes


@dataclass(frozen=True, slots=True)
class Source:
    """A box, not empty, of tensor `name` (or of a rank's shard of it), whose values of `shape` stand in `array` in row-major order,
    from value `offset` on."""

    name: str
    array: str
    offset: int
    shape: tuple[int, ...]
    box: Box
    itemsize: int


@dataclass(frozen=True, slots=True)
class Target:
    """The tensor, of any strides and on any device, that a source is read to; it has the shape of the source's box."""

    source: Source
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Piece:
    """Values [start, end) of the tensor that a target's source is of, in one chunk from byte `inside` on; `memory` is where they belong, None if they
    first have to be read elsewhere."""

    target: Target
    start: int
    end: int
    inside: int
    memory: Bytes | None

    @property
    def bytes(self) -> int:
        return (self.end - self.start) * self.target.source.itemsize


@dataclass(frozen=True, slots=True)
class _Read:
    """Pieces of one chunk, by place, that one request gets; what is between two of them is read too."""

    array: str
    chunk: int
    pieces: tuple[_Piece, ...]


def check_sizes(sources: Iterable[Source], readers: Mapping[str, ArrayReader]) -> None:
    """Damaged unless the store has all that these would be read from, in its size."""
    for source in sources:
        reader = readers[source.array]
        runs, length = _runs(source, reader), reader.chunk_bytes // source.itemsize
        starts = [source.offset + start for start in runs.starts]
        chunks = (range(start // length, (start + runs.length - 1) // length + 1) for start in starts)
        reader.check_sizes(dict.fromkeys(itertools.chain.from_iterable(chunks)), source.name)


def read_targets(targets: Iterable[Target], readers: Mapping[str, ArrayReader], parallel: int) -> None:
    """Reads every source to its tensor, `parallel` requests at once; what is close together in one. Damaged."""
    side_by_side(lambda read: _fetch(read, readers[read.array]), list(_plan(targets, readers)), parallel)


def _plan(targets: Iterable[Target], readers: Mapping[str, ArrayReader]) -> Iterator[_Read]:
    by_chunk: dict[tuple[str, int], list[_Piece]] = {}
    for target in targets:
        array = target.source.array
        for chunk, piece in _pieces(target, readers[array]):
            by_chunk.setdefault((array, chunk), []).append(piece)
    for (array, chunk), pieces in sorted(by_chunk.items(), key=lambda item: item[0]):
        left = sorted(pieces, key=lambda piece: piece.inside)
        while left:  # more than once only if tied tensors are cut differently, and the same values wanted twice
            run, left = _next_run(left, readers[array].block_bytes)
            yield _Read(array, chunk, tuple(run))


def _next_run(pieces: list[_Piece], gap: int) -> tuple[list[_Piece], list[_Piece]]:
    """Pieces, by place, that are close together and don't overlap; and the rest."""
    run = pieces[:1]
    left: list[_Piece] = []
    for piece in pieces[1:]:
        end = run[-1].inside + run[-1].bytes
        (run if end <= piece.inside <= end + gap else left).append(piece)
    return run, left


def _runs(source: Source, reader: ArrayReader) -> Runs:
    return runs_of(source.shape, source.box, reader.block_bytes // source.itemsize)


def _pieces(target: Target, reader: ArrayReader) -> Iterator[tuple[int, _Piece]]:
    offset, itemsize = target.source.offset, target.source.itemsize
    runs, length = _runs(target.source, reader), reader.chunk_bytes // itemsize
    memory = byte_view(target.tensor) if runs.exact and is_plain(target.tensor) else None
    for number, start in enumerate(runs.starts):
        at, end = start, start + runs.length
        while at < end:
            chunk, inside = divmod(offset + at, length)
            until = min(end, at + length - inside)
            place = None
            if memory is not None:
                shift = number * runs.length - start
                place = memory[(at + shift) * itemsize : (until + shift) * itemsize]
            yield chunk, _Piece(target, at, until, inside * itemsize, place)
            at = until


def _fetch(read: _Read, reader: ArrayReader) -> None:
    buffers: list[Bytes] = []
    start = at = read.pieces[0].inside
    aside: list[tuple[_Piece, Bytes]] = []
    for piece in read.pieces:
        if piece.inside > at:
            buffers.append(np.empty(piece.inside - at, dtype=np.uint8))
        memory = piece.memory
        if memory is None:
            memory = np.empty(piece.bytes, dtype=np.uint8)
            aside.append((piece, memory))
        buffers.append(memory)
        at = piece.inside + piece.bytes
    reader.read(read.chunk, start, buffers, read.pieces[0].target.source.name)
    for piece, memory in aside:
        _place(piece, torch.from_numpy(memory).view(piece.target.tensor.dtype))


def _place(piece: _Piece, values: torch.Tensor) -> None:
    """Copies what is wanted of a piece's values to the target's tensor, which may have any strides and be on any device."""
    source, tensor = piece.target.source, piece.target.tensor
    at = 0
    for box in boxes_of(source.shape, piece.start, piece.end):
        held = values[at : (at := at + math.prod(sizes(box)))].view(sizes(box))
        wanted = common(box, source.box)
        if wanted is not None:
            place = tensor[within(wanted, [cut.start for cut in source.box])]
            place.copy_(held[within(wanted, [cut.start for cut in box])])
