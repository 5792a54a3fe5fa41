"""What a failure costs a member: which failures count against what, and how long it rests."""

import pytest

from rollart.control.failures import Cause, FailurePolicy


@pytest.mark.parametrize(
    ("failures", "gives_up"),
    [
        ({}, False),
        ({"environment": 2}, False),
        ({"environment": 3}, True),
        ({"environment": 1, "reward": 1, "lease": 1}, True),
        ({"generation": 2, "machine": 2}, False),
        ({"generation": 2, "machine": 3}, True),
        ({"environment": 2, "machine": 4}, False),
    ],
)
def test_what_the_task_breaks_counts_apart_from_what_the_machine_breaks(failures: dict[Cause, int], gives_up: bool) -> None:
    assert FailurePolicy(attempts=3, machine_attempts=5).gives_up(failures) is gives_up


@pytest.mark.parametrize(("count", "seconds"), [(0, 0.0), (1, 0.5), (2, 1.0), (3, 2.0), (8, 60.0), (5000, 60.0)])
def test_each_failure_doubles_the_rest_up_to_a_bound(count: int, seconds: float) -> None:
    assert FailurePolicy(rest_s=0.5, rest_factor=2.0, most_rest_s=60.0).rest({"machine": count}) == seconds
