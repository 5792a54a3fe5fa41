"""Tokens that were sampled under a cut: the trainer's log-probabilities, entropies and gradients against a softmax over the kept ids alone."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rollart.training.batch import TrainSequence, build_batch
from rollart.training.cut import Cut
from rollart.training.learner import Learner
from rollart.training.logits import chunked_logprobs, plain_logprobs
from rollart.training.logprobs.table import mark_of
from rollart.training.microbatch import MicroBatch
from rollart.training.minibatch import Minibatch
from rollart.training.observe import Observations
from rollart.training.rescoring import sample_of
from rollart.training.settings import LearnerSettings
from rollart.types import KeptSets, SamplingTransform, Segment, Trajectory

N, H, V = 11, 5, 17


def sets(rng: random.Random, tokens: list[int], vocabulary: int) -> list[list[int]]:
    """For each token some ids, its own among them."""
    return [sorted({t, *rng.sample(range(vocabulary), rng.randrange(0, 6))}) for t in tokens]


def oracle(logits: Tensor, token: int, kept: list[int], temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy by the kept logits alone; nothing else is looked at."""
    log_p = torch.log_softmax(logits[kept] / temperature, -1)
    return log_p[kept.index(token)], -(log_p.exp() * log_p).sum()


@pytest.mark.parametrize("rows", [None, 1, 4, 100])
@pytest.mark.parametrize("entropy", [True, False])
def test_logprobs_entropies_and_gradients_are_those_of_a_softmax_over_the_kept_ids(rows: int | None, entropy: bool) -> None:
    g, rng = torch.Generator().manual_seed(0), random.Random(0)
    weigh = torch.randn(2, N, generator=g, dtype=torch.float64)
    found = []
    targets = torch.randint(V, (N,), generator=g)
    temperature = 0.5 + torch.rand(N, generator=g, dtype=torch.float64)
    kept = [ids if i % 3 else list(range(V)) for i, ids in enumerate(sets(rng, targets.tolist(), V))]  # every third is uncut
    cut = Cut.joined([(None, 1) if not i % 3 else (Cut.of(KeptSets.of(ids, [len(ids)])), 1) for i, ids in enumerate(kept)])
    first = 2 * torch.randn(N + V, H, generator=g, dtype=torch.float64)
    for brute in (True, False):
        hidden, weight = (x.clone().requires_grad_() for x in first.split((N, V)))
        if brute:
            pairs = [oracle(weight @ hidden[i], int(targets[i]), kept[i], float(temperature[i])) for i in range(N)]
            chosen, spread = (torch.stack(column) for column in zip(*pairs, strict=True))
        elif rows is None:
            chosen, spread = plain_logprobs(hidden @ weight.T, targets, temperature, cut, entropy_gradient=entropy)
        else:
            chosen, spread = chunked_logprobs(hidden, weight, None, targets, temperature, rows, cut, entropy_gradient=entropy)
        (weigh[0] * chosen + (weigh[1] * spread if entropy else 0.0)).sum().backward()
        found.append([chosen, spread, hidden.grad, weight.grad])
    for ours, theirs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)
    assert found[0][3].norm() > 0.1


def test_bfloat16_states_are_cut_in_float32() -> None:
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(N, H, generator=g).bfloat16(), torch.randn(V, H, generator=g).bfloat16()
    kept = [[i % V, (i + 5) % V] if i % V < (i + 5) % V else [(i + 5) % V, i % V] for i in range(N)]
    targets = torch.tensor([ids[0] for ids in kept])
    cut = Cut.of(KeptSets.of([i for ids in kept for i in ids], [2] * N))
    chosen, _ = chunked_logprobs(hidden, weight, None, targets, None, 4, cut, entropy_gradient=False)
    assert chosen.dtype is torch.float32
    rounded = (hidden @ weight.T).float()
    torch.testing.assert_close(chosen, torch.stack([oracle(rounded[i], int(targets[i]), kept[i], 1.0)[0] for i in range(N)]), atol=1e-6, rtol=0)


def cut_trajectories(trajectories: list[Trajectory], vocabulary: int = 13) -> list[Trajectory]:
    """The same, as if every other segment had been sampled under a cut."""
    rng = random.Random(1)
    for t in trajectories:
        for at in range(0, len(t.segments), 2):
            s = t.segments[at]
            found = sets(rng, [i for i, m in zip(s.ids, s.mask, strict=True) if m], vocabulary)
            kept = KeptSets.of([i for ids in found for i in ids], [len(ids) for ids in found])
            t.segments[at] = Segment(SamplingTransform(0.7, top_k=6), s.kv, s.ids, s.mask, s.logprobs, s.versions, s.turns, kept)
    return trajectories


def of_sequence(model: Any, s: TrainSequence) -> tuple[Tensor, Tensor]:
    """`oracle` for each trained token of one sequence, [n] each."""
    logits = model(input_ids=s.ids.unsqueeze(0)).logits[0]
    counts = [0] * len(s.positions) if s.cut is None else s.cut.counts.tolist()
    ids = [] if s.cut is None else s.cut.ids.tolist()
    found = []
    for position, count in zip(s.positions.tolist(), counts, strict=True):
        kept, ids = (ids[:count], ids[count:]) if count else (list(range(logits.shape[-1])), ids)
        found.append(oracle(logits[position - 1], int(s.ids[position]), kept, s.temperature))
    return torch.stack([a for a, _ in found]), torch.stack([b for _, b in found])


@pytest.mark.parametrize(("family", "dtype", "bound"), [("gpt2", "float64", 1e-10), ("llama", "float32", 1e-5)])
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("head_rows", [5, 1024])
def test_a_step_on_cut_tokens_has_the_gradient_worked_out_over_the_kept_ids_for_policy_entropy_and_divergence(
    request: pytest.FixtureRequest, make_trajectories: Any, family: str, dtype: str, bound: float, packing: bool, head_rows: int
) -> None:
    fields = {
        "model": {"dtype": dtype, "head_rows": head_rows}, "batch": {"packing": packing, "token_budget": 60},
        "loss": {"entropy": 0.1, "kl": 0.3, "kl_estimator": "k3"},
    }  # fmt: skip
    learner = Learner(request.getfixturevalue(family), LearnerSettings.model_validate(fields))
    assert learner.policy.packs is packing and learner.reference is not None
    with torch.no_grad():
        for parameter in learner.policy.parameters().values():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3), dtype=parameter.dtype))
    trajectories = cut_trajectories(make_trajectories())
    batch = build_batch(trajectories, {t.attempt: (-1.0) ** i for i, t in enumerate(sorted(trajectories, key=lambda t: t.attempt))}, 0)
    assert {s.cut is None for s in batch.sequences} == {True, False}
    micros: list[MicroBatch] = learner.cut(batch.sequences)
    model, seen = learner.policy.model, Observations()
    learner.accumulate(Minibatch(micros, None, learner.referred(micros)), 0, seen)
    found = torch.cat([p.grad.flatten() for p in learner.policy.parameters().values() if p.grad is not None])
    model.zero_grad(set_to_none=True)
    tokens = sum(len(s.positions) for s in batch.sequences)
    entropies, divergences = 0.0, 0.0
    for s in batch.sequences:
        log_p, entropy = of_sequence(model, s)
        with torch.no_grad():
            reference, _ = of_sequence(learner.reference.model, s)
        weight = torch.exp(log_p.detach() - s.behaviour).clamp(max=2.0)
        kl = torch.expm1(reference - log_p) + log_p - reference
        (-(weight * s.advantages * log_p + 0.1 * entropy - 0.3 * kl).sum() / tokens).backward()
        entropies, divergences = entropies + float(entropy.detach().sum()), divergences + float(kl.detach().sum())
    expected = torch.cat([p.grad.flatten() for p in learner.policy.parameters().values() if p.grad is not None])
    assert float((found - expected).norm() / expected.norm()) < bound
    summary = seen.summary()
    assert summary["entropy"] == pytest.approx(entropies / tokens, abs=1e-5) and summary["kl"] == pytest.approx(divergences / tokens, abs=1e-5)


def test_a_sample_that_is_asked_again_takes_its_own_tokens_sets_along_and_other_sets_are_other_tokens(make_trajectories: Any) -> None:
    trajectories = cut_trajectories(make_trajectories((2,)))
    batch = build_batch(trajectories, {t.attempt: 1.0 for t in trajectories}, 3)
    whole = next(s for s in batch.sequences if s.cut is not None and len(s.positions) > 2)
    assert whole.cut is not None
    s = replace(whole, versions=torch.arange(len(whole.versions)) % 2)
    (sampled,) = sample_of(replace(batch, sequences=(s,)), 1, 4)
    assert sampled.cut is not None
    each = whole.cut.ids.split(whole.cut.counts.tolist())
    assert torch.equal(sampled.cut.ids, torch.cat(each[1::2])) and torch.equal(sampled.cut.counts, whole.cut.counts[1::2])
    assert len({mark_of(s), mark_of(replace(s, cut=None)), mark_of(replace(s, cut=Cut(whole.cut.ids.flip(0), whole.cut.counts)))}) == 3
