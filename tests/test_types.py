"""What crosses borders: segments that always line up, engine replies that are read or refused, versions as text."""

import copy
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.types import (
    NOT_SAMPLED,
    Attempt,
    Batch,
    Episode,
    GenerateRequest,
    GenerateResult,
    Group,
    Member,
    Receipt,
    SamplingTransform,
    Score,
    Segment,
    SegmentError,
    Trajectory,
    Version,
)

ATTEMPT = Attempt(Episode("lake", 3), 2)

prompts = st.tuples(st.just("prompt"), st.lists(st.integers(0, 500), max_size=5))
responses = st.tuples(
    st.just("response"), st.lists(st.tuples(st.integers(0, 500), st.floats(-50, 0), st.integers(0, 9)), max_size=5), st.floats(-2, 2)
)


def grown(*pieces: tuple[str, Any]) -> Segment:
    segment = Segment()
    for piece in pieces:
        if piece[0] == "prompt":
            segment.append_prompt(piece[1])
        else:
            ids, logprobs, versions = ([token[i] for token in piece[1]] for i in range(3))
            segment.append_response(ids, logprobs, versions, "stop")
    return segment


@settings(max_examples=150, deadline=None)
@given(st.lists(prompts | responses, max_size=8))
def test_a_segment_that_was_grown_lines_up_and_tells_sampled_tokens_from_given_ones(pieces: list[Any]) -> None:
    segment = grown(*pieces)
    segment.check()
    expected: list[tuple[int, int, float, int]] = []
    spans = []
    for kind, tokens, *_ in pieces:
        start = len(expected)
        expected += [(i, 0, 0.0, NOT_SAMPLED) for i in tokens] if kind == "prompt" else [(i, 1, p, v) for i, p, v in tokens]
        spans += [(start, len(expected))] if kind == "response" else []
    assert list(zip(segment.ids, segment.mask, segment.logprobs, segment.versions, strict=True)) == expected
    assert [(t.start, t.end) for t in segment.turns] == spans
    assert segment.sampled == sum(end - start for start, end in spans)


@settings(max_examples=80, deadline=None)
@given(st.lists(prompts | responses, min_size=1, max_size=6), st.sampled_from(["ids", "mask", "logprobs", "versions"]), st.booleans())
def test_a_segment_whose_columns_differ_in_length_is_never_made(pieces: list[Any], column: str, longer: bool) -> None:
    values = {name: copy.copy(getattr(grown(*pieces), name)) for name in ("transform", "kv", "ids", "mask", "logprobs", "versions", "turns")}
    if not longer and not values[column]:
        return
    values[column] = [*values[column], 0] if longer else values[column][:-1]
    with pytest.raises(SegmentError):
        Segment(**values)


@pytest.mark.parametrize(
    ("ids", "logprobs", "versions", "message"),
    [
        ([1, 2], [-0.1], [0, 0], "2 ids, 1 logprobs and 2 versions"),
        ([1], [-0.1], [], "1 ids, 1 logprobs and 0 versions"),
        ([1], [0.5], [0], "log-probability 0.5"),
        ([1], [float("nan")], [0], "log-probability nan"),
        ([1], [float("-inf")], [0], "log-probability -inf"),
        ([1], [-0.1], [NOT_SAMPLED], "no version"),
    ],
)
def test_a_response_that_could_not_be_trained_on_is_refused_and_leaves_the_segment_as_it_was(
    ids: list[int], logprobs: list[float], versions: list[int], message: str
) -> None:
    segment = grown(("prompt", [7, 8]), ("response", [(9, -0.5, 1)]))
    before = copy.deepcopy(asdict(segment))
    with pytest.raises(SegmentError, match=message):
        segment.append_response(ids, logprobs, versions, "stop")
    assert asdict(segment) == before


def test_turns_out_of_order_are_refused() -> None:
    whole = grown(("response", [(1, -0.1, 0)]), ("response", [(2, -0.1, 0)]))
    with pytest.raises(SegmentError, match="out of order"):
        Segment(ids=whole.ids, mask=whole.mask, logprobs=whole.logprobs, versions=whole.versions, turns=whole.turns[::-1])


def test_a_trajectory_sums_over_its_segments_and_spans_the_versions_that_sampled() -> None:
    first, second = grown(("prompt", [1, 2]), ("response", [(3, -0.1, 4), (4, -0.1, 5)])), grown(("prompt", [1]), ("response", [(5, -0.1, 7)]))
    first.reward_last_turn(0.25)
    second.reward_last_turn(1.0)
    trajectory = Trajectory(ATTEMPT, "n", 0, 1, [first, second], "terminated")
    assert (trajectory.sampled, trajectory.environment_reward, trajectory.version_span) == (3, 1.25, (4, 7))
    assert Trajectory(ATTEMPT, "n", 0, 1, [grown(("prompt", [1]))], "over_length").version_span == (NOT_SAMPLED, NOT_SAMPLED)


def test_a_retry_is_another_attempt_at_the_same_member() -> None:
    assert str(ATTEMPT.retried()) == "train/lake/3/2/1" and ATTEMPT.retried().episode == ATTEMPT.episode


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_score_is_a_finite_number(value: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        Score(ATTEMPT, "n", value)


def member(version: int, score: float, index: int) -> Member:
    attempt = Attempt(Episode("lake", 0), index)
    return Member(Receipt(attempt, "n", 0, "f", 0, "terminated", version, version, 4, 2, 1), Score(attempt, "n", score))


def test_a_group_is_as_old_as_its_oldest_member_and_has_signal_by_spread() -> None:
    mixed = Group(Episode("lake", 0), (member(3, 1.0, 0), member(2, -1.0, 1)))
    alike = Group(Episode("lake", 1), (member(3, 0.1 + 0.2, 0), member(3, 0.3, 1)))
    assert mixed.oldest == 2 and mixed.has_signal and not alike.has_signal
    batch = Batch(0, 3, (mixed, alike))
    assert len(batch.members) == 4


# ---- the wire


def reply(tokens: int = 3, **meta: Any) -> dict[str, Any]:
    """A reply of `POST /generate`, as SGLang writes it."""
    given = {
        "id": "r1", "finish_reason": {"type": "stop", "matched": 2}, "prompt_tokens": 5, "cached_tokens": 4, "weight_version": "0-7",
        "output_token_logprobs": [[-0.5 * i, 10 + i, None] for i in range(tokens)],
    }  # fmt: skip
    return {"text": "", "output_ids": [10 + i for i in range(tokens)], "meta_info": given | meta}


def test_one_version_stands_for_every_token_of_a_reply() -> None:
    result = GenerateResult.from_wire(reply())
    assert result == GenerateResult("r1", (10, 11, 12), (0.0, -0.5, -1.0), (Version(0, 7),) * 3, "stop", 5, 4)


def test_spans_of_versions_win_over_the_single_one() -> None:
    spans = [{"version": "0-6", "start": 0, "end": 1}, {"version": "1-7", "start": 1, "end": 3}]
    assert GenerateResult.from_wire(reply(weight_versions=spans)).versions == (Version(0, 6), Version(1, 7), Version(1, 7))


def test_an_aborted_reply_without_tokens_is_read() -> None:
    result = GenerateResult.from_wire(reply(tokens=0, finish_reason={"type": "abort", "message": "gone"}, output_token_logprobs=None))
    assert (result.ids, result.versions, result.finish_reason) == ((), (), "abort")


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({"output_token_logprobs": None}, "3 ids with 0 log-probabilities"),
        ({"output_token_logprobs": [[-0.1, 10, None]]}, "3 ids with 1 log-probabilities"),
        ({"weight_version": "default"}, "'default' is no version"),
        ({"weight_versions": [{"version": "0-6", "start": 0, "end": 2}]}, "cover 2 of 3"),
        ({"weight_versions": [{"version": "0-6", "start": 0, "end": 2}, {"version": "0-7", "start": 1, "end": 3}]}, "cover 4 of 3"),
    ],
)
def test_a_reply_that_does_not_say_what_sampled_its_tokens_is_refused(meta: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GenerateResult.from_wire(reply(**meta))


def test_a_request_goes_out_with_everything_that_the_distribution_depends_on() -> None:
    transform = SamplingTransform(0.7, 0.9, 40, 0.05)
    body = GenerateRequest("r1", (1, 2), 8, transform, (0,), seed=11, extra_key="0-7", draft_key="maze").to_wire()
    assert (body["rid"], body["input_ids"], body["return_logprob"]) == ("r1", [1, 2], True)
    assert (body["extra_key"], body["draft_key"]) == ("0-7", "maze")
    assert body["sampling_params"] == {
        "max_new_tokens": 8, "temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "stop_token_ids": [0],
        "skip_special_tokens": False, "sampling_seed": 11,
    }  # fmt: skip
    plain = GenerateRequest("r1", (1,), 8).to_wire()
    assert "extra_key" not in plain and "draft_key" not in plain and "sampling_seed" not in plain["sampling_params"]
    assert transform.is_cut and not SamplingTransform(0.7).is_cut


# ---- versions


@given(st.integers(0, 999_999), st.integers(0, 9_999_999_999))
def test_a_version_reads_back_from_its_spelling(lineage: int, step: int) -> None:
    assert Version.parse(str(Version(lineage, step))) == Version(lineage, step)


@pytest.mark.parametrize("text", ["", "7", "0-", "-1-3", "0-7 ", " 0-7", "0-7\n", "v0-7", "0-7-1", "0x1-2", "default"])
def test_anything_else_is_no_version(text: str) -> None:
    with pytest.raises(ValueError, match="is no version: write LINEAGE-STEP"):
        Version.parse(text)


def test_versions_order_by_lineage_then_step_and_count_from_zero() -> None:
    assert sorted([Version(1, 0), Version(0, 9), Version(0, 10)]) == [Version(0, 9), Version(0, 10), Version(1, 0)]
    with pytest.raises(ValueError, match="counts from 0"):
        Version(0, -1)
