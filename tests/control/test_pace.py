"""Which task's trajectories outlast the window, and the window that they need."""

from __future__ import annotations

from rollart.control.pace import Outlasting, Pace


def fed(lake_s: float, step_s: float, waited: dict[str, float] | None = None, steps: int = 6, ends: int = 40) -> Pace:
    pace = Pace()
    for step in range(steps):
        pace.stepped(step * step_s, waited or {})
    for i in range(ends):
        pace.ended("lake", lake_s + (100.0 if i % 5 == 0 else 0.0))  # a long tail moves no median
        pace.ended("sums", 0.1)
    return pace


def test_a_task_whose_median_outlasts_the_window_is_told_with_the_window_that_it_needs() -> None:
    assert fed(lake_s=35.0, step_s=10.0).outlasting(alpha=1) == [Outlasting("lake", 35.0, 10.0, 3)]
    assert fed(lake_s=35.0, step_s=10.0).outlasting(alpha=3) == []


def test_a_task_that_just_fits_is_not() -> None:
    assert fed(lake_s=20.0, step_s=10.0).outlasting(alpha=1) == []
    assert fed(lake_s=20.1, step_s=10.0).outlasting(alpha=1) == [Outlasting("lake", 20.1, 10.0, 2)]


def test_a_step_that_waited_for_the_task_is_not_as_long_as_the_task_made_it() -> None:
    (found,) = fed(lake_s=35.0, step_s=20.0, waited={"lake": 15.0}).outlasting(alpha=1)
    assert (found.step_s, found.alpha) == (5.0, 6)


def test_nothing_is_told_before_enough_is_known() -> None:
    assert fed(lake_s=35.0, step_s=10.0, steps=3).outlasting(alpha=1) == []
    assert fed(lake_s=35.0, step_s=10.0, ends=10).outlasting(alpha=1) == []
