"""Which rank trains on what: all of the batch once, alike in tokens, the same from the same receipts."""

from __future__ import annotations

import random

import pytest

from rollart.training.shares import shares, spread
from rollart.types import Attempt, Episode, Member, Receipt, Score


def members(lengths: list[int], unsampled: tuple[int, ...] = ()) -> list[Member]:
    found = []
    for i, tokens in enumerate(lengths):
        attempt = Attempt(Episode("toy", i), 0)
        receipt = Receipt(attempt, f"n{i}", 0, "file", i, "terminated", 0, 0, tokens, 0 if i in unsampled else 1, 1)
        found.append(Member(receipt, Score(attempt, f"n{i}", 0.0)))
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_every_member_is_in_one_share_under_its_number_whatever_order_they_came_in(ranks: int) -> None:
    batch = members([5, 9, 2, 7, 7, 1, 30, 4], unsampled=(3,))
    found = shares(batch, ranks, 2)
    assert sorted(pair for share in found for pair in ((n, m.receipt.row) for n, m in share)) == [(i, i) for i in range(8)]
    assert all([n for n, _ in share] == sorted(n for n, _ in share) for share in found)
    assert shares(random.Random(0).sample(batch, len(batch)), ranks, 2) == found


def test_each_minibatch_is_spread_by_tokens() -> None:
    # Dealt out in turn, the minibatches are the members of even and of odd number.
    batch = members([8, 100, 5, 60, 4, 50, 3, 10])
    one, other = ([m.receipt.row for _, m in share] for share in shares(batch, 2, 2))
    assert [row for row in one if row % 2 == 0] == [0, 6]  # 8 + 3 against 5 + 4
    assert [row for row in other if row % 2 == 0] == [2, 4]
    assert [row for row in one if row % 2] == [1, 7]  # 100 + 10 against 60 + 50
    assert [row for row in other if row % 2] == [3, 5]


def test_no_rank_has_more_than_a_longest_trajectory_over_another() -> None:
    rng = random.Random(1)
    receipts = [m.receipt for m in members([rng.randrange(1, 400) for _ in range(200)])]
    for ranks in (2, 5, 8):
        tokens = [sum(receipts[i].tokens for i in places) for places in spread(receipts, ranks)]
        assert max(tokens) - min(tokens) <= max(r.tokens for r in receipts)
        assert max(tokens) <= 1.02 * sum(tokens) / ranks


def test_ranks_without_work_get_none() -> None:
    assert [len(share) for share in shares(members([3, 2]), 4, 1)] == [1, 1, 0, 0]
    assert shares([], 2, 1) == [[], []]
