"""The numbers that sampling draws and what it makes of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rollart.engines.embedded.sampling import RowTransforms, draw, sample, transformed_logprobs, uniforms


def rows(n, temperature=1.0, top_p=1.0, top_k=-1, min_p=0.0):
    return RowTransforms(
        np.full(n, temperature, np.float32), np.full(n, top_p, np.float32), np.full(n, top_k, np.int64), np.full(n, min_p, np.float32)
    )


def grid(seeds, positions, stream=0):
    s, p = np.meshgrid(np.arange(seeds, dtype=np.uint64), np.arange(positions, dtype=np.uint64), indexing="ij")
    return uniforms(s.ravel(), p.ravel(), stream).reshape(seeds, positions)


def test_uniforms_belong_to_seed_position_and_stream_alone():
    table = grid(50, 40)
    assert uniforms(np.array([17], np.uint64), np.array([31], np.uint64))[0] == table[17, 31]
    assert len(np.unique(np.concatenate([table.ravel(), grid(50, 40, stream=1).ravel()]))) == 4000


def test_uniforms_are_even_and_uncorrelated_between_neighbours():
    table = grid(400, 400)
    assert table.min() >= 0 and table.max() < 1
    counts = np.histogram(table, bins=100, range=(0, 1))[0]
    assert ((counts - 1600) ** 2 / 1600).sum() < 160  # the 99.99 % quantile at 99 degrees of freedom
    for left, right in ((table[1:], table[:-1]), (table[:, 1:], table[:, :-1]), (table, grid(400, 400, stream=1))):
        assert abs(np.corrcoef(left.ravel(), right.ravel())[0, 1]) < 0.01


@pytest.mark.parametrize("cut", [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 9, "top_p": 0.9}])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_frequencies_are_the_probabilities_that_are_reported(temperature, cut):
    n, logits = 40_000, torch.randn(30, generator=torch.Generator().manual_seed(0))
    many = logits.expand(n, -1)
    ids, logprobs = sample(many, rows(n, temperature, **cut), uniforms(np.arange(n, dtype=np.uint64), np.zeros(n, np.uint64)))
    p = transformed_logprobs(logits[None], rows(1, temperature, **cut))[0].exp().double()
    assert p.sum() == pytest.approx(1, abs=1e-6)
    assert torch.equal(logprobs, p.log().float()[ids]) or logprobs == pytest.approx(p.log().float()[ids], abs=1e-6)
    counts = torch.bincount(ids, minlength=30).double()
    assert counts[p == 0].sum() == 0
    seen = p * n >= 5
    statistic = ((counts - p * n) ** 2 / (p * n))[seen].sum().item()
    freedom = int(seen.sum()) - 1
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 3.719 * (2 / (9 * freedom)) ** 0.5) ** 3


@pytest.mark.parametrize(
    ("cut", "kept"),
    [
        ({"top_k": 2}, [1, 3]),
        ({"top_p": 0.4}, [1]),
        ({"top_p": 0.6}, [1, 3]),
        ({"min_p": 0.5}, [1, 3]),
        ({"top_k": 3, "top_p": 0.5}, [1]),
        ({"top_p": 1e-300}, [1]),
    ],
)
def test_cuts_keep_the_set_that_their_definition_names(cut, kept):
    # With top-k first, the 0.45 of token 1 is over half of the remaining 0.85.
    logits = torch.tensor([0.10, 0.45, 0.05, 0.25, 0.15]).log()[None]
    logprobs = transformed_logprobs(logits, rows(1, **cut))[0]
    assert logprobs.isfinite().nonzero().flatten().tolist() == kept
    assert logprobs[kept].exp().sum() == pytest.approx(1, abs=1e-6)


def test_rows_with_different_transforms_do_not_touch_each_other():
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(1))
    mixed = RowTransforms(np.array([0, 0.5, 1], np.float32), np.array([1, 0.5, 1], np.float32), np.array([-1, -1, 4]), np.zeros(3, np.float32))
    u = np.array([0.3, 0.6, 0.9])
    ids, logprobs = sample(logits, mixed, u)
    for i in range(3):
        one = RowTransforms(mixed.temperature[i : i + 1], mixed.top_p[i : i + 1], mixed.top_k[i : i + 1], mixed.min_p[i : i + 1])
        alone = sample(logits[i : i + 1], one, u[i : i + 1])
        assert (ids[i], logprobs[i]) == (alone[0][0], pytest.approx(alone[1][0].item(), abs=1e-6))
    assert ids[0] == logits[0].argmax()
    assert logprobs[0] == pytest.approx(logits[0].log_softmax(-1).max().item(), abs=1e-6)


def test_the_ends_of_the_unit_interval_draw_tokens_that_have_probability():
    logits = torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]])
    many = torch.randn(500, 6, generator=torch.Generator().manual_seed(2))
    many[:, -1] = -torch.inf
    assert sample(many, rows(500), np.full(500, np.nextafter(1.0, 0.0)))[0].max() == 4
    for u, token in ((0.0, 1), (np.nextafter(1.0, 0.0), 2)):
        assert sample(logits, rows(1), np.array([u]))[0].item() == token


def test_rows_drawn_in_pieces_are_those_drawn_one_by_one():
    logprobs = torch.randn(50, 40_000, generator=torch.Generator().manual_seed(4)).log_softmax(-1)
    uniform = torch.from_numpy(np.linspace(0, 0.999, 50))
    assert draw(logprobs, uniform).tolist() == [draw(logprobs[i : i + 1], uniform[i : i + 1]).item() for i in range(50)]


@pytest.mark.parametrize("vocabulary", [1, 300, 2048, 2049, 3072])
def test_a_draw_inverts_the_cumulative_distribution_within_and_across_blocks(vocabulary):
    logprobs = torch.randn(64, vocabulary, generator=torch.Generator().manual_seed(5)) * 3.0
    logprobs[torch.rand(64, vocabulary, generator=torch.Generator().manual_seed(6)) < 0.3] = -torch.inf
    logprobs[:, vocabulary // 2] = 0.0
    cumulative = logprobs.double().exp().cumsum(-1)
    for share in (0.0, 0.1, 0.5, 0.999, float(np.nextafter(1.0, 0.0))):
        uniform = torch.full((64,), share, dtype=torch.float64)
        drawn = draw(logprobs, uniform)
        at = drawn.unsqueeze(1)
        p = logprobs.double().exp().gather(1, at)
        assert bool((p > 0).all())
        upper, total = cumulative.gather(1, at), cumulative[:, -1:]
        # Rounding of fp32 may move a bound by a hair, and no more.
        assert bool((upper >= share * total * (1 - 1e-6)).all()) and bool((upper - p <= share * total * (1 + 1e-6)).all())
