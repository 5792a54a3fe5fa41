"""How two versions differ, tensor by tensor; owns the measures, holds a bounded part of either at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from storage.arrays.packing import byte_view
from storage.format.commit import Commit
from storage.format.dtypes import ITEMSIZE
from storage.format.index import TensorEntry
from storage.progress import Progress, Tally
from storage.version import Version
from storage.weights import WeightStore

Kind = Literal["added", "removed", "reshaped", "retyped", "changed", "same"]

BATCH_BYTES = 256 << 20
"""Tensors are read together up to about this much, since they share chunks; a larger one is read alone."""

_SLICE = 1 << 22
"""Values that are compared at once, in float64."""


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """What became of one tensor from a first version to a second.

    `before` and `after` are type and shape, None where it isn't there. The rest is of tensors that are in both, of one type and
    shape: `changed` of `values` have other bits; `max_abs` is the largest |after - before|; `squares` the sum of their squares,
    `norm` that of the values before. A change from or to NaN or infinity makes the measures so.
    """

    name: str
    kind: Kind
    before: tuple[str, tuple[int, ...]] | None
    after: tuple[str, tuple[int, ...]] | None
    values: int = 0
    changed: int = 0
    max_abs: float = 0.0
    squares: float = 0.0
    norm: float = 0.0

    @property
    def changed_share(self) -> float:
        """Share of the values that have other bits, from 0 to 1."""
        return self.changed / self.values if self.values else 0.0

    @property
    def relative_l2(self) -> float:
        """||after - before|| / ||before||; infinite where only the second isn't zero."""
        return _relative(self.squares, self.norm)


def differences(
    before: tuple[WeightStore, Version], after: tuple[WeightStore, Version], progress: Progress | None = None
) -> Iterator[TensorDifference]:
    """Each tensor of two versions, by name, as it is found; the stores may be two. `progress` hears bytes done and in all.

    Memory: about four times `BATCH_BYTES`, or of the largest tensor. Values that are stored as another name of a tensor are
    compared under each of their names. VersionMissing, Damaged or UnknownFormat.
    """
    (first, old), (second, new) = before, after
    a, b = first.commit(old), second.commit(new)
    alike = [name for name in sorted(a.tensors.keys() & b.tensors.keys()) if _kind(a.tensors[name], b.tensors[name]) == "changed"]
    others = sorted((a.tensors.keys() | b.tensors.keys()) - set(alike))
    yield from (_apart(name, a.tensors.get(name), b.tensors.get(name)) for name in others)
    tally = Tally(sum(_bytes(a, name) for name in alike), progress)
    for names in _batches(a, alike):
        one, other = first.pull(old, names=names), second.pull(new, names=names)
        for name in names:
            yield _compared(name, a.tensors[name], one.pop(name), other.pop(name))
        tally.add(sum(_bytes(a, name) for name in names))


def summary(found: Iterable[TensorDifference]) -> TensorDifference:
    """All tensors as if they were one, called `all`; its measures are of those that are in both versions in one type and shape."""
    every = [d for d in found if d.kind in ("changed", "same")]
    changed = sum(d.changed for d in every)
    return TensorDifference(
        "all", "changed" if changed else "same", None, None, sum(d.values for d in every), changed,
        max((d.max_abs for d in every), key=lambda x: math.inf if math.isnan(x) else x, default=0.0),
        math.fsum(d.squares for d in every), math.fsum(d.norm for d in every),
    )  # fmt: skip


def _kind(a: TensorEntry, b: TensorEntry) -> Kind:
    if a.shape != b.shape:
        return "reshaped"
    return "retyped" if a.dtype != b.dtype else "changed"


def _apart(name: str, a: TensorEntry | None, b: TensorEntry | None) -> TensorDifference:
    kind: Kind = "added" if a is None else "removed" if b is None else _kind(a, b)
    return TensorDifference(name, kind, _sketch(a), _sketch(b))


def _sketch(entry: TensorEntry | None) -> tuple[str, tuple[int, ...]] | None:
    return None if entry is None else (entry.dtype, entry.shape)


def _bytes(commit: Commit, name: str) -> int:
    entry = commit.tensors[name]
    return entry.numel * ITEMSIZE[entry.dtype]


def _batches(commit: Commit, names: Iterable[str]) -> Iterator[list[str]]:
    """Names in the order in which they are stored, as many at once as `BATCH_BYTES` hold: each chunk is read about once."""
    batch: list[str] = []
    used = 0
    for name in sorted(names, key=lambda name: (commit.tensors[name].array or "", commit.tensors[name].offset, name)):
        size = _bytes(commit, name)
        if batch and used + size > BATCH_BYTES:
            yield batch
            batch, used = [], 0
        batch.append(name)
        used += size
    if batch:
        yield batch


def _compared(name: str, entry: TensorEntry, a: torch.Tensor, b: torch.Tensor) -> TensorDifference:
    changed, max_abs, squares, norm = 0, 0.0, 0.0, 0.0
    width = ITEMSIZE[entry.dtype]
    if not entry.numel:
        return TensorDifference(name, "same", _sketch(entry), _sketch(entry))
    one, other = a.flatten(), b.flatten()  # [values]
    bits = torch.from_numpy(byte_view(one)).view(-1, width), torch.from_numpy(byte_view(other)).view(-1, width)  # [values, bytes]
    for at in range(0, entry.numel, _SLICE):
        here = slice(at, at + _SLICE)
        differ = (bits[0][here] != bits[1][here]).any(1)
        values = _wide(one[here])
        norm += float(values.abs().square().sum())
        count = int(differ.sum())
        if count:
            changed += count
            change = (_wide(other[here])[differ] - values[differ]).abs()
            largest = float(change.max())
            max_abs = largest if math.isnan(largest) or math.isnan(max_abs) else max(max_abs, largest)
            squares += float(change.square().sum())
    kind: Kind = "changed" if changed else "same"
    return TensorDifference(name, kind, _sketch(entry), _sketch(entry), entry.numel, changed, max_abs, squares, norm)


def _wide(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.complex128 if values.is_complex() else torch.float64)


def _relative(squares: float, norm: float) -> float:
    if not squares:
        return 0.0
    return math.sqrt(squares / norm) if norm else math.inf
