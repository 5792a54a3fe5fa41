"""What a learner needs of the ranks that it trains with; owns the words and the case of one rank, and no process group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from torch import Tensor

__all__ = ["ALONE", "Alone", "Place", "Ranks"]

T = TypeVar("T")


class Place(Protocol):
    """Which share of a batch is meant: that of `rank`, of `count`."""

    @property
    def rank(self) -> int: ...

    @property
    def count(self) -> int: ...


class Ranks(Place, Protocol):
    """`count` learners that train on one batch, each on its share; this one is `rank`. Each has to make the same calls in the same order.

    GroupBroken as soon as it is known that a rank is gone.
    """

    def gather(self, mine: T) -> list[T]:
        """What each rank gave, by rank; it travels by pickle."""

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Puts into each tensor its sum over the ranks, the same bits on all of them."""


class Alone:
    """One rank: nothing to exchange, so the result is what it was before there were any ranks."""

    rank, count = 0, 1

    def gather(self, mine: T) -> list[T]:
        return [mine]

    def add(self, tensors: Sequence[Tensor]) -> None:
        pass


ALONE = Alone()
