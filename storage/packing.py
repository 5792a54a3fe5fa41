"""Copies tensors into few large arrays, laid out in memory as their chunks are stored; owns the snapshot, writes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from storage.dtypes import ITEMSIZE, TORCH_OF, name_of
from storage.errors import UnsupportedTensor
from storage.index import TensorEntry
from storage.layout import CHECKSUM_BYTES, CHUNK_BYTES

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class PackedArray:
    """`length` values of torch type `dtype` in chunks of `chunk` values; `image` [chunks, chunk bytes + 4] leaves room for checksums."""

    dtype: str
    length: int
    chunk: int
    image: Bytes


@dataclass(frozen=True, slots=True)
class Packed:
    """A state's values, independent of the tensors that they came from, and where each tensor's lie."""

    arrays: dict[str, PackedArray]
    tensors: dict[str, TensorEntry]


def pack(state: Mapping[str, torch.Tensor], chunk_bytes: int = CHUNK_BYTES) -> Packed:
    """One array a torch type, named after it, with the tensors back to back in the order of `state`.

    Chunks have ceil(length / k) values, so that the last one is padded by fewer than k. Tensors that are the same view of
    the same storage are stored once. UnsupportedTensor names what can't be stored.
    """
    tensors: dict[str, TensorEntry] = {}
    first: dict[tuple[object, ...], str] = {}
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
        tensors[name] = TensorEntry(dtype, shape, dtype, offset, numel)
        lengths[dtype] = offset + numel
    arrays = {dtype: _empty_array(dtype, length, chunk_bytes) for dtype, length in lengths.items()}
    for name, entry in tensors.items():
        if entry.array is not None:
            _copy_in(arrays[entry.array], entry, _flat_bytes(state[name]))
    return Packed(arrays, tensors)


def pieces(entry: TensorEntry, chunk_bytes: int) -> Iterator[tuple[int, int, int, int]]:
    """(chunk, first byte in it, first byte in the tensor, count) for each chunk that a tensor has bytes in."""
    itemsize = ITEMSIZE[entry.dtype]
    start, end = entry.offset * itemsize, (entry.offset + entry.numel) * itemsize
    at = start
    while at < end:
        chunk, inside = divmod(at, chunk_bytes)
        count = min(chunk_bytes - inside, end - at)
        yield chunk, inside, at - start, count
        at += count


def byte_view(tensor: torch.Tensor) -> Bytes:
    """The memory of a contiguous CPU tensor as bytes, shared with it."""
    # (A contiguous tensor of one value or none may have any stride; only as_strided makes it 1.)
    found: Bytes = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()
    return found


def _checked_dtype(name: str, tensor: torch.Tensor) -> str:
    dtype = name_of(tensor.dtype)
    if TORCH_OF.get(dtype) is not tensor.dtype or tensor.layout is not torch.strided or tensor.is_meta:
        where = f"{dtype}, {tensor.layout}, on {tensor.device}"
        raise UnsupportedTensor(f"tensor {name!r} ({where}) can't be stored: only dense tensors with values, of {', '.join(TORCH_OF)}")
    return dtype


def _empty_array(dtype: str, length: int, chunk_bytes: int) -> PackedArray:
    itemsize = ITEMSIZE[dtype]
    count = -(-length * itemsize // chunk_bytes)
    chunk = -(-length // count)
    count = -(-length // chunk)
    image = np.empty((count, chunk * itemsize + CHECKSUM_BYTES), dtype=np.uint8)
    used = (length - (count - 1) * chunk) * itemsize
    image[-1, used:] = 0  # the padding
    return PackedArray(dtype, length, chunk, image)


def _copy_in(array: PackedArray, entry: TensorEntry, values: Bytes) -> None:
    for chunk, inside, start, count in pieces(entry, array.image.shape[1] - CHECKSUM_BYTES):
        array.image[chunk, inside : inside + count] = values[start : start + count]


def _flat_bytes(tensor: torch.Tensor) -> Bytes:
    """Row-major bytes of any dense tensor; the tensor's own memory where that is what it holds."""
    return byte_view(tensor.detach().cpu().resolve_conj().resolve_neg().contiguous())
