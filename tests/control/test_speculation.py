"""How long drafts are, by values computed by hand, and when nothing of them stands."""

from __future__ import annotations

import pytest

from rollart.control.speculation import AcceptanceWatch, DraftLengths, candidate_lengths


def run(lengths, steps, cost, stood, batch=1):
    """Steps of `batch` requests that take cost(asked) seconds, and of whose drafts min(asked, stood) tokens stand; what was asked."""
    asked = []
    for _ in range(steps):
        k = lengths.length(batch)
        asked.append(k)
        lengths.stepped(batch, k, [min(k, stood)] * batch, cost(k))
    return asked


def test_candidates_are_powers_of_two_and_the_longest():
    assert candidate_lengths(1) == (0, 1)
    assert candidate_lengths(4) == (0, 1, 2, 4)
    assert candidate_lengths(6) == (0, 1, 2, 4, 6)


def test_each_length_is_tried_before_one_is_chosen():
    lengths = DraftLengths(4, trials=2)
    assert run(lengths, 8, lambda k: 1.0, 0) == [0, 0, 1, 1, 2, 2, 4, 4]


def test_a_lengths_rate_is_its_expected_tokens_over_the_median_of_its_seconds():
    lengths = DraftLengths(2, trials=3)
    for asked, correct, seconds in ((0, 0, 1.0), (1, 1, 1.5), (1, 0, 90.0), (1, 1, 1.25), (2, 2, 2.0), (2, 1, 2.0), (2, 0, 2.5)):
        lengths.stepped(1, asked, [correct], seconds)
    # First tokens: stood in 1, 0, 1, 1, 1, 0 of six passes; second ones in 1, 0, 0 of three; a pass weighs 0.995 of the next.
    w = 0.995
    first = (w**5 + w**3 + w**2 + w) / sum(w**i for i in range(6))
    second = w**2 / sum(w**i for i in range(3))
    assert lengths.expected(0) == 1.0
    assert lengths.expected(1) == pytest.approx(1 + first)
    assert lengths.expected(2) == pytest.approx(1 + first + second)
    assert lengths.rates(1) == pytest.approx({0: 1.0, 1: (1 + first) / 1.5, 2: (1 + first + second) / 2.0})


def test_a_longer_drafts_later_tokens_count_no_more_than_its_earlier_ones():
    lengths = DraftLengths(4)
    lengths.stepped(1, 4, [4], None)
    lengths.stepped(1, 1, [0], None)
    first = 0.995 / 1.995  # and what stood at places 2 to 4 was with the pass in which the first one stood
    assert lengths.expected(4) == pytest.approx(1 + 4 * first)


@pytest.mark.parametrize(
    ("slope", "stood", "best"),
    [
        (0.1, 4, 4),  # 1 + k tokens in 1 + k / 10 seconds
        (0.1, 2, 2),  # more than two never stand: 3 / 1.2 against 3 / 1.4
        (0.6, 1, 1),  # 2 / 1.6 against 2 / 2.2 and against 1
        (1.2, 4, 0),  # each token costs more than a whole pass
        (0.1, 0, 0),  # nothing stands
    ],
)
def test_the_fastest_length_comes_into_force(slope, stood, best):
    lengths = DraftLengths(4, trials=2, patience=4, probe_every=10**6)
    assert run(lengths, 20, lambda k: 1 + slope * k, stood)[-4:] == [best] * 4


def test_sizes_of_batches_are_chosen_for_apart():
    lengths = DraftLengths(4, trials=2, patience=4, probe_every=10**6)
    for _ in range(20):
        run(lengths, 1, lambda k: 1 + 0.1 * k, 4, batch=1)
        run(lengths, 1, lambda k: 1 + 2.0 * k, 4, batch=8)
    assert [lengths.length(b) for b in (1, 5, 8)] == [4, 0, 0]
    assert lengths.length(9) == 0 and lengths.length(0) == 0
    assert lengths.rates(8)[4] == pytest.approx(5 / 9)


def test_a_gain_within_the_margin_or_that_does_not_last_changes_nothing():
    small = DraftLengths(1, margin=0.05, trials=2, patience=4, probe_every=10**6)
    assert run(small, 40, lambda k: 1 + 0.96 * k, 1)[4:] == [0] * 36  # 2 / 1.96 is two per cent better
    big = DraftLengths(1, margin=0.05, trials=2, patience=4, probe_every=10**6)
    # The trial's last step is the first one that finds it better, and the fourth is what makes it so.
    assert run(big, 9, lambda k: 1 + 0.5 * k, 1) == [0, 0, 1, 1, 0, 0, 0, 1, 1]


def test_it_goes_off_where_it_loses_and_comes_on_again_where_it_pays():
    lengths = DraftLengths(2, trials=2, patience=3, probe_every=20)
    assert run(lengths, 30, lambda k: 1 + 0.1 * k, 2)[-1] == 2
    run(lengths, 400, lambda k: 1 + 0.5 * k, 0)  # drafts that no longer hit: the yield falls, and with it the rate
    assert run(lengths, 20, lambda k: 1 + 0.5 * k, 0).count(0) >= 18
    again = run(lengths, 2000, lambda k: 1 + 0.1 * k, 2)
    assert again[-20:].count(2) >= 18
    assert 0 in again[:20]


def test_steps_that_tell_no_seconds_count_for_the_yield_alone():
    lengths = DraftLengths(1, trials=1)
    lengths.stepped(3, 1, [1, 0, 1], None)
    assert lengths.rates(3) == {}
    assert lengths.expected(1) == pytest.approx(1 + (0.995**2 + 1) / (0.995**2 + 0.995 + 1))


def test_nothing_to_draft_is_refused():
    with pytest.raises(ValueError, match="longest is 0"):
        DraftLengths(0)


def test_the_alarm_names_draft_and_policy_versions_when_next_to_nothing_stands():
    watch = AcceptanceWatch(window=100)
    assert watch.verified(60, 1, "model", "0-3", "0-9") is None
    said = watch.verified(60, 0, "model", "0-3", "0-9")
    assert said is not None and said == watch.alarm
    assert "model draft of version 0-3" in said and "policy version 0-9" in said
    assert "acceptance length 1.01 over 120 verifications" in said


def test_the_alarm_is_raised_once_and_ends_when_drafts_hit_again():
    watch = AcceptanceWatch(window=10)
    said = [watch.verified(10, correct, "model", "0-3", "0-9") is not None for correct in (5, 0, 0, 5, 0)]
    assert said == [False, True, False, False, True]
    watch.verified(10, 1, "model", "0-3", "0-9")
    assert watch.alarm is None


def test_passes_without_a_draft_are_no_verifications():
    watch = AcceptanceWatch(window=10)
    for _ in range(100):
        assert watch.verified(0, 0, "ngram", "none", "0-1") is None
