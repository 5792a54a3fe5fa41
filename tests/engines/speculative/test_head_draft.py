"""A head's drafts: from the state that they should be from, whatever happened to a request; and how they fare and are exchanged."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rollart.drafts.folder import save_head
from rollart.engines.embedded.model import WeightsError
from rollart.engines.embedded.sampling import transformed_logprobs
from rollart.engines.speculative.draft import DraftError, rows_at
from rollart.engines.speculative.head_draft import HeadDraft
from rollart.engines.speculative.speculator import Speculator

PROMPT = (5, 7, 3)
KEPT = (2, 3, 4, 5, 7, 8, 9, 11)


@pytest.fixture
def model(small):
    return small(0)


class Checked(HeadDraft):
    """Compares all that it proposes with what `model`, which is the policy, and the head say of the request's tokens from scratch."""

    def __init__(self, model, served, *arguments):
        super().__init__(served, *arguments)
        self.model, self.served, self.checked, self.without = model, served, 0, 0

    def propose(self, asked):
        proposal = super().propose(asked)
        for row in np.flatnonzero(asked.limits).tolist():
            if not proposal.lengths[row]:
                self.without += 1
                continue
            assert proposal.lengths[row] == asked.limits[row]
            self.check(asked, proposal, row)
        return proposal

    def check(self, asked, proposal, row):
        model, head = self.model, self._head
        tokens = asked.tokens[asked.slots[row], : asked.totals[row]].tolist()
        assert tokens == asked.requests[row].tokens
        hidden = model.model(torch.tensor([tokens[:-1]])).last_hidden_state
        said = [*tokens[1:]]
        for place in range(int(proposal.lengths[row])):
            features = head(hidden, model.get_input_embeddings()(torch.tensor([said])), torch.arange(len(said)).unsqueeze(0))
            logprobs = transformed_logprobs(head.logits(features[:, -1]), rows_at(asked.rows, np.array([row])))
            token = int(proposal.ids[row, place])
            if proposal.drawn[row]:
                q = torch.zeros(self.served.vocabulary)
                q[head.kept] = logprobs[0].exp()
                assert proposal.q[row, place] == pytest.approx(q, abs=2e-4)
                assert q[token] > 0
            else:
                assert token == head.kept[logprobs[0].argmax()]
            hidden, said = torch.cat([hidden, features[:, -1:]], 1), [*said, token]
        self.checked += 1


@pytest.fixture
def checked(schedule, model, headed):
    """A scheduler over the model, and its draft that checks itself; of a head with random weights and a part of the vocabulary."""

    def build(slots=4, chunk=8, reads=64):
        scheduler = schedule(model, slots, chunk=chunk)
        draft = Checked(model, scheduler._model, slots, 64, reads, headed(model, KEPT), "0-0")
        scheduler.speculator = Speculator(draft, 3)
        return scheduler, draft

    return build


def prompts_of(n):
    return [tuple(2 + (i * j) % 10 for j in range(3 + 5 * (i % 4))) for i in range(n)]


def run(scheduler):
    while scheduler.has_work:
        scheduler.step()


def test_drafts_come_of_the_very_hidden_states_and_features_through_aborts_pauses_and_slots_under_pressure(checked, asking):
    scheduler, draft = checked()
    requests = [asking(p, 20, (1.0, 0.7, 0.0)[i % 3], seed=i, top_k=(-1, 5)[i % 2]) for i, p in enumerate(prompts_of(12))]
    for request in requests:
        scheduler.add(request)
    for _ in range(6):
        scheduler.step()
    scheduler.abort(lambda r: r in requests[::5])
    scheduler.pause("retract")
    scheduler._waiting.rotate(1)
    scheduler.resume()
    for _ in range(3):
        scheduler.step()
    scheduler.pause("in_place")
    scheduler.resume()
    run(scheduler)
    assert draft.checked > 60
    assert draft.without == 0


def test_drafts_go_on_from_a_prefix_of_the_same_slot_and_of_another(checked, asking, finish):
    scheduler, draft = checked(slots=3)
    (first,) = finish(scheduler, asking((5, 7, 3, 4, 6, 8, 2, 9, 3, 5, 7), 12, 1.0, seed=1))
    turn = tuple(first.tokens)
    # The first of them takes the slot over, the second one copies from it, and other tokens follow the same prefix in both.
    two = finish(scheduler, asking((*turn, 4, 5), 10, 1.0, seed=2), asking((*turn, 9, 8), 10, 1.0, seed=3))
    assert [r.cached_tokens for r in two] == [len(turn) - 1, len(turn) - 1]
    # Nothing but its last token is computed of a prompt that was there before; then one that parts in the middle of a slot's tokens.
    (again,) = finish(scheduler, asking(two[1].prompt, 10, 1.0, seed=4))
    (parted,) = finish(scheduler, asking((*turn[:12], 8, 8, 8), 10, 1.0, seed=5))
    assert (again.cached_tokens, parted.cached_tokens) == (len(again.prompt) - 1, 12)
    assert draft.checked > 20
    assert draft.without == 0


@pytest.mark.parametrize("kind", ["llama_untied", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_hidden_states_are_the_ones_after_the_final_norm_in_every_architecture(tiny, schedule, headed, asking, finish, kind):
    model = tiny.model(kind)
    scheduler = schedule(model, 4)
    draft = Checked(model, scheduler._model, 4, 64, 64, headed(model), "0-0")
    scheduler.speculator = Speculator(draft, 3)
    (one,) = finish(scheduler, asking(tiny.prompt(20), 12))
    assert one.output_ids == tiny.greedy(model, tiny.prompt(20), 12)
    assert draft.checked > 2


def test_a_long_prompt_that_comes_in_pieces_is_drafted_for_once_it_is_read(checked, asking, finish):
    scheduler, draft = checked(chunk=4, reads=4)
    finish(scheduler, asking(tuple(2 + i % 9 for i in range(30)), 12, 1.0, seed=1), asking(PROMPT, 20, 1.0, seed=2))
    # Four places a pass beside one a request, so that seven passes of the long one are without; the other one goes on.
    assert 4 <= draft.without <= 8
    assert draft.checked > 8


def test_after_a_swap_of_the_policy_drafts_come_of_its_new_hidden_states(checked, asking, small, tmp_path):
    scheduler, draft = checked()
    requests = [asking(p, 25, 1.0, seed=i) for i, p in enumerate(prompts_of(6))]
    for request in requests:
        scheduler.add(request)
    following = small(4)
    following.save_pretrained(tmp_path / "next")
    for _ in range(5):
        scheduler.step()
    scheduler.swap(scheduler._model.stage(tmp_path / "next"), "0-1")
    draft.model = following
    before = draft.checked
    run(scheduler)
    assert {v for r in requests for v, _, _ in r.spans} == {"0-0", "0-1"}
    assert draft.checked > before > 0
    assert draft.without == 0


@pytest.mark.parametrize("kept", [KEPT, (2, 3, 5)])
def test_a_swap_of_the_head_reads_what_is_known_anew_with_its_weights_also_with_another_vocabulary(checked, asking, headed, model, tmp_path, kept):
    scheduler, draft = checked()
    requests = [asking(p, 25, 1.0, seed=i) for i, p in enumerate(prompts_of(4))]
    for request in requests:
        scheduler.add(request)
    for _ in range(6):
        scheduler.step()
    save_head(headed(model, kept, seed=3), tmp_path / "head")
    scheduler.speculator.swap(scheduler.speculator.stage(tmp_path / "head"), "0-3")
    before = draft.checked
    run(scheduler)
    assert (draft.version, scheduler.speculator.loads["draft_version"]) == ("0-3", "0-3")
    assert draft.checked > before > 0


def test_without_a_head_nothing_is_drafted_until_one_comes_for_requests_under_way_too(checked, asking, headed, model, tmp_path):
    scheduler, draft = checked()
    draft._head, draft.version = None, "none"
    one = asking((*PROMPT, *range(2, 12)), 30, 1.0, seed=1)
    scheduler.add(one)
    for _ in range(8):
        scheduler.step()
    assert (one.drafted, one.verified) == (0, 6)
    save_head(headed(model, KEPT), tmp_path / "head")
    (tmp_path / "bare").mkdir()
    (tmp_path / "head" / "model.safetensors").rename(tmp_path / "bare" / "model.safetensors")
    with pytest.raises(WeightsError, match=r"bare/config.json cannot be read"):
        scheduler.speculator.stage(tmp_path / "bare")
    (tmp_path / "bare" / "model.safetensors").rename(tmp_path / "head" / "model.safetensors")
    scheduler.speculator.swap(scheduler.speculator.stage(tmp_path / "head"), "0-1")
    run(scheduler)
    assert draft.checked > 3
    # From here on the sizes are known, and weights alone will do.
    (tmp_path / "head" / "config.json").unlink()
    assert scheduler.speculator.stage(tmp_path / "head").config == draft._head.config


def test_a_place_whose_hidden_state_was_never_handed_over_yields_no_draft(checked, asking, finish):
    scheduler, draft = checked()
    one = asking((*PROMPT, *range(2, 12)), 20, 1.0, seed=1)
    scheduler.add(one)
    for _ in range(4):
        scheduler.step()
    draft._known[one.slot] -= 8
    checked_before = draft.checked
    run(scheduler)
    assert draft.checked == checked_before
    assert draft.without > 3
    assert len(one.output_ids) == 20
    # Its slot's next request, which computes all of its places, is drafted for again.
    finish(scheduler, asking((9, 9, 9, 9), 10, 1.0, seed=2))
    assert draft.checked > checked_before


def test_with_kept_kv_a_policys_swap_leaves_the_hidden_states_of_what_is_not_computed_again(schedule, asking, model, headed, small, tmp_path):
    scheduler = schedule(model, 4, kv="kept")
    draft = HeadDraft(scheduler._model, 4, 64, 64, headed(model), "0-0")
    scheduler.speculator = Speculator(draft, 3)
    one = asking(PROMPT, 30, 1.0, seed=1)
    scheduler.add(one)
    for _ in range(4):
        scheduler.step()
    slot, known = one.slot, int(draft.state[0][one.slot])
    places = int(scheduler._table.computed[slot])
    before = draft._hidden[slot, :places].clone()
    small(4).save_pretrained(tmp_path / "next")
    scheduler.swap(scheduler._model.stage(tmp_path / "next"), "0-1")
    drafted = one.drafted
    scheduler.step()
    assert torch.equal(draft._hidden[slot, :places], before)
    assert draft.state[0][slot] > places
    assert known >= places
    assert one.drafted > drafted
    run(scheduler)
    assert len(one.output_ids) == 30


def test_a_head_that_was_trained_is_accepted_far_more_than_a_random_one(schedule, asking, finish, model, headed):
    lengths = {}
    for steps in (0, 200):
        scheduler = schedule(model, 16)
        speculator = Speculator(HeadDraft(scheduler._model, 16, 64, 4096, headed(model, steps=steps), "0-0"), 3)
        scheduler.speculator = speculator
        finish(scheduler, *(asking(PROMPT, 12, 1.0, seed=s) for s in range(200)))
        lengths[steps] = speculator.loads["spec_accept_length"]
    assert lengths[200] > lengths[0] + 0.5


def test_a_head_for_another_policy_is_refused_with_what_differs(policy, model, small, headed, tmp_path):
    other = small(0, layers=2, vocabulary=16)
    with pytest.raises(DraftError, match=r"num_hidden_layers 1 \(the policy has 2\), vocab_size 12 \(the policy has 16\)"):
        HeadDraft(policy(other), 4, 64, 64, headed(model), "0-0")
    save_head(headed(other), tmp_path)
    speculator = Speculator(HeadDraft(policy(model), 4, 64, 64, headed(model), "0-0"), 3)
    with pytest.raises(WeightsError, match=r"num_hidden_layers 2 \(the policy has 1\)"):
        speculator.stage(tmp_path)
    assert speculator.draft.version == "0-0"


def test_the_hidden_states_follow_the_policys_cache_to_another_slot_and_no_further(policy, model, headed):
    draft = HeadDraft(policy(model), 3, 64, 64, headed(model), "0-0")
    draft._known[:], draft._read[:] = (20, 9, 0), (19, 9, 0)
    draft._hidden[0] = torch.arange(64.0).unsqueeze(1).expand(64, 32)
    draft.placed(2, 0, 12)
    assert (draft.state[0].tolist(), draft.state[1].tolist()) == ([20, 9, 12], [19, 9, 11])
    assert torch.equal(draft._hidden[2, :12], draft._hidden[0, :12])
    draft.placed(1, 1, 9)
    draft.placed(0, 0, 0)
    assert (draft.state[0].tolist(), draft.state[1].tolist()) == ([0, 9, 12], [0, 8, 11])
