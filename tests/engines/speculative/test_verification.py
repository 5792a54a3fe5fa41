"""The rule by which drafted tokens stand: exactly, by enumeration, and on chains of tokens by their frequencies."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from rollart.engines.embedded.sampling import RowTransforms, choose, transformed_logprobs, uniforms
from rollart.engines.speculative import verification
from rollart.engines.speculative.draft import Proposal
from rollart.engines.speculative.verification import DRAFT_STREAM, decide, verify

V, LENGTH, N = 5, 4, 40_000


def rows(n, temperature=1.0, top_p=1.0, top_k=-1, min_p=0.0):
    return RowTransforms(
        np.full(n, temperature, np.float32), np.full(n, top_p, np.float32), np.full(n, top_k, np.int64), np.full(n, min_p, np.float32)
    )


def midpoints(n):
    return (np.arange(n) + 0.5) / n


P, Q = np.array([10, 6, 3, 1, 0]) / 20, np.array([4, 8, 8, 0, 0]) / 20


def output_of(drafted, q):
    """The exact distribution of the first token after the draft `drafted`, by a grid of random numbers that both rules fall evenly on."""
    accepting, sampling = (g.ravel() for g in np.meshgrid(midpoints(40), midpoints(140)))
    n = len(accepting)
    logits = torch.tensor(P).log().float().expand(2 * n, V)
    q = None if q is None else torch.tensor(q, dtype=torch.float32).expand(n, 1, V)
    proposal = Proposal(np.full((n, 1), drafted), np.ones(n, np.int64), q, np.full(n, q is not None))
    verdict = decide(logits, proposal, rows(n), np.repeat(sampling, 2), np.repeat(accepting, 2))
    return np.bincount(verdict.ids[:, 0], minlength=V) / n, verdict


def test_a_token_that_was_drawn_leaves_exactly_the_policys_distribution():
    total = sum(Q[d] * output_of(d, Q)[0] for d in range(3))
    assert total == pytest.approx(P, abs=1e-12)


def test_a_drawn_token_stands_with_probability_p_over_q_and_the_rest_comes_from_what_p_has_over_q():
    shares, verdict = output_of(1, Q)
    assert verdict.accepted.mean() == 0.75
    # p - q = (6, -2, -5, 1, 0) / 20
    assert shares == pytest.approx([0.25 * 6 / 7, 0.75, 0, 0.25 / 7, 0], abs=1e-12)
    assert output_of(0, Q)[1].accepted.mean() == 1.0


@pytest.mark.parametrize("drafted", range(V))
def test_a_certain_token_stands_with_its_probability_and_leaves_exactly_the_policys_distribution(drafted):
    shares, verdict = output_of(drafted, None)
    assert shares == pytest.approx(P, abs=1e-12)
    assert verdict.accepted.mean() == pytest.approx(P[drafted], abs=1e-12)


def test_a_wrong_rule_is_told_by_the_enumeration(monkeypatch):
    monkeypatch.setattr(verification, "accepts", lambda p, q, uniform: uniform * 0.5 * q.double() < p.double())
    total = sum(Q[d] * output_of(d, Q)[0] for d in range(3))
    assert np.abs(total - P).max() > 0.05


def test_tokens_without_probability_never_stand_and_never_come():
    logits = torch.tensor([[0.0, -torch.inf, 0.0, -torch.inf]]).expand(4, 4)
    for q in (torch.tensor([0.0, 1.0, 0.0, 0.0]), torch.tensor([0.5, 0.5, 0.0, 0.0]), torch.tensor([1.0, 0.0, 0.0, 0.0])):
        proposal = Proposal(np.array([[1], [3]]), np.ones(2, np.int64), q.expand(2, 1, 4), np.ones(2, bool))
        for u in (0.0, 0.5, np.nextafter(1, 0)):
            verdict = decide(logits, proposal, rows(2), np.full(4, u), np.zeros(4))
            assert verdict.accepted.tolist() == [0, 0]
            assert set(verdict.ids[:, 0].tolist()) <= {0, 2}
            assert np.isfinite(verdict.logprobs[:, 0]).all()


def test_where_p_and_q_are_equal_every_token_stands_and_rounding_can_not_empty_what_is_left():
    logits = torch.randn(200, 7, generator=torch.Generator().manual_seed(0))
    p = logits.log_softmax(-1).exp()
    proposal = Proposal(p[::2].argmax(1, keepdim=True).numpy(), np.ones(100, np.int64), p[::2].unsqueeze(1), np.ones(100, bool))
    assert decide(logits, proposal, rows(100), np.full(200, 0.3), np.full(200, np.nextafter(1, 0))).accepted.all()
    left = verification._left_over(logits.log_softmax(-1)[:1], p[:1])
    assert left.exp()[0] == pytest.approx(p[0].double(), abs=1e-6)


def test_greedy_requests_take_the_likeliest_token_whatever_was_drafted_and_how():
    logits = torch.tensor([[0.0, 3.0, 1.0]]).expand(6, 3)
    q = torch.tensor([0.0, 0.0, 1.0]).expand(2, 2, 3)
    for drawn in (True, False):
        proposal = Proposal(np.array([[1, 1], [2, 1]]), np.array([2, 2]), q, np.full(2, drawn))
        verdict = decide(logits, proposal, rows(2, temperature=0.0), np.full(6, 0.99), np.full(6, 0.99))
        assert verdict.accepted.tolist() == [2, 0]
        assert (verdict.ids[0].tolist(), verdict.ids[1, 0]) == ([1, 1, 1], 1)
        assert verdict.logprobs[0] == pytest.approx(logits[0].log_softmax(-1)[1].item(), abs=1e-6)


def test_requests_of_different_lengths_do_not_touch_each_other():
    """Together as alone: no draft, short and long ones, drawn and certain, greedy and sampled, cut and whole."""
    generator = torch.Generator().manual_seed(3)
    lengths, n = np.array([0, 3, 1, 2, 3]), 5
    firsts = np.cumsum(lengths + 1) - lengths - 1
    logits = torch.randn(int((lengths + 1).sum()), 9, generator=generator)
    q = torch.randn(n, 3, 9, generator=generator).softmax(-1)
    ids, drawn = q.argmax(-1).numpy(), np.array([True, True, False, True, False])
    mixed = RowTransforms(
        np.array([1, 0.7, 1, 0, 1], np.float32), np.array([1, 0.8, 1, 1, 0.9], np.float32), np.array([-1, 4, -1, -1, 3]), np.zeros(n, np.float32)
    )
    seeds, at = np.arange(n, dtype=np.uint64), np.array([4, 9, 2, 30, 7])
    together = verify(logits, Proposal(ids, lengths, q, drawn), mixed, seeds, at)
    for i, k in enumerate(lengths):
        one = slice(i, i + 1)
        own = RowTransforms(mixed.temperature[one], mixed.top_p[one], mixed.top_k[one], mixed.min_p[one])
        alone = verify(logits[firsts[i] : firsts[i] + k + 1], Proposal(ids[one, :k], lengths[one], q[one, :k], drawn[one]), own, seeds[one], at[one])
        assert alone.accepted[0] == together.accepted[i]
        taken = alone.accepted[0] + 1
        assert alone.ids[0, :taken].tolist() == together.ids[i, :taken].tolist()
        assert alone.logprobs[0, :taken] == pytest.approx(together.logprobs[i, :taken], abs=1e-6)


def test_without_drafts_it_samples_as_plain_sampling_does():
    logits = torch.randn(50, 9, generator=torch.Generator().manual_seed(1))
    seeds, at = np.arange(50, dtype=np.uint64), np.arange(50)
    verdict = verify(logits, Proposal.none(50), rows(50, 0.7), seeds, at)
    logprobs = transformed_logprobs(logits, rows(50, 0.7))
    ids = choose(logits, logprobs, rows(50, 0.7), uniforms(seeds, at.astype(np.uint64)))
    assert verdict.ids[:, 0].tolist() == ids.tolist()
    assert verdict.logprobs[:, 0] == pytest.approx(logprobs.gather(1, ids[:, None])[:, 0], abs=0)


class Chains:
    """N chains of LENGTH tokens over a policy of which each token depends on the one before; a draft that is another such policy."""

    def __init__(self, temperature=1.0, **cuts):
        generator = torch.Generator().manual_seed(5)
        self.policy = 1.5 * torch.randn(V, V, generator=generator)
        self.other = 1.5 * torch.randn(V, V, generator=generator)
        self.temperature, self.cuts = temperature, cuts

    def rows(self, n):
        return rows(n, self.temperature, **self.cuts)

    def drafts(self, kind):
        return {"self": self.policy, "near": self.policy + 0.4 * self.other, "stale": self.other, "certain": self.other, "random": None}[kind]

    def exact(self):
        """The shares of all sequences of LENGTH tokens, [V ** LENGTH]."""
        p = transformed_logprobs(self.policy, self.rows(V)).exp().double()
        joint = p[0]
        for _ in range(LENGTH - 1):
            joint = (joint.reshape(-1, V, 1) * p).reshape(-1)
        return joint.numpy()

    def sample(self, kind, seed=0):
        """[N, LENGTH] tokens after a token 0, speculated with up to 3 tokens a pass, which vary from chain to chain and pass to pass."""
        seeds = np.arange(N, dtype=np.uint64) + np.uint64(seed * N)
        tokens, known, numbers = np.zeros((N, LENGTH + 4), dtype=np.int64), np.ones(N, dtype=np.int64), np.random.default_rng(seed)
        model = self.drafts(kind)
        while (alive := np.flatnonzero(known <= LENGTH)).size:
            n, at = len(alive), known[alive]
            lengths = numbers.integers(0, 4, n)
            ids, q, last = np.zeros((n, 3), np.int64), torch.zeros(n, 3, V), tokens[alive, at - 1]
            for j in range(3):
                if model is None:
                    ids[:, j] = numbers.integers(0, V, n)
                elif kind == "certain":
                    ids[:, j] = model[last].argmax(-1)
                else:
                    logprobs = transformed_logprobs(model[last], self.rows(n))
                    q[:, j] = logprobs.exp()
                    ids[:, j] = choose(model[last], logprobs, self.rows(n), uniforms(seeds[alive], (at + j).astype(np.uint64), DRAFT_STREAM))
                last = ids[:, j]
            owners, places = verification._packed(lengths)
            before = np.column_stack([tokens[alive, at - 1], ids])[owners, places]
            drawn = np.full(n, kind not in ("certain", "random"))
            verdict = verify(self.policy[before], Proposal(ids, lengths, q, drawn), self.rows(n), seeds[alive], at)
            for j in range(4):
                takes = verdict.accepted >= j
                takes &= at + j <= LENGTH
                tokens[alive[takes], at[takes] + j] = verdict.ids[takes, j] if j < verdict.ids.shape[1] else 0
            known[alive] += verdict.accepted + 1
        return tokens[:, 1 : LENGTH + 1]


def numbered(tokens):
    return tokens @ V ** np.arange(tokens.shape[1])[::-1]


@pytest.mark.parametrize("cuts", [{}, {"top_k": 3}, {"top_p": 0.8}, {"top_k": 4, "top_p": 0.9, "min_p": 0.05}], ids=str)
@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("kind", ["self", "near", "stale", "certain", "random"])
def test_whole_sequences_have_the_policys_frequencies(statistics, kind, temperature, cuts):
    chains = Chains(temperature, **cuts)
    counts = np.bincount(numbered(chains.sample(kind)), minlength=V**LENGTH)
    assert statistics.goodness(counts, chains.exact()) > 1e-4


@pytest.mark.parametrize("kind", ["near", "stale"])
def test_a_wrong_rule_is_told_by_the_frequencies(statistics, monkeypatch, kind):
    monkeypatch.setattr(verification, "accepts", lambda p, q, uniform: uniform * 0.5 * q.double() < p.double())
    counts = np.bincount(numbered(Chains().sample(kind)), minlength=V**LENGTH)
    assert statistics.goodness(counts, Chains().exact()) < 1e-12


def test_certain_drafts_leave_each_seed_the_tokens_that_it_draws_without_them():
    chains = Chains()
    assert (chains.sample("certain") == chains.sample("random")).all()


def test_the_grid_of_the_enumeration_falls_evenly_on_both_rules():
    assert all((Fraction(3, 4) * 40).denominator == 1 and (Fraction(k, 7) * 140).denominator == 1 for k in (1, 6))
