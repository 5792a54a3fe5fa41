"""The staleness window: what may start, what is too old, and that nothing admitted can outlive it."""

import random

import pytest

from rollart.control.staleness import StalenessWindow


def test_a_negative_bound_is_refused() -> None:
    with pytest.raises(ValueError, match="alpha is -1"):
        StalenessWindow(-1)


@pytest.mark.parametrize(("alpha", "ages"), [(0, [0]), (1, [0, 1]), (3, [0, 1, 2, 3])])
def test_ages_up_to_alpha_may_be_trained_on_and_alpha_itself_is_the_last(alpha: int, ages: list[int]) -> None:
    window = StalenessWindow(alpha)
    assert [age for age in range(6) if not window.expired(first_version=10, step=10 + age)] == ages
    assert window.last_step(first_version=10) == 10 + alpha


def test_admission_fills_the_batches_that_the_version_served_may_still_enter() -> None:
    window = StalenessWindow(2)
    assert window.admissible(next_step=5, served=5, quota=4, ahead=0) == 12
    assert window.admissible(next_step=5, served=5, quota=4, ahead=7) == 5
    assert window.admissible(next_step=6, served=5, quota=4, ahead=0) == 8
    assert window.admissible(next_step=8, served=5, quota=4, ahead=0) == 0
    assert window.admissible(next_step=5, served=5, quota=4, ahead=13) == 0


@pytest.mark.parametrize("seed", range(30))
def test_whatever_is_admitted_is_trained_on_inside_the_window_when_batches_take_the_oldest_first(seed: int) -> None:
    rng = random.Random(seed)
    window, quota = StalenessWindow(rng.randrange(4)), rng.randrange(1, 4)
    queue: list[int] = []
    served, trained = 0, []
    for step in range(40):
        served = max(served, step - rng.randrange(window.alpha + 1))  # publishing lags, and never goes back
        queue += [served] * window.admissible(next_step=step, served=served, quota=quota, ahead=len(queue))
        assert len(queue) >= quota, "a step would wait for ever"
        batch, queue = queue[:quota], queue[quota:]
        assert not any(window.expired(version, step) for version in batch)
        trained += [step - version for version in batch]
    assert max(trained) <= window.alpha
