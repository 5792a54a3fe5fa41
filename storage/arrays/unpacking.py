"""Gives tensors of a version, whole or in part, as they were asked for; owns the names, shapes and ties, reads no bytes itself."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

import torch

from storage.arrays.chunks import ArrayReader
from storage.arrays.reading import Source, Target, check_sizes, read_targets
from storage.arrays.selection import Selection, Slices, all_of, selected
from storage.errors import DeviceRefused, TensorMismatch, UnknownTensor
from storage.format.boxes import Box, box_at, common, sizes, whole, within
from storage.format.commit import Commit
from storage.format.dtypes import ITEMSIZE, TORCH_OF, name_of
from storage.format.index import TensorEntry

NO_TENSORS: Mapping[str, torch.Tensor] = MappingProxyType({})
NO_SLICES: Mapping[str, Slices] = MappingProxyType({})

_HARMLESS_BYTES = 64 << 20
"""Up to this much memory is taken on the index's word; for more, the store is first seen to hold as much."""

_Asked = tuple[str, Selection]
"""A tensor that has values of its own, and what of it is wanted."""

_Sources = Mapping[_Asked, list[tuple[Source, Box]]]


class Unpacker:
    """Reads from one version by its commit and a reader for each of its arrays and deltas."""

    def __init__(self, commit: Commit, readers: Mapping[str, ArrayReader], parallel: int) -> None:
        self._commit = commit
        self._readers = readers
        self._parallel = parallel

    def read(
        self,
        names: Iterable[str] | None = None,
        slices: Mapping[str, Slices] = NO_SLICES,
        device: torch.device | str | None = None,
        out: Mapping[str, torch.Tensor] = NO_TENSORS,
    ) -> dict[str, torch.Tensor]:
        """The named tensors (default: all) in the order asked for, cut as `slices` say; those in `out` are read into the tensors
        given there.

        New tensors are contiguous and on `device` (default: CPU); tensors that were tied come back as one if they are cut alike.
        UnknownTensor for a name that the version lacks, SliceRefused, DeviceRefused, TensorMismatch if an `out` has another
        shape or type, Damaged if stored bytes do. After an error the content of `out` is undefined.
        """
        if device is not None:
            _check_device(device)
        index = self._commit.tensors
        asked = list(index) if names is None else list(dict.fromkeys(names))
        for name in (*asked, *slices, *out):
            if name not in index:
                raise UnknownTensor(f"version {self._commit.version} has no tensor {name!r}")
        cuts = {name: _selection(name, index[name], slices) for name in dict.fromkeys((*asked, *out))}
        for name, tensor in out.items():
            check_fits(name, tensor, index[name], cuts[name])
        wanted = {name: (index[name].alias_of or name, cuts[name]) for name in asked}
        found: dict[_Asked, torch.Tensor] = {}
        for name, key in wanted.items():
            if name in out:
                found.setdefault(key, out[name])
        sources = {key: list(self._sources(*key)) for key in dict.fromkeys(wanted.values())}
        self._make([key for key in sources if key not in found], found, sources, device)
        targets = (Target(source, _box_of(found[key].detach(), key[1], box)) for key in sources for source, box in sources[key])
        read_targets(targets, self._readers, self._parallel)
        return {name: _given(found[key], out.get(name)) for name, key in wanted.items()}

    def _make(self, new: list[_Asked], found: dict[_Asked, torch.Tensor], sources: _Sources, device: torch.device | str | None) -> None:
        index = self._commit.tensors
        size = sum(math.prod(selection.shape) * ITEMSIZE[index[name].dtype] for name, selection in new)
        if size > _HARMLESS_BYTES:
            check_sizes((source for key in new for source, _ in sources[key]), self._readers)
        for key in new:
            name, selection = key
            found[key] = torch.empty(selection.shape, dtype=TORCH_OF[index[name].dtype], device=device)

    def _sources(self, name: str, selection: Selection) -> Iterator[tuple[Source, Box]]:
        """What a selection is read from, and the box of the tensor that each source gives."""
        entry = self._commit.tensors[name]
        itemsize = ITEMSIZE[entry.dtype]
        if entry.array is not None:
            box = selection.box if selection.shape == entry.shape else common(whole(entry.shape), selection.box)
            if box is not None:
                yield Source(name, entry.array, entry.offset, entry.shape, box, itemsize), box
        for shard in entry.shards:
            box = common(box_at(shard.start, shard.shape), selection.box)
            if box is not None:
                yield Source(name, shard.array, shard.offset, shard.shape, within(box, shard.start), itemsize), box


def _selection(name: str, entry: TensorEntry, slices: Mapping[str, Slices]) -> Selection:
    return selected(name, entry.shape, slices[name]) if name in slices else all_of(entry.shape)


def _box_of(target: torch.Tensor, selection: Selection, box: Box) -> torch.Tensor:
    """The part of what a selection is read to that is a box of the whole tensor."""
    if box == selection.box:
        return target if len(box) == len(selection.shape) else target.view(sizes(box))
    return target.view(sizes(selection.box))[within(box, [start for start, _ in selection.bounds])]


def _given(source: torch.Tensor, target: torch.Tensor | None) -> torch.Tensor:
    """What is returned for a name: the caller's tensor if there is one, which gets the values unless they were read into it."""
    if target is None or target is source:
        return source
    target.detach().copy_(source)
    return target


def _check_device(device: torch.device | str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:  # the second is torch's word for a device that its build doesn't have
        said = str(error).partition("\n")[0]
        raise DeviceRefused(f"no tensor can be read to device {device!r} in this process: {said}") from error


def check_fits(name: str, tensor: torch.Tensor, entry: TensorEntry, selection: Selection) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TensorMismatch(f"tensor {name!r} can't be read into a {type(tensor).__name__}: give a tensor of its shape and type")
    if (name_of(tensor.dtype), tuple(tensor.shape)) != (entry.dtype, selection.shape) or tensor.is_meta:
        raise TensorMismatch(
            f"tensor {name!r} is {entry.dtype} {list(selection.shape)}, and can't be read into {name_of(tensor.dtype)} {list(tensor.shape)}"
            f" on {tensor.device}"
        )
    if not tensor.is_contiguous() and any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise TensorMismatch(f"tensor {name!r} can't be read into an expanded one, whose values share their memory: give a clone of it")
