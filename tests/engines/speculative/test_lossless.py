"""The whole engine with each kind of draft: tokens as likely as without, log-probabilities as of a plain pass, greedy ones equal."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rollart.engines.embedded.sampling import RowTransforms, transformed_logprobs
from rollart.engines.speculative import verification
from rollart.engines.speculative.draft import Proposal
from rollart.engines.speculative.head_draft import HeadDraft
from rollart.engines.speculative.model_draft import ModelDraft
from rollart.engines.speculative.ngram_draft import NgramDraft
from rollart.engines.speculative.speculator import Speculator

PROMPT, TOKENS, SAMPLES, SLOTS = (5, 7, 3), 5, 2000, 500
KEPT = (2, 3, 4, 5, 7, 8, 9, 11)
DRAWN = ("near", "stale", "head", "trained")
ALL = ("ngram", *DRAWN, "random")


class RandomDraft:
    """Tokens at even chances, sometimes none at all: as bad a draft as there is."""

    name = "random"
    version = "none"

    def __init__(self, vocabulary):
        self._vocabulary, self._numbers = vocabulary, np.random.default_rng(0)

    def propose(self, asked):
        lengths = self._numbers.integers(0, asked.limits + 1)
        return Proposal.certain([self._numbers.integers(0, self._vocabulary, n).tolist() for n in lengths])

    def ended(self, request):
        pass


@pytest.fixture(scope="module")
def models(small, near):
    """The policy, the next version of it, and one that has nothing to do with them."""
    first, other = small(0), small(9)
    return first, near(first, small(4), 0.5), other


@pytest.fixture(scope="module")
def trained(models, headed):
    return headed(models[0], steps=200)


@pytest.fixture
def speculate(policy, models, near, headed, trained):
    """A speculator of a kind: `near` and `stale` are models that resemble the policy well and not at all, `head` is one with random weights
    over a part of the vocabulary, `trained` one that follows the policy; both are made for the policy that `schedule` serves next."""

    def build(kind, length=3, slots=SLOTS):
        if kind == "none":
            return None
        if kind in ("head", "trained"):
            head = headed(models[0], KEPT) if kind == "head" else trained
            return Speculator(HeadDraft(policy(models[0]), slots, 64, 4096, head, "0-0"), length)
        if kind in ("near", "stale"):
            model = policy(near(models[0], models[2], 0.15) if kind == "near" else models[2])
            return Speculator(ModelDraft(model, model.vocabulary, slots, 64, 4096, "0-0"), length)
        return Speculator(NgramDraft() if kind == "ngram" else RandomDraft(models[0].config.vocab_size), length)

    return build


def samples(finish, asking, scheduler, first_seed=0, n=SAMPLES, tokens=TOKENS, **transform):
    requests = [asking(PROMPT, tokens, seed=first_seed + s, draft_key="task", **transform) for s in range(n)]
    return finish(scheduler, *requests)


def distributions(model, requests, temperature=1.0, top_p=1.0, top_k=-1):
    """p of every place of every response, by a plain pass: [R, T, V]."""
    sequences = torch.tensor([r.tokens for r in requests])
    with torch.no_grad():
        logits = model(sequences).logits[:, len(PROMPT) - 1 : -1].reshape(-1, model.config.vocab_size)
    n = len(logits)
    rows = RowTransforms(np.full(n, temperature, np.float32), np.full(n, top_p, np.float32), np.full(n, top_k, np.int64), np.zeros(n, np.float32))
    return transformed_logprobs(logits, rows).reshape(len(requests), -1, model.config.vocab_size)


def judge(statistics, requests, probabilities):
    """The least of three tests: each token given all before it, by place, by the token before, and by the number of the request's wave."""
    tokens = np.array([r.output_ids for r in requests])
    before = np.column_stack([np.full(len(tokens), PROMPT[-1]), tokens[:, :-1]])
    places = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    p = probabilities.exp().numpy().reshape(-1, probabilities.shape[-1])
    return min(statistics.calibration(tokens.ravel(), p, groups.ravel()) for groups in (places, before, places * 100 + before))


CASES = [(0.7, {}), (1.0, {"top_k": 4}), (0.7, {"top_p": 0.9}), (1.0, {"top_p": 0.8, "top_k": 6})]


@pytest.mark.parametrize(("temperature", "cuts"), CASES, ids=str)
@pytest.mark.parametrize("kind", ALL)
def test_responses_are_as_likely_as_without_speculation(statistics, finish, asking, schedule, speculate, models, kind, temperature, cuts):
    speculator = speculate(kind)
    scheduler = schedule(models[0], SLOTS, speculator=speculator)
    told = samples(finish, asking, scheduler, temperature=temperature, **cuts)
    assert 0 < speculator.tally.correct < speculator.tally.drafted
    p = distributions(models[0], told, temperature, **cuts)
    assert judge(statistics, told, p) > 1e-4
    ids = torch.tensor([r.output_ids for r in told])
    assert torch.tensor([r.logprobs for r in told]) == pytest.approx(p.gather(2, ids[:, :, None])[:, :, 0], abs=1e-4)


@pytest.mark.parametrize("kind", DRAWN)
def test_each_place_and_each_pair_is_as_frequent_as_in_plain_responses(statistics, finish, asking, schedule, speculate, models, kind):
    plain = samples(finish, asking, schedule(models[0], SLOTS), first_seed=10**6, temperature=1.0)
    told = samples(finish, asking, schedule(models[0], SLOTS, speculator=speculate(kind)), temperature=1.0)
    for place in range(TOKENS):
        assert statistics.two_samples(*([r.output_ids[place] for r in side] for side in (plain, told))) > 1e-4
    for place in range(TOKENS - 1):
        assert statistics.two_samples(*([tuple(r.output_ids[place : place + 2]) for r in side] for side in (plain, told))) > 1e-4


@pytest.mark.parametrize("kind", DRAWN)
def test_a_wrong_verifier_is_told_by_the_same_tests(statistics, finish, asking, schedule, speculate, models, kind, monkeypatch):
    monkeypatch.setattr(verification, "accepts", lambda p, q, uniform: p.double() >= 0.5 * q.double())
    told = samples(finish, asking, schedule(models[0], SLOTS, speculator=speculate(kind)), temperature=1.0)
    assert judge(statistics, told, distributions(models[0], told)) < 1e-12
    plain = samples(finish, asking, schedule(models[0], SLOTS), first_seed=10**6, temperature=1.0)
    assert min(
        statistics.two_samples(*([tuple(r.output_ids[place : place + 2]) for r in side] for side in (plain, told))) for place in range(TOKENS - 1)
    ) < 1e-12  # fmt: skip


@pytest.mark.parametrize("kind", ["ngram", "random"])
def test_certain_drafts_leave_every_seed_the_very_tokens_that_it_draws_without(finish, asking, schedule, speculate, models, kind):
    plain = samples(finish, asking, schedule(models[0], SLOTS), n=500, tokens=20, temperature=1.0)
    told = samples(finish, asking, schedule(models[0], SLOTS, speculator=speculate(kind)), n=500, tokens=20, temperature=1.0)
    assert [r.output_ids for r in told] == [r.output_ids for r in plain]


def test_what_a_seed_sampled_before_does_not_bias_what_it_samples_again(statistics, finish, asking, schedule, speculate, models):
    """The draft then proposes tokens that came of the very random numbers which judge them."""
    scheduler = schedule(models[0], SLOTS, speculator=speculate("ngram"))
    first = samples(finish, asking, scheduler, n=1, tokens=20, temperature=1.0)
    again = samples(finish, asking, scheduler, n=1, tokens=20, temperature=1.0)
    assert again[0].output_ids == first[0].output_ids
    assert again[0].correct > first[0].correct


@pytest.mark.parametrize("kind", ALL)
def test_a_swap_in_the_middle_leaves_what_comes_after_to_the_new_weights(statistics, asking, schedule, speculate, models, tmp_path, kind):
    for folder, model in zip(("first", "next"), models, strict=False):
        model.save_pretrained(tmp_path / folder)
    scheduler, told = schedule(models[0], SLOTS, speculator=speculate(kind)), []
    for wave in range(SAMPLES // SLOTS):
        requests = [asking(PROMPT, TOKENS, 1.0, seed=wave * SLOTS + s, draft_key="task") for s in range(SLOTS)]
        for request in requests:
            scheduler.add(request)
        scheduler.step()
        scheduler.step()
        scheduler.swap(scheduler._model.stage(tmp_path / "next"), "0-1")
        while scheduler.has_work:
            scheduler.step()
        scheduler.swap(scheduler._model.stage(tmp_path / "first"), "0-0")
        told += requests
    new = torch.tensor([[v == "0-1" for v, start, end in r.spans for _ in range(start, end)] for r in told])
    assert 0.1 < new.float().mean() < 0.9
    p = torch.where(new[:, :, None], distributions(models[1], told), distributions(models[0], told))
    assert judge(statistics, told, p) > 1e-4
    ids = torch.tensor([r.output_ids for r in told])
    assert torch.tensor([r.logprobs for r in told]) == pytest.approx(p.gather(2, ids[:, :, None])[:, :, 0], abs=1e-4)
    # What the new weights say is something else: the test would tell one from the other.
    assert judge(statistics, told, distributions(models[0], told)) < 1e-12


@pytest.mark.parametrize("kind", ALL)
def test_a_swap_that_keeps_the_kv_leaves_responses_as_likely_as_it_does_without_drafts(
    statistics, asking, schedule, speculate, models, tmp_path, kind
):
    for folder, model in zip(("first", "next"), models, strict=False):
        model.save_pretrained(tmp_path / folder)
    told = {}
    for arm, first_seed in ((kind, 0), ("none", 10**6)):
        scheduler, told[arm] = schedule(models[0], SLOTS, kv="kept", speculator=speculate(arm)), []
        for wave in range(SAMPLES // SLOTS):
            requests = [asking(PROMPT, TOKENS, 1.0, seed=first_seed + wave * SLOTS + s, draft_key="task") for s in range(SLOTS)]
            for request in requests:
                scheduler.add(request)
            scheduler.step()  # the prompts' pass, which is the same one in both arms
            assert all(len(r.output_ids) == 1 for r in requests)
            scheduler.swap(scheduler._model.stage(tmp_path / "next"), "0-1")
            while scheduler.has_work:
                scheduler.step()
            scheduler.swap(scheduler._model.stage(tmp_path / "first"), "0-0")
            told[arm] += requests
    for place in range(TOKENS - 1):
        assert statistics.two_samples(*([tuple(r.output_ids[place : place + 2]) for r in side] for side in told.values())) > 1e-4


@pytest.mark.parametrize(("kind", "after"), [("near", "stale"), ("stale", "near"), ("head", "trained"), ("trained", "head")])
def test_a_swap_of_the_draft_in_the_middle_changes_nothing(statistics, asking, schedule, speculate, models, kind, after):
    speculator, told = speculate(kind), []
    weights = {k: weights_of(speculate(k).draft) for k in (kind, after)}
    scheduler = schedule(models[0], SLOTS, speculator=speculator)
    for wave in range(SAMPLES // SLOTS):
        requests = [asking(PROMPT, TOKENS, 1.0, seed=wave * SLOTS + s) for s in range(SLOTS)]
        for request in requests:
            scheduler.add(request)
        scheduler.step()
        scheduler.step()
        speculator.swap(weights[after](), "0-1")
        while scheduler.has_work:
            scheduler.step()
        speculator.swap(weights[kind](), "0-0")
        told += requests
    assert 0 < speculator.tally.correct < speculator.tally.drafted
    assert judge(statistics, told, distributions(models[0], told)) > 1e-4


def weights_of(draft):
    """Makes what a swap takes, of the weights that the draft began with: each time anew, since a swap uses it up."""
    if isinstance(draft, HeadDraft):
        return lambda: draft._head
    return lambda: draft.stage(draft.model.folder)


@pytest.mark.parametrize("kind", ALL)
def test_greedy_responses_are_equal_wherever_the_first_two_tokens_are_not_about_as_likely(asking, finish, schedule, speculate, models, kind):
    prompts = [(2 + s % 10, 2 + s // 10, 4) for s in range(60)]
    plain = finish(schedule(models[0], SLOTS), *(asking(p, 40) for p in prompts))
    told = finish(schedule(models[0], SLOTS, speculator=speculate(kind, 5)), *(asking(p, 40, draft_key="task") for p in prompts))
    compared = 0
    for one, other in zip(plain, told, strict=True):
        with torch.no_grad():
            top = models[0](torch.tensor([one.tokens])).logits[0, len(one.prompt) - 1 : -1].topk(2).values
        close = np.flatnonzero((top[:, 0] - top[:, 1]).numpy() <= 1e-4)
        sure = int(close[0]) if len(close) else len(one.output_ids)
        assert one.output_ids[:sure] == other.output_ids[:sure]
        compared += sure
    assert compared > 2000


def test_a_draft_that_is_the_policy_is_accepted_to_the_last_token_in_as_few_passes_as_there_can_be(asking, finish, schedule, policy, models):
    model = policy(models[0])
    for temperature in (0.0, 1.0):
        speculator = Speculator(ModelDraft(model, model.vocabulary, 4, 64, 64, "0-0"), 4)
        (one,) = finish(schedule(models[0], 4, speculator=speculator), asking(PROMPT, 21, temperature, seed=3))
        # One token of the prompt's pass, then four drafted and one more in each.
        assert (one.verified, one.drafted, one.correct) == (4, 16, 16)


def test_a_draft_of_tokens_that_can_not_come_is_refused_to_the_last_token_and_changes_nothing(asking, finish, schedule, models):
    class Impossible(RandomDraft):
        def propose(self, asked):
            return Proposal.certain([[1] * n for n in asked.limits.tolist()])

    prompts = [(2 + s, 4, 5) for s in range(8)]
    plain = finish(schedule(models[0]), *(asking(p, 12, 1.0, seed=7, top_k=2) for p in prompts))
    kept = [p for p in plain if 1 not in p.output_ids]
    assert len(kept) >= 3
    told = finish(schedule(models[0], speculator=Speculator(Impossible(12), 3)), *(asking(p.prompt, 12, 1.0, seed=7, top_k=2) for p in kept))
    for one, other in zip(kept, told, strict=True):
        assert other.output_ids == one.output_ids
        # Eleven passes after the prompt's; in the last three fewer than three tokens are left beside the one that is sampled.
        assert (other.verified, other.drafted, other.correct) == (11, 8 * 3 + 2 + 1, 0)
