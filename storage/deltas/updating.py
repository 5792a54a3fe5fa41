"""Brings tensors that hold an older version to a newer one by its changes alone; owns which bytes are changed, in what order, and where."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from storage.arrays.packing import byte_view, flat_parts, is_plain
from storage.arrays.selection import all_of
from storage.arrays.unpacking import check_fits
from storage.deltas.reader import Changes, apply_links
from storage.format.boxes import boxes_of, sizes
from storage.format.commit import Commit
from storage.format.dtypes import ITEMSIZE, TORCH_OF
from storage.objects.parallel import side_by_side
from storage.objects.spans import Bytes

Links = Mapping[str, Sequence[Changes]]
"""Array -> the changes to apply to it, in that order."""


def can_update(commit: Commit, links: Links, out: Mapping[str, torch.Tensor]) -> bool:
    """Whether `out` has all that the changes are applied to, and all of a version's values are in arrays that are cut alike in every link."""
    if not all(name in commit.tensors for name in out):
        return False
    held = {commit.tensors[name].alias_of or name for name in out}
    owned = {name: entry for name, entry in commit.tensors.items() if entry.alias_of is None and entry.numel}
    values = dict.fromkeys(links, 0)
    for name, entry in owned.items():
        if name not in held or entry.array not in values:
            return False
        values[entry.array] += entry.numel
    cuts = {array: {(c.entry.dtype, c.entry.length, c.entry.chunk, c.entry.segment) for c in changes} for array, changes in links.items()}
    return all(len(cuts[array]) == 1 and links[array][0].entry.length == count for array, count in values.items())


def update(commit: Commit, links: Links, out: Mapping[str, torch.Tensor], parallel: int) -> dict[str, torch.Tensor]:
    """Applies the changes, in place, to the tensors in `out`, which hold what the first link is a change of; all tensors by name.

    Every value is checked, whether it has changed or not: Damaged, after which the content of `out` is undefined, if `out` held
    something else. TensorMismatch. Takes memory for the changes of `parallel` chunks, and for a copy of those of them that are in
    tensors of other strides or on other devices.
    """
    for name, tensor in out.items():
        check_fits(name, tensor, commit.tensors[name], all_of(commit.tensors[name].shape))
    found: dict[str, torch.Tensor] = {}
    for name, tensor in out.items():
        found.setdefault(commit.tensors[name].alias_of or name, tensor)
    for name, entry in commit.tensors.items():
        if not entry.numel and entry.alias_of is None:
            found.setdefault(name, torch.empty(entry.shape, dtype=TORCH_OF[entry.dtype]))
    arrays = {array: _Array(commit, array, changes, found) for array, changes in links.items()}
    jobs = [(array, number) for array in arrays.values() for number in range(array.chunks)]
    side_by_side(lambda job: job[0].update(job[1]), jobs, parallel)
    given = {name: out.get(name, found[entry.alias_of or name]) for name, entry in commit.tensors.items()}
    for name, tensor in given.items():
        source = found[commit.tensors[name].alias_of or name]
        if tensor is not source:
            tensor.detach().copy_(source)
    return given


@dataclass(frozen=True, slots=True)
class _Piece:
    """Values [start, end) of a tensor, as bytes: its own memory, or else (`copied`) a copy."""

    tensor: torch.Tensor
    start: int
    end: int
    bytes: Bytes
    copied: bool


class _Array:
    """The tensors of one array, and the links that are applied to them."""

    def __init__(self, commit: Commit, array: str, links: Sequence[Changes], tensors: Mapping[str, torch.Tensor]) -> None:
        self._links = links
        self._entry = links[0].entry
        inside = sorted((entry.offset, name) for name, entry in commit.tensors.items() if entry.array == array and entry.alias_of is None)
        self._starts = [offset for offset, _ in inside]
        self._names = [name for _, name in inside]
        self._tensors = [tensors[name].detach() for name in self._names]
        self.chunks = -(-self._entry.length // self._entry.chunk)

    def update(self, number: int) -> None:
        """Applies all links to a chunk. No segment reaches into another chunk, so chunks can be done at once."""
        start = number * self._entry.chunk
        first = bisect.bisect_right(self._starts, start) - 1
        pieces = list(self._pieces(first, start, min(start + self._entry.chunk, self._entry.length)))
        apply_links(self._links, number, 0, [piece.bytes for piece in pieces], self._names[first])
        if any(link.any(number) for link in self._links):
            for piece in pieces:
                if piece.copied:
                    _put_back(piece)

    def _pieces(self, first: int, start: int, end: int) -> Iterator[_Piece]:
        itemsize = ITEMSIZE[self._entry.dtype]
        for offset, tensor in zip(self._starts[first:], self._tensors[first:], strict=True):
            if offset >= end:
                return
            low, high = max(start - offset, 0), min(end - offset, tensor.numel())
            if is_plain(tensor):
                yield _Piece(tensor, low, high, byte_view(tensor)[low * itemsize : high * itemsize], copied=False)
            else:
                yield _Piece(tensor, low, high, np.concatenate(list(flat_parts(tensor, low, high))), copied=True)


def _put_back(piece: _Piece) -> None:
    values = torch.from_numpy(piece.bytes).view(piece.tensor.dtype)
    at = 0
    for box in boxes_of(piece.tensor.shape, piece.start, piece.end):
        count = math.prod(sizes(box))
        piece.tensor[box].copy_(values[at : at + count].view(sizes(box)))
        at += count
