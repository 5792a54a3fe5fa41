"""What the n-gram draft remembers, guesses and forgets."""

from __future__ import annotations

import numpy as np
import pytest

from rollart.engines.embedded.sampling import RowTransforms
from rollart.engines.speculative.draft import Asked
from rollart.engines.speculative.ngram_draft import NgramDraft
from rollart.engines.speculative.ngram_index import NgramIndex


def drafted(draft, *requests, limit=4):
    """What it proposes for each."""
    n = len(requests)
    tokens = np.zeros((n, 200), dtype=np.int64)
    for row, request in enumerate(requests):
        tokens[row, : len(request.tokens)] = request.tokens
    totals = np.array([len(r.tokens) for r in requests])
    rows = RowTransforms(np.ones(n, np.float32), np.ones(n, np.float32), np.full(n, -1), np.zeros(n, np.float32))
    limits = np.broadcast_to(np.asarray(limit), n)
    proposal = draft.propose(Asked(requests, np.arange(n), tokens, totals, limits, rows, np.zeros(n, np.uint64)))
    assert not proposal.drawn.any()
    return [proposal.ids[i, :k].tolist() for i, k in enumerate(proposal.lengths)]


def say(request, *tokens):
    for token in tokens:
        request.append(token, 0.0, "0-0")


def test_it_goes_on_as_the_last_time_that_the_same_tokens_stood_there():
    index = NgramIndex()
    index.extend([1, 2, 3, 4, 5, 9, 1, 2], 0)
    assert index.continuation([7, 1, 2], 3, least=0.0) == [3, 4, 5]
    assert index.continuation([2, 1], 3) == []
    assert index.continuation([2], 3) == []


def test_the_longer_context_decides_then_the_more_frequent_token_then_the_later_one():
    index = NgramIndex()
    index.extend([1, 2, 3, 10], 0)
    index.extend([8, 2, 3, 20], 0)
    assert index.continuation([9, 2, 3], 1) == [20]
    assert index.continuation([1, 2, 3], 1) == [10]
    index.extend([7, 2, 3, 10], 0)
    assert index.continuation([9, 2, 3], 1) == [10]


def test_a_draft_is_the_longer_the_longer_and_the_oftener_seen_its_match_is():
    text, index = list(range(10, 30)), NgramIndex()
    index.extend(text, 0)
    # Half as likely with each token, until six are known to have stood there; from then on hardly any less.
    assert index.continuation(text[3:5], 9) == text[5:6]
    assert index.continuation(text[3:9], 9) == text[9:18]
    for _ in range(2):
        index.extend(text, 0)
    assert index.continuation(text[3:5], 9) == text[5:10]  # 3 of 4 times each, then 3 of 3.1 as six are known: 0.306, and 0.296 with a sixth
    assert index.continuation(text[3:5], 9, least=0.5) == text[5:7]  # 0.75 ** 2


def test_nothing_is_drafted_where_different_tokens_came_after_the_same_ones():
    index = NgramIndex()
    for token in (40, 41, 42):
        index.extend([2, 3, 4, token], 0)
    assert index.continuation([2, 3, 4], 1, least=0.0) == [42]
    assert index.continuation([2, 3, 4], 1) == []
    index.extend([2, 3, 4, 41], 0)
    index.extend([2, 3, 4, 41], 0)
    assert index.continuation([2, 3, 4], 1) == [41]


def test_what_is_removed_counts_no_longer_and_leaves_nothing_behind():
    index, texts = NgramIndex(), [[1, 2, 3, 4, 1, 2, 3, 5], [1, 2, 3, 4], [1, 2, 9]]
    for text in texts:
        index.extend(text[:3], 0)
        index.extend(text, 3)
    index.remove(texts[0])
    assert index.continuation([1, 2, 3], 1) == [4]
    index.remove(texts[1])
    assert index.continuation([0, 1, 2], 1) == [9]
    index.remove(texts[2])
    assert len(index) == 0


def test_a_request_draws_on_its_own_tokens_as_they_come(asking):
    draft, one = NgramDraft(least=0.0), asking([4, 5, 6, 7, 4], 50)
    assert drafted(draft, one) == [[]]
    say(one, 5)
    assert drafted(draft, one) == [[6, 7, 4, 5]]
    say(one, 8, 4, 5)
    assert drafted(draft, one, limit=1) == [[8]]  # as often as 6, and later


def test_requests_of_one_key_draw_on_each_other_and_others_do_not(asking):
    draft = NgramDraft(least=0.0)
    one, two, three, alone, also = (asking([2, 3], 50, draft_key=key) for key in ("a", "a", "b", None, None))
    drafted(draft, one, alone)
    say(one, 4, 5)
    say(alone, 4, 5)
    drafted(draft, one, alone)
    assert drafted(draft, two, three, also) == [[4, 5], [], []]
    draft.ended(one)
    assert drafted(draft, two) == [[4, 5]]


def test_what_ended_is_kept_up_to_the_bound_the_key_used_longest_ago_going_first(asking):
    draft = NgramDraft(least=0.0, tokens=25)
    for key in ("a", "b", "a", "c"):
        one = asking([2, 3, 4, ord(key)], 50, draft_key=key)
        drafted(draft, one)
        say(one, 7, 8, 9, 10)
        draft.ended(one)
    assert draft.remembered == 24  # of 32; b's was used before a's second
    told = {key: drafted(draft, asking([3, 4, ord(key)], 50, draft_key=key))[0] for key in "abc"}
    assert told == {"a": [7, 8, 9, 10], "b": [], "c": [7, 8, 9, 10]}


def test_a_request_longer_than_all_that_may_be_kept_is_not(asking):
    draft, one = NgramDraft(least=0.0, tokens=5), asking([2, 3, 4, 2, 3, 4], 50, draft_key="a")
    drafted(draft, one)
    draft.ended(one)
    assert draft.remembered == 0
    assert draft._shelves == {} and draft._where == {}


def test_many_requests_leave_no_more_than_the_bound(asking):
    draft, numbers = NgramDraft(least=0.0, tokens=500), np.random.default_rng(0)
    for i in range(300):
        one = asking(numbers.integers(0, 50, 20).tolist(), 50, draft_key=str(i % 7) if i % 3 else None)
        drafted(draft, one)
        draft.ended(one)
    assert 480 < draft.remembered <= 500
    assert sum(len(s.index) for s in draft._shelves.values()) <= 4 * 500
    assert draft._where == {}


@pytest.mark.parametrize("limits", [[0, 2], [2, 0]])
def test_nothing_is_drafted_where_nothing_is_wanted(asking, limits):
    draft = NgramDraft(least=0.0)
    found = drafted(draft, asking([2, 3, 4, 2, 3], 9), asking([2, 3, 4, 2, 3], 9), limit=limits)
    assert [len(f) for f in found] == limits
