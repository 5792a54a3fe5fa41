"""What speculation must not change about a scheduler: stops, streams, aborts, pauses, slots under pressure; and what it counts."""

from __future__ import annotations

import pytest

from rollart.engines.embedded.wire import reply
from rollart.engines.speculative.draft import DraftError, Proposal
from rollart.engines.speculative.model_draft import ModelDraft
from rollart.engines.speculative.ngram_draft import NgramDraft
from rollart.engines.speculative.speculator import Speculator

PROMPT = (5, 7, 3)


class Told:
    """Drafts what it is told that a request will say."""

    name = "told"
    version = "none"

    def __init__(self, responses):
        self._responses, self.left = responses, []

    def propose(self, asked):
        return Proposal.certain(
            [self._responses[r.prompt][len(r.output_ids) : len(r.output_ids) + n] for r, n in zip(asked.requests, asked.limits.tolist(), strict=True)]
        )

    def ended(self, request):
        self.left.append(request)


@pytest.fixture
def model(small):
    return small(0)


@pytest.fixture
def told(finish, asking, schedule, model):
    """A draft that knows the greedy response to PROMPT and others."""
    prompts = [PROMPT, *((2 + i, 4, 3) for i in range(8))]
    plain = finish(schedule(model, 16), *(asking(p, 30) for p in prompts))
    return Told({p.prompt: p.output_ids for p in plain})


def test_a_stop_token_inside_what_stands_ends_the_response_there(asking, finish, schedule, model, told):
    response = told._responses[PROMPT]
    at = next(i for i in range(2, 30) if response[i] not in response[:i] and (i - 1) % 5 not in (4,))
    (one,) = finish(schedule(model, speculator=Speculator(told, 4)), asking(PROMPT, 30, stop=[response[at]]))
    assert one.output_ids == response[: at + 1]
    assert one.finish == {"type": "stop", "matched": response[at]}
    assert len(one.logprobs) == at + 1
    assert one.spans == [("0-0", 0, at + 1)]
    assert one.correct <= at


@pytest.mark.parametrize("tokens", [1, 2, 3, 6, 7])
def test_no_response_is_longer_than_asked_for(asking, finish, schedule, model, told, tokens):
    (one,) = finish(schedule(model, speculator=Speculator(told, 4)), asking(PROMPT, tokens))
    assert one.output_ids == told._responses[PROMPT][:tokens]
    assert one.finish == {"type": "length", "length": tokens}
    # What may not come any more is not drafted.
    assert one.drafted <= max(tokens - 2, 0)


def test_the_prefix_that_a_speculated_response_leaves_is_as_good_as_any(asking, finish, schedule, model, told):
    scheduler = schedule(model, speculator=Speculator(told, 4))
    (one,) = finish(scheduler, asking(PROMPT, 20, stop=[told._responses[PROMPT][12]]))
    longer = (*one.tokens, 4, 5)
    (again,) = finish(scheduler, asking(longer, 6, speculate=False))
    (plain,) = finish(schedule(model), asking(longer, 6))
    assert again.cached_tokens == len(one.tokens) - 1
    assert again.output_ids == plain.output_ids
    assert again.logprobs == pytest.approx(plain.logprobs, abs=1e-4)


def test_a_stream_hears_of_every_pass_that_reaches_its_next_interval(asking, finish, schedule, model, told):
    lengths = []
    report = lambda requests: lengths.extend(len(r.output_ids) for r in requests)  # noqa: E731
    scheduler = schedule(model, speculator=Speculator(told, 4), report=report, stream_interval=3)
    finish(scheduler, asking(PROMPT, 15, streaming=True))
    assert lengths == [6, 11, 15]  # of 1, 6, 11 and 15 tokens after each pass, 1 has not reached 3 yet


def test_a_request_that_wants_no_drafts_gets_none_and_says_nothing_of_them(asking, finish, schedule, model, told):
    other = (2, 4, 3)
    speculator = Speculator(told, 4)
    one, two = finish(schedule(model, speculator=speculator), asking(PROMPT, 20, speculate=False), asking(other, 20))
    assert one.output_ids == told._responses[PROMPT][:20]
    assert (one.verified, one.drafted, one.correct) == (0, 0, 0)
    assert not [k for k in reply(one, "0-0", False)["meta_info"] if k.startswith("spec_")]
    meta = reply(two, "0-0", False)["meta_info"]
    # One token, then three times five, and four: of the fourth pass three were drafted.
    assert {k: v for k, v in meta.items() if k.startswith("spec_")} == {
        "spec_verify_ct": 4, "spec_num_proposed_drafts": 15, "spec_num_correct_drafts": 15, "spec_accept_length": 20 / 4,
        "spec_accept_rate": 1.0,
    }  # fmt: skip
    assert (speculator.tally.verified, speculator.tally.drafted, speculator.tally.correct) == (4, 15, 15)


def test_without_a_draft_a_reply_says_nothing_of_one(asking, finish, schedule, model):
    (one,) = finish(schedule(model), asking(PROMPT, 5))
    assert not [k for k in reply(one, "0-0", False)["meta_info"] if k.startswith("spec_")]


@pytest.mark.parametrize("kind", ["ngram", "model"])
def test_aborts_and_pauses_leave_the_rest_as_it_would_be(asking, finish, schedule, policy, small, model, kind):
    draft = NgramDraft() if kind == "ngram" else ModelDraft(policy(small(3)), 12, 4, 64, 8, "0-0")
    scheduler = schedule(model, 4, chunk=8, speculator=Speculator(draft, 3))
    prompts = [tuple(2 + (i * j) % 10 for j in range(3 + 5 * (i % 4))) for i in range(12)]
    requests = [asking(p, 20, 1.0, seed=i, draft_key="t") for i, p in enumerate(prompts)]
    for request in requests:
        scheduler.add(request)
    for _ in range(6):
        scheduler.step()
    scheduler.abort(lambda r: r in requests[::5])
    scheduler.pause("retract")
    assert scheduler.running == 0
    scheduler.resume()
    for _ in range(3):
        scheduler.step()
    scheduler.pause("in_place")
    scheduler.resume()
    while scheduler.has_work:
        scheduler.step()
    plain = finish(schedule(model), *(asking(p, 20, 1.0, seed=i, speculate=False) for i, p in enumerate(prompts)))
    for i, (one, other) in enumerate(zip(requests, plain, strict=True)):
        if i % 5 == 0:
            assert one.finish["type"] in ("abort", "length")
        elif kind == "ngram":
            assert one.output_ids == other.output_ids
        else:
            assert len(one.output_ids) == 20
    if kind == "ngram":
        assert draft._where == {} and all(not s.running for s in draft._shelves.values())


def test_every_request_that_ends_is_told_to_the_draft_once(asking, finish, schedule, model, told):
    scheduler = schedule(model, 2, speculator=Speculator(told, 2))
    requests = [asking((2 + i, 4, 3), 5) for i in range(5)]
    for request in requests:
        scheduler.add(request)
    scheduler.step()
    scheduler.abort(lambda r: r in (requests[0], requests[4]))
    while scheduler.has_work:
        scheduler.step()
    assert sorted(map(id, told.left)) == sorted(map(id, requests))


def test_the_models_draft_is_as_good_after_a_retraction_as_without_one(asking, schedule, policy, model):
    """What it had read of the request stands for its tokens still, in whatever slot: all is accepted, before and after."""
    same = policy(model)
    scheduler = schedule(model, 4, speculator=Speculator(ModelDraft(same, 12, 4, 64, 64, "0-0"), 3))
    requests = [asking((2 + i, 4, 3), 25, 1.0, seed=i) for i in range(4)]
    for request in requests:
        scheduler.add(request)
    for _ in range(3):
        scheduler.step()
    scheduler.pause("retract")
    scheduler._waiting.rotate(1)
    scheduler.resume()
    while scheduler.has_work:
        scheduler.step()
    assert all(r.correct == r.drafted > 15 for r in requests)


def test_a_draft_models_own_swap_drops_what_the_old_weights_had_computed(asking, schedule, policy, model, small, tmp_path):
    wrong = policy(small(5))
    draft = ModelDraft(wrong, 12, 4, 64, 64, "0-0")
    scheduler = schedule(model, 4, speculator=Speculator(draft, 3))
    one = asking(PROMPT, 40, 1.0, seed=1)
    scheduler.add(one)
    for _ in range(4):
        scheduler.step()
    assert one.correct < one.drafted
    model.save_pretrained(tmp_path / "right")
    draft.swap(draft.model.stage(tmp_path / "right"), "0-1")
    refused = one.drafted - one.correct
    while scheduler.has_work:
        scheduler.step()
    assert one.drafted - one.correct == refused
    assert draft.version == "0-1"


def test_a_draft_of_another_vocabulary_is_refused(policy, small):
    with pytest.raises(DraftError, match="the draft's vocabulary has 16 tokens and the policy's 12"):
        ModelDraft(policy(small(0, vocabulary=16)), 12, 4, 64, 64, "0-0")


def test_a_deterministic_engine_does_not_speculate(schedule, model):
    with pytest.raises(ValueError, match="not deterministic"):
        schedule(model, speculator=Speculator(NgramDraft(), 3), deterministic=True)
