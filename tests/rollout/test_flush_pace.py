"""How long finished trajectories wait to be written: a step costs a store under a hundred objects whatever its batch."""

from __future__ import annotations

import pytest

from rollart.rollout.flush_pace import FlushPace


def paced(step_s: float, writers: int, a_step: int, least_s: float = 0.25, least_rows: int = 64) -> FlushPace:
    pace = FlushPace(least_s, least_rows, writers, a_step)
    for step in range(6):
        pace.stepped(step * step_s)
    return pace


def objects(step_s: float, writers: int, a_step: int) -> float:
    """Files a step, at most: each writer makes one whenever its time is over, and each as many more as it fills."""
    pace = paced(step_s, writers, a_step)
    return writers * step_s / pace.seconds + a_step / pace.rows


@pytest.mark.parametrize("a_step", [8, 256, 2_048, 100_000])
@pytest.mark.parametrize("writers", [1, 4, 14])
@pytest.mark.parametrize("step_s", [2.5, 60.0, 900.0])
def test_a_step_costs_under_a_hundred_objects(step_s: float, writers: int, a_step: int) -> None:
    assert objects(step_s, writers, a_step) < 97  # and one file of fates, one entry of the ledger


def test_nothing_waits_longer_than_a_quarter_of_a_step() -> None:
    assert paced(60.0, writers=500, a_step=2048).seconds == 15.0
    assert objects(60.0, writers=500, a_step=2048) <= 4 * 500 + 40


def test_short_steps_and_unknown_ones_wait_the_least() -> None:
    assert paced(0.5, writers=1, a_step=256).seconds == 0.25
    assert FlushPace(0.25, 64, writers=100).seconds == 0.25


def test_one_long_step_such_as_an_evaluation_changes_nothing() -> None:
    pace = paced(20.0, writers=10, a_step=64)
    assert pace.seconds == 5.0
    pace.stepped(5 * 20.0 + 600.0)
    assert pace.seconds == 5.0
