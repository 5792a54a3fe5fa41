"""The ids that a cut of the sampling distribution kept, place after place; owns their form in memory and on the wire, cuts nothing itself."""

from __future__ import annotations

import base64
import binascii
import zlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["KeptSets"]


def _empty() -> array[int]:
    return array("i")


@dataclass(slots=True)
class KeptSets:
    """What was kept at each of n places: `counts` [n] ids each, one place's after the other's in `ids`, ascending within a place.

    Both are arrays of 32-bit integers: four bytes an id, where a list has some forty.
    """

    ids: array[int] = field(default_factory=_empty)
    counts: array[int] = field(default_factory=_empty)

    def __len__(self) -> int:
        """How many places."""
        return len(self.counts)

    @classmethod
    def of(cls, ids: npt.ArrayLike, counts: npt.ArrayLike) -> KeptSets:
        """From any sequences of integers."""
        return cls(*(array("i", np.asarray(values, dtype=np.int32).tobytes()) for values in (ids, counts)))

    def extend(self, other: KeptSets) -> None:
        """Adds the places of `other` behind these."""
        self.ids.extend(other.ids)
        self.counts.extend(other.counts)

    def __add__(self, other: KeptSets) -> KeptSets:
        return KeptSets(self.ids + other.ids, self.counts + other.counts)

    def last(self, n: int) -> KeptSets:
        """The last `n` places."""
        if n >= len(self):
            return self
        counts = self.counts[len(self) - n :]
        return KeptSets(self.ids[len(self.ids) - sum(counts) :], counts)

    def wrong(self, tokens: Sequence[int]) -> str | None:
        """What speaks against these being the sets that `tokens` [n] were drawn from; None if nothing does."""
        if len(tokens) != len(self):
            return f"{len(self)} kept sets were given for {len(tokens)} sampled tokens"
        counts, ids = np.array(self.counts), np.array(self.ids)
        if (counts < 0).any() or counts.sum() != len(ids):
            return f"the kept sets' counts come to {counts.sum()}, and {len(ids)} ids were given"
        owners = np.repeat(np.arange(len(counts)), counts)
        if ((np.diff(ids) <= 0) & (np.diff(owners) == 0)).any():
            return "the ids of a kept set are not in ascending order"
        found = np.bincount(owners[ids == np.array(tokens, dtype=np.int64)[owners]], minlength=len(counts))
        if not found.all():
            place = int(found.argmin())
            return f"token {tokens[place]}, sampled at place {place}, is not in the set that was kept there"
        return None

    def to_wire(self) -> dict[str, Any]:
        """As JSON: `counts`, and the differences of successive `ids` as little-endian 32-bit integers, by zlib and base64: of a set that is half a
        vocabulary, under a byte an id."""
        steps = np.diff(np.array(self.ids), prepend=np.int32(0)).astype("<i4")
        return {"counts": self.counts.tolist(), "ids": base64.b64encode(zlib.compress(steps.tobytes(), 1)).decode("ascii")}

    @classmethod
    def from_wire(cls, body: Mapping[str, Any]) -> KeptSets:
        """Reads what `to_wire` wrote; ValueError, KeyError or TypeError if it is not of that form."""
        try:
            counts = np.asarray(body["counts"], dtype=np.int32)
            steps = np.frombuffer(zlib.decompress(base64.b64decode(body["ids"], validate=True)), dtype="<i4")
        except (OverflowError, binascii.Error, zlib.error) as error:
            raise ValueError(f"kept sets cannot be read: {error}") from error
        if (counts < 0).any() or counts.sum() != len(steps):
            raise ValueError(f"kept sets of {counts.sum()} ids came with {len(steps)} of them")
        return cls.of(np.cumsum(steps, dtype=np.int32), counts)
