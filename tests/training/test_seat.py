"""A rank's place in its group: orders are carried out once, of the present generation only, and a broken step leaves no trace."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rollart.training.batch import build_batch
from rollart.training.errors import GroupBroken
from rollart.training.learner import Learner
from rollart.training.seat import Invitation, Order, Seat, Standing
from rollart.training.settings import LearnerSettings, OptimiserSettings


@pytest.fixture
def learner(llama: Path) -> Learner:
    return Learner(llama, LearnerSettings(optimiser=OptimiserSettings(lr=0.01)))


@pytest.fixture
def seat(learner: Learner) -> Iterator[Seat]:
    """A place in a group of one rank, of generation 4."""
    seat = Seat()
    assert seat.standing == Standing(None)
    assert not seat.join(learner, Invitation(4, "127.0.0.1", seat.open("127.0.0.1"), 0, 1, 30.0))
    yield seat
    seat.leave()


def test_an_order_is_carried_out_once(seat: Seat, learner: Learner) -> None:
    done: list[int] = []

    def work() -> str:
        done.append(1)
        return f"result {len(done)}"

    assert seat.carry_out(Order(4, 1), learner, work) == "result 1"
    assert seat.carry_out(Order(4, 1), learner, work) == "result 1"
    assert seat.standing == Standing(1)
    assert seat.carry_out(Order(4, 2), learner, work) == "result 2"
    assert done == [1, 1]


@pytest.mark.parametrize("order", [Order(3, 1), Order(5, 1), Order(4, 2), Order(4, -1)])
def test_orders_of_another_generation_or_out_of_turn_are_refused(seat: Seat, learner: Learner, order: Order) -> None:
    with pytest.raises(GroupBroken):
        seat.carry_out(order, learner, lambda: pytest.fail("it was carried out"))
    assert seat.carry_out(Order(4, 1), learner, lambda: 7) == 7


def test_a_step_that_breaks_off_is_undone_and_ends_the_membership(seat: Seat, learner: Learner, make_trajectories: Any) -> None:
    trajectories = make_trajectories((3, 2))
    batches = [build_batch(trajectories, {t.attempt: float(t.attempt.member) - 1 for t in trajectories}, step) for step in range(3)]
    seat.carry_out(Order(4, 1), learner, lambda: learner.train_step(batches[0]))
    before, document = learner.state()

    def breaks() -> None:
        learner.train_step(batches[1])
        learner.begin(OptimiserSettings(lr=0.5))
        raise GroupBroken("a rank is gone")

    with pytest.raises(GroupBroken, match="is gone"):
        seat.carry_out(Order(4, 2), learner, breaks)
    after, found = learner.state()
    assert (found, learner.step, learner.optimiser.settings.lr) == (document, 1, 0.01)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert seat.standing == Standing(1)
    assert not torch.distributed.is_initialized()
    with pytest.raises(GroupBroken):  # until it joins the next group
        seat.carry_out(Order(4, 2), learner, lambda: None)
    seat.join(learner, Invitation(5, "127.0.0.1", seat.open("127.0.0.1"), 0, 1, 30.0))
    assert seat.carry_out(Order(5, 2), learner, lambda: learner.train_step(batches[1])).step == 1


def test_a_group_whose_ranks_do_not_all_come_is_given_up(learner: Learner) -> None:
    seat = Seat()
    with pytest.raises(GroupBroken, match="rank 0 of 2 could not join generation 0"):
        seat.join(learner, Invitation(0, "127.0.0.1", seat.open("127.0.0.1"), 0, 2, 1.0))
    assert not torch.distributed.is_initialized()
    assert seat.standing == Standing(None)
