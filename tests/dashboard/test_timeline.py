"""Time accounting against numbers worked out by hand."""

import pytest

from rollart.dashboard.timeline import Interval, Usage, intersect, measure, subtract, tokens_within, union


def test_union_joins_overlapping_and_touching_spans_and_drops_empty_ones():
    assert union([(5, 6), (0, 2), (1, 3), (3, 4), (9, 9)]) == [(0, 4), (5, 6)]


def test_intersection_and_difference_of_spans():
    assert intersect([(0, 4), (6, 10)], [(1, 2), (3, 7), (9, 12)]) == [(1, 2), (3, 4), (6, 7), (9, 10)]
    assert subtract([(0, 4), (6, 10)], [(1, 2), (3, 7), (9, 12)]) == [(0, 1), (2, 3), (7, 9)]


def test_an_interval_that_ends_before_it_starts_is_refused():
    with pytest.raises(ValueError, match="stage train ends at 1"):
        Interval("train", 2.0, 1.0)


def test_tokens_between_samples_grow_evenly_and_not_at_all_outside():
    samples = [(0.0, 0.0), (10.0, 100.0), (20.0, 400.0)]
    assert tokens_within(samples, [(5.0, 15.0)]) == pytest.approx(50 + 150)
    assert tokens_within(samples, [(-5.0, 1.0), (19.0, 99.0)]) == pytest.approx(10 + 30)
    assert tokens_within([], [(0.0, 1.0)]) == 0.0


def test_a_counter_that_starts_anew_loses_nothing_else():
    samples = [(0.0, 0.0), (1.0, 50.0), (2.0, 0.0), (3.0, 30.0)]
    assert tokens_within(samples, [(0.0, 3.0)]) == pytest.approx(80.0)


def test_two_samples_at_one_time_do_not_divide_by_zero():
    assert tokens_within([(0.0, 0.0), (1.0, 10.0), (1.0, 20.0), (2.0, 20.0)], [(0.0, 2.0)]) == pytest.approx(20.0)


# Rollout runs 0-20 without a break, training 5-10 and 12-14, an evaluation 20-24.
# Tokens: 100 a second, but 60 a second while training.
LOOP = [
    Interval("rollout", 0, 11),
    Interval("rollout", 10, 20),
    Interval("train", 5, 10),
    Interval("train", 12, 14),
    Interval("evaluate", 20, 24),
]
TOKENS = [(0, 0), (5, 500), (10, 800), (12, 1000), (14, 1120), (20, 1720)]


def test_usage_of_an_overlapped_loop():
    usage = measure(LOOP, TOKENS)
    assert usage.window == 24
    assert usage.loop == 20
    assert usage.stages == {"rollout": 20, "train": 7, "evaluate": 4}
    assert usage.shares == pytest.approx({"rollout": 20 / 24, "train": 7 / 24, "evaluate": 4 / 24})
    assert usage.overlap_share == 1.0
    assert usage.trainer_idle_share == pytest.approx(13 / 20)
    assert usage.rate_while_training == pytest.approx(60.0)
    assert usage.rate_while_idle == pytest.approx(100.0)
    assert usage.rate_ratio == pytest.approx(0.6)


def test_a_trainer_that_takes_turns_with_rollout_has_no_overlap_and_no_rate():
    usage = measure(
        [Interval("rollout", 0, 4), Interval("train", 4, 6), Interval("rollout", 6, 10)],
        [(0.0, 0.0), (4.0, 40.0), (6.0, 40.0), (10.0, 80.0)],
    )
    assert usage.overlap_share == 0.0
    assert usage.rate_while_training == 0.0
    assert usage.rate_while_idle == pytest.approx(10.0)
    assert usage.rate_ratio == 0.0


def test_rates_are_taken_only_where_tokens_were_counted():
    usage = measure([Interval("rollout", 0, 20), Interval("train", 0, 5)], [(4.0, 0.0), (6.0, 20.0)])
    assert usage.busy_seconds == 1.0
    assert usage.idle_seconds == 1.0
    assert usage.rate_ratio == pytest.approx(1.0)


def test_the_gap_between_two_stretches_counts_as_nothing():
    later = [Interval(i.stage, i.start + 1000, i.end + 1000) for i in LOOP]
    both = measure(LOOP, TOKENS) + measure(later, [(t + 1000, n) for t, n in TOKENS])
    assert both.window == 48
    assert both.trainer_idle_share == pytest.approx(13 / 20)
    assert both.rate_ratio == pytest.approx(0.6)


def test_nothing_measured_gives_no_figures_rather_than_zeros():
    usage = measure([])
    assert usage == Usage()
    assert usage.overlap_share is None
    assert usage.trainer_idle_share is None
    assert usage.rate_ratio is None


def test_tokens_of_an_evaluation_do_not_count_as_rollouts():
    intervals = [Interval("train", 0, 2), Interval("rollout", 0, 10), Interval("evaluate", 4, 8)]
    usage = measure(intervals, [(0.0, 0.0), (4.0, 40.0), (8.0, 1040.0), (10.0, 1060.0)])
    assert usage.rate_while_training == pytest.approx(10.0)
    assert usage.rate_while_idle == pytest.approx((20 + 20) / 4)  # 2 s before the evaluation and 2 s after it
