"""Means, rises and Student's t against published and hand-computed values."""

import math
import random

import pytest

from rollart.dashboard.estimates import mean_estimate, rise_estimate, t_quantile


@pytest.mark.parametrize(("freedom", "value"), [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (10, 2.228), (30, 2.042), (199, 1.972)])
def test_t_quantiles_are_those_of_the_printed_tables(freedom: int, value: float):
    assert t_quantile(0.975, freedom) == pytest.approx(value, abs=6e-4)


def test_the_interval_of_a_mean_by_hand():
    # mean 2, variance 1, standard error 1/sqrt(3), t(2) = 4.302653
    found = mean_estimate([1.0, 2.0, 3.0])
    assert (found.mean, found.n) == (2.0, 3)
    assert found.high - found.mean == pytest.approx(4.302653 / math.sqrt(3), rel=1e-5)
    assert found.mean - found.low == pytest.approx(found.high - found.mean)


def test_one_episode_gives_a_mean_without_an_interval():
    assert mean_estimate([0.5]).to_dict() == {"mean": 0.5, "low": None, "high": None, "n": 1, "method": "mean"}
    with pytest.raises(ValueError, match="at least one"):
        mean_estimate([])


def test_the_same_episodes_are_paired_so_that_what_makes_them_easy_cancels():
    before = {0: 0.0, 1: 1.0, 2: 0.2, 3: 0.8}
    rise = rise_estimate(before, {episode: score + 0.1 for episode, score in before.items()})
    assert rise.method == "paired"
    assert rise.mean == pytest.approx(0.1)
    assert rise.high - rise.low == pytest.approx(0.0, abs=1e-12)


def test_an_episode_lost_on_one_side_does_not_unpair_the_rest():
    before = dict.fromkeys(range(20), 0.0)
    after = {episode: float(episode % 2) for episode in range(1, 20)}
    assert rise_estimate(before, after).method == "paired"
    assert rise_estimate(before, after).n == 19


def test_other_episodes_are_compared_by_welch():
    # variances 1 and 4 over 3 each: error sqrt(5/3); freedom (5/3)^2 / ((1/3)^2/2 + (4/3)^2/2) = 2.94 -> 2
    rise = rise_estimate({0: 1.0, 1: 2.0, 2: 3.0}, {10: 4.0, 11: 6.0, 12: 8.0})
    assert (rise.mean, rise.method, rise.n) == (4.0, "welch", 3)
    assert rise.high - rise.mean == pytest.approx(4.302653 * math.sqrt(5 / 3), rel=1e-5)


def test_welch_without_any_spread_has_no_width():
    rise = rise_estimate({0: 0.0, 1: 0.0}, {2: 1.0, 3: 1.0})
    assert (rise.low, rise.mean, rise.high) == (1.0, 1.0, 1.0)


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    draw = random.Random(3)
    hits = sum(e.low <= 0.0 <= e.high for e in (mean_estimate([draw.gauss(0, 1) for _ in range(5)]) for _ in range(2000)))
    assert 0.935 < hits / 2000 < 0.965
