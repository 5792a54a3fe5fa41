"""Reads tensors out of a version's arrays; owns which bytes are fetched and where they go, trusts none of them unverified."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from storage.chunks import Bytes, ChunkReader
from storage.commit import Commit
from storage.dtypes import TORCH_OF, name_of
from storage.errors import TensorMismatch, UnknownTensor
from storage.index import TensorEntry
from storage.objects import ObjectStore
from storage.packing import byte_view, pieces
from storage.parallel import side_by_side

_WHOLE_FROM = 0.5
"""If at least this part of a chunk is wanted, one read of all of it is cheaper than several of parts."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """`count` bytes of a tensor: from byte `inside` of a chunk to byte `start` of the tensor."""

    name: str
    inside: int
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class _Read:
    """Bytes [start, end) of one chunk, and what of them is wanted."""

    array: str
    chunk: int
    start: int
    end: int
    wanted: tuple[_Piece, ...]


class Unpacker:
    """Reads from one version's folder by its commit; for one read at a time."""

    def __init__(self, folder: ObjectStore, commit: Commit) -> None:
        self._commit = commit
        self._parallel = folder.parallel
        self._readers = {name: ChunkReader(folder, commit.version, array) for name, array in commit.arrays.items()}
        self._buffers = threading.local()
        self._lock = threading.Lock()

    def read(self, names: Iterable[str] | None, out: Mapping[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
        """The named tensors (default: all) in the order asked for; those in `out` are read into the tensors given there.

        New tensors are contiguous and on the CPU; tensors that were tied come back as one. UnknownTensor for a name that the
        version lacks, TensorMismatch if an `out` has another shape or type, Damaged if stored bytes do. After an error
        the content of `out` is undefined.
        """
        index = self._commit.tensors
        out = dict(out or {})
        asked = list(index) if names is None else list(dict.fromkeys(names))
        for name in (*asked, *out):
            if name not in index:
                raise UnknownTensor(f"version {self._commit.version} has no tensor {name!r}")
        for name, tensor in out.items():
            _check_fits(name, tensor, index[name])
        owners: dict[str, torch.Tensor | None] = {}
        for name in asked:
            owner = index[name].alias_of or name
            owners[owner] = owners.get(owner) if owners.get(owner) is not None else out.get(name)
        found = self._read_owners(owners)
        result = {}
        for name in asked:
            source = found[index[name].alias_of or name]
            target = out.get(name)
            if target is not None and target is not source:
                target.detach().copy_(source)
            result[name] = source if target is None else target
        return result

    def _read_owners(self, owners: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
        targets: dict[str, torch.Tensor] = {}  # what the bytes are read into: the caller's tensor where that has plain memory
        for name, tensor in owners.items():
            if tensor is not None and tensor.is_contiguous() and tensor.device.type == "cpu":
                targets[name] = tensor
        side_by_side(lambda read: self._fetch(read, targets), list(self._plan(owners)), self._parallel)
        for name, tensor in owners.items():
            source = self._target(name, targets)  # an empty tensor has had no bytes to be made for
            if tensor is not None and tensor is not source:
                tensor.detach().copy_(source)
                targets[name] = tensor
        return targets

    def _plan(self, names: Iterable[str]) -> Iterator[_Read]:
        by_chunk: dict[tuple[str, int], list[_Piece]] = {}
        for name in names:
            entry = self._commit.tensors[name]
            if entry.array is not None:
                for chunk, inside, start, count in pieces(entry, self._commit.arrays[entry.array].chunk_bytes):
                    by_chunk.setdefault((entry.array, chunk), []).append(_Piece(name, inside, start, count))
        for (array, chunk), wanted in sorted(by_chunk.items()):
            size = self._commit.arrays[array].chunk_bytes
            if sum(piece.count for piece in wanted) >= _WHOLE_FROM * size:
                yield _Read(array, chunk, 0, size, tuple(wanted))
            else:
                yield from _runs(array, chunk, wanted, self._commit.arrays[array].block_bytes)

    def _fetch(self, read: _Read, targets: dict[str, torch.Tensor]) -> None:
        array = self._commit.arrays[read.array]
        buffer: Bytes | None = getattr(self._buffers, "bytes", None)
        room = array.chunks[read.chunk].bytes
        if buffer is None or len(buffer) < room:
            buffer = self._buffers.bytes = np.empty(room, dtype=np.uint8)
        first = self._readers[read.array].read(read.chunk, read.start, read.end, buffer, read.wanted[0].name)
        for piece in read.wanted:
            # Memory is taken only now that a verified chunk of the tensor is there, so a false index can't ask for more.
            target = self._target(piece.name, targets)
            at = piece.inside - first
            byte_view(target)[piece.start : piece.start + piece.count] = buffer[at : at + piece.count]

    def _target(self, name: str, targets: dict[str, torch.Tensor]) -> torch.Tensor:
        with self._lock:
            if name not in targets:
                entry = self._commit.tensors[name]
                targets[name] = torch.empty(entry.shape, dtype=TORCH_OF[entry.dtype])
            return targets[name]


def _runs(array: str, chunk: int, wanted: list[_Piece], gap: int) -> Iterator[_Read]:
    """Reads for pieces of a chunk: one for all that are at most `gap` bytes apart."""
    wanted = sorted(wanted, key=lambda piece: piece.inside)
    run = [wanted[0]]
    for piece in wanted[1:]:
        if piece.inside - (run[-1].inside + run[-1].count) > gap:
            yield _Read(array, chunk, run[0].inside, run[-1].inside + run[-1].count, tuple(run))
            run = []
        run.append(piece)
    yield _Read(array, chunk, run[0].inside, run[-1].inside + run[-1].count, tuple(run))


def _check_fits(name: str, tensor: torch.Tensor, entry: TensorEntry) -> None:
    if (name_of(tensor.dtype), tuple(tensor.shape)) != (entry.dtype, entry.shape):
        raise TensorMismatch(
            f"tensor {name!r} is {entry.dtype} {list(entry.shape)}, and can't be read into {name_of(tensor.dtype)} {list(tensor.shape)}"
        )
