"""A worker's place among the ranks: which group it is in, what it has done there, and the way back when a step breaks off. No Dask.

Every order carries the generation of the group that it is for and a number, one more than the last. A step that breaks off leaves the
learner as it was before, so that between two orders each rank holds whole steps only, at most one apart from the others.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from rollart.training.errors import GroupBroken
from rollart.training.settings import OptimiserSettings

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from rollart.training.learner import Learner

__all__ = ["Invitation", "Order", "Seat", "Standing"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Order:
    """Which group a step is for, and which of the steps that its ranks take together it is, from 1."""

    generation: int
    number: int


@dataclass(frozen=True, slots=True)
class Invitation:
    """To rank `rank` of `count`, to meet the others at the store of `host` and `port`. Rank 0 has done what the others are to take over;
    they wait for each other and, later on, for an answer `timeout_s` seconds at most."""

    generation: int
    host: str
    port: int
    rank: int
    count: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Standing:
    """`done`: the last order that this rank has carried out, None if it was in no group and holds nothing of what was learned."""

    done: int | None


class Seat:
    """Of a worker's `learner`. One thread at a time carries out an order; `standing` and `leave` don't wait for it."""

    def __init__(self) -> None:
        self.generation = -1
        self.done: int | None = None
        self._result: Any = None
        self._store: TCPStore | None = None
        self._turn = threading.Lock()

    @property
    def standing(self) -> Standing:
        return Standing(self.done)

    def open(self, host: str) -> int:
        """Opens a store where the ranks of the next group find each other, in the place of an earlier one; its port."""
        from rollart.training.process_group import open_store

        self._store = open_store(host)
        return int(self._store.port)

    def join(self, learner: Learner, place: Invitation) -> bool:
        """Takes this rank's place in a new group, with what rank 0 holds; whether that was something else than what was held here.

        GroupBroken if the others don't come.
        """
        from rollart.training.process_group import ProcessRanks

        with self._turn, learner.lock:
            device = learner.settings.model.device
            try:
                ranks = ProcessRanks.join(place.host, place.port, place.generation, place.rank, place.count, device=device, timeout_s=place.timeout_s)
                learner.ranks = ranks
                if learner.settings.model.shard:
                    learner.shard()  # all of them have the same weights still: each was made from the policy's folder
                    self.done, new = 0, True
                elif place.rank == 0:
                    self.done, new = self.done or 0, False
                    ranks.hand_round(0, *_everything(learner, (self.done, self._result)))
                else:
                    new = self._take_over(learner, *ranks.hand_round(0))
            except BaseException:
                self.leave()
                raise
            self.generation = place.generation
            return new

    def carry_out(self, order: Order, learner: Learner, work: Callable[[], T]) -> T:
        """The result of `work`, a step that all ranks take; that of the first time if this order was carried out already.

        GroupBroken if the order is for another group, or if the group breaks meanwhile. Whatever ends the step, this rank has then left
        the group, so that the others don't wait for it, and, unless its state is spread over them, is back where it was before.
        """
        with self._turn:
            if order.generation != self.generation or self.done is None:
                raise GroupBroken(f"the order is for generation {order.generation} of the ranks, and this one is in {self.generation}")
            if order.number == self.done:
                return self._result  # of this order's own work
            if order.number != self.done + 1:
                raise GroupBroken(f"order {order.number} does not follow on {self.done}, the last that this rank has carried out")
            before = None if learner.sharded else _everything(learner)
            try:
                result = work()
            except BaseException as error:
                traceback.clear_frames(error.__traceback__)  # what they hold of the group would keep it from closing
                self.leave()
                if before is not None:
                    _put_back(learner, *before)
                raise
            self.done, self._result = order.number, result
            return result

    def leave(self) -> None:
        """Leaves the group, if this rank is in any; the others notice."""
        from rollart.training.process_group import leave

        self.generation = -1
        leave()

    def _take_over(self, learner: Learner, arrays: Mapping[str, Tensor], document: dict[str, Any]) -> bool:
        done, result = document["standing"]
        if self.done == done:
            return False
        _put_back(learner, arrays, document)
        self.done, self._result = done, result
        return True


def _everything(learner: Learner, standing: tuple[int, Any] | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """All that makes another learner of the same settings the same as this one."""
    with learner.lock:
        arrays, state = learner.state()
        return arrays, {"state": state, "optimiser": learner.optimiser.settings, "standing": standing}


def _put_back(learner: Learner, arrays: Mapping[str, Tensor], document: dict[str, Any]) -> None:
    optimiser: OptimiserSettings = document["optimiser"]
    with learner.lock:
        learner.begin(optimiser)
        learner.load_state(arrays, document["state"])
