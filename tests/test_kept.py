"""Kept sets: what lines up with sampled tokens, what is refused, and what comes back from the wire."""

from __future__ import annotations

import copy
import json
from array import array

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.kept import KeptSets
from rollart.types import GenerateRequest, GenerateResult, SamplingTransform, Segment, SegmentError, Version

places = st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6, unique=True).map(sorted), max_size=8)


def sets(found: list[list[int]]) -> KeptSets:
    return KeptSets.of([i for ids in found for i in ids], [len(ids) for ids in found])


@settings(max_examples=150, deadline=None)
@given(places, st.integers(0, 9))
def test_what_goes_over_the_wire_comes_back_and_its_end_is_its_end(found: list[list[int]], n: int) -> None:
    kept = sets(found)
    assert KeptSets.from_wire(json.loads(json.dumps(kept.to_wire()))) == kept == copy.deepcopy(kept)
    assert kept.last(n) == sets(found[len(found) - min(n, len(found)) :])
    assert sets(found[: len(found) // 2]) + sets(found[len(found) // 2 :]) == kept
    assert kept.wrong([ids[n % len(ids)] for ids in found]) is None


def test_half_a_vocabulary_takes_under_a_byte_an_id_on_the_wire() -> None:
    ids = np.flatnonzero(np.random.default_rng(0).random(50_000) < 0.5)
    assert len(KeptSets.of(ids, [len(ids)]).to_wire()["ids"]) < len(ids)


@pytest.mark.parametrize(
    ("found", "tokens", "message"),
    [
        (sets([[1, 4], [2]]), [4], "2 kept sets were given for 1 sampled tokens"),
        (sets([[1, 4], [2]]), [4, 3], "token 3, sampled at place 1, is not in the set"),
        (sets([[1, 4], [2]]), [2, 2], "token 2, sampled at place 0, is not in the set"),
        (sets([[4, 1]]), [4], "not in ascending order"),
        (sets([[4, 4]]), [4], "not in ascending order"),
        (KeptSets(array("i", [1, 2]), array("i", [1])), [1], "counts come to 1, and 2 ids"),
        (sets([[1], []]), [1, 1], "place 1, is not in the set"),
    ],
)
def test_sets_that_tokens_were_not_drawn_from_are_refused_and_leave_a_segment_as_it_was(found: KeptSets, tokens: list[int], message: str) -> None:
    assert message in str(found.wrong(tokens))
    segment = Segment(SamplingTransform(top_k=2))
    with pytest.raises(SegmentError, match=message):
        segment.append_response(tokens, [-0.1] * len(tokens), [0] * len(tokens), "stop", kept=found)
    assert segment == Segment(SamplingTransform(top_k=2))


def test_a_segment_has_a_set_for_each_sampled_token_or_none_at_all() -> None:
    segment = Segment(SamplingTransform(top_k=2))
    for response, found in (([4, 2], [[1, 4], [2]]), ([7], [[5, 7]])):
        segment.append_prompt([9, 9])
        segment.append_response(response, [-0.1] * len(response), [0] * len(response), "stop", kept=sets(found))
    assert segment.kept == sets([[1, 4], [2], [5, 7]])
    segment.check()
    with pytest.raises(SegmentError, match="some responses of a segment have kept sets"):
        segment.append_response([1], [-0.1], [0], "stop")
    with pytest.raises(SegmentError, match="whose transform cuts nothing"):
        Segment().append_response([1], [-0.1], [0], "stop", kept=sets([[1]]))
    with pytest.raises(SegmentError, match="token 4, sampled at place 0"):
        Segment(segment.transform, "recomputed", segment.ids, segment.mask, segment.logprobs, segment.versions, segment.turns, sets([[1], [2], [7]]))
    bare = Segment(SamplingTransform(top_k=2))
    bare.append_response([1], [-0.1], [0], "stop")
    with pytest.raises(SegmentError, match="some responses of a segment have kept sets"):
        bare.append_response([1], [-0.1], [0], "stop", kept=sets([[1]]))


@pytest.mark.parametrize(
    ("wire", "message"),
    [
        ({"counts": [2], "ids": "!"}, "cannot be read"),
        ({"counts": [2**40], "ids": ""}, "cannot be read"),
        ({"counts": [1], "ids": sets([[1, 2]]).to_wire()["ids"]}, "kept sets of 1 ids came with 2"),
    ],
)
def test_sets_that_cannot_be_read_are_refused(wire: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KeptSets.from_wire(wire)


def test_a_reply_whose_sets_are_not_its_tokens_is_refused_and_one_that_went_on_elsewhere_is_joined() -> None:
    assert GenerateRequest("r", (1,), 4, return_kept=True).to_wire()["return_kept"] is True
    assert "return_kept" not in GenerateRequest("r", (1,), 4).to_wire()

    def reply(ids: list[int], found: KeptSets) -> dict[str, object]:
        meta = {
            "id": "r", "finish_reason": {"type": "abort"}, "weight_version": "0-1", "output_token_logprobs": [[-0.1, i, None] for i in ids],
            "output_kept": found.to_wire(),
        }  # fmt: skip
        return {"output_ids": ids, "meta_info": meta}

    first, then = (GenerateResult.from_wire(reply(ids, sets(found))) for ids, found in (([4, 2], [[1, 4], [2]]), ([7], [[5, 7]])))
    whole = then.after(first)
    assert (whole.ids, whole.kept, whole.versions) == ((4, 2, 7), sets([[1, 4], [2], [5, 7]]), (Version(0, 1),) * 3)
    with pytest.raises(ValueError, match="token 3, sampled at place 0"):
        GenerateResult.from_wire(reply([3], sets([[1, 4]])))
