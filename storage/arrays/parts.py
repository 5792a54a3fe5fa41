"""What one rank wrote of a version, and how the ranks' parts make one; owns their records and the check that they fit, writes no data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import pydantic

from storage.arrays.packing import Packed
from storage.errors import Damaged, ShardsRefused, UnsafePath
from storage.format.boxes import box_at, covers, whole
from storage.format.commit import FORMAT, sealed, unsealed
from storage.format.index import ArrayEntry, IndexRefused, ObjectEntry, ShardEntry, TensorEntry, check_array
from storage.version import Version


@dataclass(frozen=True, slots=True)
class Shard:
    """Where a rank's tensor lies in the whole one, of `shape`: from index `start` in each dimension."""

    start: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """A rank's box of a tensor: `shape` is the whole one's, `start` and `held` are the box's, `values` where its values are."""

    shape: tuple[int, ...]
    start: tuple[int, ...]
    held: tuple[int, ...]
    values: TensorEntry


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's part of an attempt at a version. `started`: when its first object was written, in seconds since 1970."""

    format: int
    version: Version
    attempt: str
    rank: int
    ranks: int
    started: float
    arrays: dict[str, ArrayEntry]
    tensors: dict[str, HeldTensor]
    objects: tuple[ObjectEntry, ...]


_ADAPTER = pydantic.TypeAdapter(Part)


def part_key(rank: int) -> str:
    """Where a rank's record is in the attempt's folder."""
    return f"parts/{rank:06d}.json"


def array_suffix(rank: int) -> str:
    """What the names of a rank's arrays end in."""
    return f"-{rank}"


def held_tensors(packed: Packed, shards: Mapping[str, Shard]) -> dict[str, HeldTensor]:
    """What a rank's tensors are of the whole ones; those that aren't in `shards` are whole. ShardsRefused, naming the tensor."""
    unknown = [name for name in shards if name not in packed.tensors]
    if unknown:
        raise ShardsRefused(f"tensor {unknown[0]!r} is said to be a shard and isn't among the tensors of this rank")
    found = {}
    for name, values in packed.tensors.items():
        shard = shards.get(name, Shard((0,) * len(values.shape), values.shape))
        start, shape = tuple(map(int, shard.start)), tuple(map(int, shard.shape))
        sizes = zip(start, values.shape, shape, strict=False)
        if not len(start) == len(shape) == len(values.shape) or any(at < 0 or at + size > most for at, size, most in sizes):
            raise ShardsRefused(f"a shard of shape {list(values.shape)} from {list(start)} isn't inside of tensor {name!r} of {list(shape)}")
        found[name] = HeldTensor(shape, start, values.shape, values)
    return found


def encode_part(part: Part) -> bytes:
    """The record as the bytes of its object."""
    return sealed(_ADAPTER.dump_json(part))


def decode_part(data: bytes, version: Version, attempt: str, rank: int, what: str, url: str) -> Part:
    """The record of a rank's part from its object `what`; Damaged if it contradicts itself, its place or its checksum."""
    unsealed(data, what, url)
    try:
        part = _ADAPTER.validate_json(data, strict=True)
        if (part.format, part.version, part.attempt, part.rank) != (FORMAT, version, attempt, rank):
            raise IndexRefused(f"it says that it is rank {part.rank}'s of attempt {part.attempt[:40]!r} at version {part.version}")
        for name, array in part.arrays.items():
            check_array(name, array)
            if not name.endswith(array_suffix(rank)):
                raise IndexRefused(f"array {name[:60]!r} isn't rank {rank}'s")
    except (ValueError, UnsafePath) as error:
        raise Damaged(what=what, reason=f"is refused: {error}", url=url, version=version) from error
    return part


def merged(parts: Sequence[Part]) -> dict[str, TensorEntry]:
    """Each tensor, made up of what the ranks hold of it. ShardsRefused, naming the tensor and the ranks, if that isn't all of it,
    once."""
    names = dict.fromkeys(name for part in parts for name in part.tensors)
    held = {name: [(part.rank, part.tensors[name]) for part in parts if name in part.tensors] for name in names}
    return {name: _merged(name, held) for name in names}


_Held = Mapping[str, Sequence[tuple[int, HeldTensor]]]


def _merged(name: str, all_held: _Held) -> TensorEntry:
    held = all_held[name]
    (first, one), *others = held
    for rank, other in others:
        if (other.shape, other.values.dtype) != (one.shape, one.values.dtype):
            raise ShardsRefused(
                f"tensor {name!r} is {one.values.dtype} {list(one.shape)} on rank {first} and {other.values.dtype} {list(other.shape)} on rank {rank}"
            )
    entry = TensorEntry(one.values.dtype, one.shape, numel=prod(one.shape))
    if not entry.numel:
        return entry
    boxes = [(rank, part) for rank, part in held if prod(part.held)]
    _check_cover(name, one.shape, boxes)
    owners = {part.values.alias_of for _, part in boxes}
    if owners != {None}:
        return replace(entry, alias_of=_owner(name, owners, boxes, all_held))
    if len(boxes) == 1:
        return replace(entry, array=boxes[0][1].values.array, offset=boxes[0][1].values.offset)
    return replace(entry, shards=tuple(_shard(name, part) for _, part in boxes))


def _owner(name: str, owners: Iterable[str | None], boxes: Sequence[tuple[int, HeldTensor]], all_held: _Held) -> str:
    """The tensor that `name` is tied to on every rank that holds any of it, with the same boxes."""
    found = next(owner for owner in owners if owner is not None)
    theirs = {rank: (part.shape, part.start, part.held) for rank, part in all_held.get(found, ()) if prod(part.held)}
    if set(owners) != {found} or theirs != {rank: (part.shape, part.start, part.held) for rank, part in boxes}:
        raise ShardsRefused(f"tensor {name!r} is the same memory as {found!r} on some ranks and not on others: tie or clone it on all of them")
    return found


def _check_cover(name: str, shape: tuple[int, ...], boxes: Sequence[tuple[int, HeldTensor]]) -> None:
    if not covers(whole(shape), [box_at(part.start, part.held) for _, part in boxes]):
        ranks = ", ".join(str(rank) for rank, _ in boxes[:20]) + (", ..." if len(boxes) > 20 else "")
        total = sum(prod(part.held) for _, part in boxes)
        raise ShardsRefused(
            f"tensor {name!r} of {list(shape)} isn't made up exactly once by what ranks {ranks or 'none'} gave of it: "
            f"{total} values for {prod(shape)}; let one rank write what several hold"
        )


def _shard(name: str, part: HeldTensor) -> ShardEntry:
    if part.values.array is None:
        raise ShardsRefused(f"tensor {name!r} has values and no array in a rank's record")
    return ShardEntry(part.start, part.held, part.values.array, part.values.offset)
