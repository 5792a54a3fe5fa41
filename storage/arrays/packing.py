"""Lays tensors out in few large arrays and gives the arrays' values by chunk; owns the snapshot, writes nothing."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch

from storage.errors import UnsupportedTensor
from storage.format.boxes import boxes_of
from storage.format.dtypes import ITEMSIZE, TORCH_OF, name_of
from storage.format.index import DeltaEntry, TensorEntry
from storage.format.layout import CHUNK_BYTES
from storage.objects.spans import Bytes
from storage.version import Version


class ArrayValues(Protocol):
    """The values of one 1-D array: `length` of torch type `dtype`, in chunks of `chunk` values, the last one shorter."""

    @property
    def dtype(self) -> str: ...
    @property
    def length(self) -> int: ...
    @property
    def chunk(self) -> int: ...

    def chunk_parts(self, number: int) -> Sequence[Bytes]:
        """Buffers that back to back are a chunk's values, without padding. They may share memory with what the values came from,
        and are to be dropped before the next chunk's are asked for, since some may be temporary."""
        ...


@dataclass(frozen=True, slots=True)
class TensorValues:
    """The values of `tensors`, back to back; tensor i starts at value `starts[i]`. They stay the tensors' own: none is copied
    before its chunk is asked for, and then only what isn't contiguous CPU memory already."""

    dtype: str
    length: int
    chunk: int
    starts: tuple[int, ...]
    tensors: tuple[torch.Tensor, ...]

    def chunk_parts(self, number: int) -> list[Bytes]:
        start = number * self.chunk
        end = min(start + self.chunk, self.length)
        parts: list[Bytes] = []
        for i in range(bisect.bisect_right(self.starts, start) - 1, len(self.starts)):
            if self.starts[i] >= end:
                break
            offset, tensor = self.starts[i], self.tensors[i]
            parts.extend(flat_parts(tensor, max(start - offset, 0), min(end - offset, tensor.numel())))
        return parts

    def snapshot(self) -> TensorValues:
        """The same values in memory of their own."""
        # (numpy asks the kernel for huge pages, torch doesn't: fresh memory is then filled several times as fast.)
        memory = np.empty(self.length * ITEMSIZE[self.dtype], dtype=np.uint8)
        flat = torch.from_numpy(memory).view(TORCH_OF[self.dtype])
        for offset, tensor in zip(self.starts, self.tensors, strict=True):
            flat[offset : offset + tensor.numel()].view(tensor.shape).copy_(tensor)
        return replace(self, starts=(0,), tensors=(flat,))


@dataclass(frozen=True, slots=True)
class Packed:
    """What a version is to hold: the values of its arrays and where each tensor's lie. `deltas` are changes of the arrays of
    `base` (None: there are none); what encodes them is among `arrays`."""

    arrays: dict[str, ArrayValues]
    tensors: dict[str, TensorEntry]
    base: Version | None = None
    deltas: dict[str, DeltaEntry] = field(default_factory=dict)


def pack(state: Mapping[str, torch.Tensor], chunk_bytes: int = CHUNK_BYTES, *, copy: bool = True, suffix: str = "") -> Packed:
    """One array a torch type, named after it and `suffix`, with the tensors back to back in the order of `state`.

    With `copy`, the values are those of now; else they are the tensors' own, which then have to stay as they are until they are
    written. Chunks have ceil(length / k) values, so that the last one lacks fewer than k. Tensors that are the same view of the
    same storage are stored once. UnsupportedTensor names what can't be stored.
    """
    tensors: dict[str, TensorEntry] = {}
    first: dict[tuple[object, ...], str] = {}
    starts: dict[str, list[int]] = {}
    owned: dict[str, list[torch.Tensor]] = {}
    lengths: dict[str, int] = {}
    for name, tensor in state.items():
        dtype = _checked_dtype(name, tensor)
        shape, numel = tuple(tensor.shape), tensor.numel()
        if not numel:
            tensors[name] = TensorEntry(dtype, shape)
            continue
        owner = first.setdefault((tensor.device, tensor.data_ptr(), dtype, shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()), name)
        if owner != name:
            tensors[name] = TensorEntry(dtype, shape, numel=numel, alias_of=owner)
            continue
        offset = lengths.get(dtype, 0)
        tensors[name] = TensorEntry(dtype, shape, dtype + suffix, offset, numel)
        starts.setdefault(dtype, []).append(offset)
        owned.setdefault(dtype, []).append(tensor.detach())
        lengths[dtype] = offset + numel
    arrays: dict[str, ArrayValues] = {}
    for dtype, length in lengths.items():
        values = TensorValues(dtype, length, chunk_length(length, dtype, chunk_bytes), tuple(starts[dtype]), tuple(owned[dtype]))
        arrays[dtype + suffix] = values.snapshot() if copy else values
    return Packed(arrays, tensors)


def chunk_length(length: int, dtype: str, chunk_bytes: int = CHUNK_BYTES) -> int:
    """Values a chunk, for chunks of about `chunk_bytes`: at most that and as equal as can be."""
    return -(-length // -(-length * ITEMSIZE[dtype] // chunk_bytes))


def chunk_count(array: ArrayValues) -> int:
    return -(-array.length // array.chunk)


def byte_view(tensor: torch.Tensor) -> Bytes:
    """The memory of a contiguous CPU tensor as bytes, shared with it."""
    # (A contiguous tensor of one value or none may have any stride; only as_strided makes it 1.)
    found: Bytes = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()
    return found


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory holds its values in row-major order, where this process can address them."""
    dense = tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.is_conj() and not tensor.is_neg()
    return dense and tensor.is_contiguous()


def flat_parts(tensor: torch.Tensor, start: int, end: int) -> Iterator[Bytes]:
    """Row-major values [start, end) of any dense tensor: views of its own memory where that holds them so, else copies."""
    if is_plain(tensor):
        itemsize = tensor.dtype.itemsize
        yield byte_view(tensor)[start * itemsize : end * itemsize]
        return
    for box in boxes_of(tensor.shape, start, end):
        yield byte_view(tensor[box].cpu().resolve_conj().resolve_neg().contiguous())


def _checked_dtype(name: str, tensor: torch.Tensor) -> str:
    if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
        raise UnsupportedTensor(f"{name!r} of type {type(tensor).__name__} can't be stored: a state has tensors by name, nothing else")
    if any("\ud800" <= character <= "\udfff" for character in name):
        raise UnsupportedTensor(f"tensor {name!r} can't be stored: its name has lone surrogates, which UTF-8 can't spell")
    dtype = name_of(tensor.dtype)
    if TORCH_OF.get(dtype) is not tensor.dtype or tensor.layout is not torch.strided or tensor.is_meta:
        where = f"{dtype}, {tensor.layout}, on {tensor.device}"
        raise UnsupportedTensor(f"tensor {name!r} ({where}) can't be stored: only dense tensors with values, of {', '.join(TORCH_OF)}")
    return dtype
