"""Which tokens cuts leave out, against a stable sort of the whole vocabulary, with ties, wide sets and rows that ask for different things."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rollart.engines.embedded.cuts import left_out

ROWS = 12


def by_sorting(scaled: torch.Tensor, k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    ordered, order = scaled.double().sort(dim=-1, descending=True, stable=True)
    ordered = ordered.masked_fill(torch.arange(scaled.shape[-1]) >= k[:, None], -torch.inf)
    p = ordered.softmax(-1)
    gone = ((p.cumsum(-1) - p >= top_p[:, None]) & (top_p[:, None] < 1.0)) | (p < min_p[:, None] * p[:, :1]) | (ordered == -torch.inf)
    gone[:, 0] = False
    return torch.zeros_like(gone).scatter_(1, order, gone)


def asked(vocabulary: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    k = np.minimum(rng.choice([1, 3, 64, 65, 600, 10**9], ROWS), vocabulary)
    top_p, min_p = rng.choice([1.0, 0.99, 0.9, 0.5, 1e-30], ROWS), rng.choice([0.0, 0.03, 0.5, 0.97], ROWS)
    return torch.from_numpy(k), torch.from_numpy(top_p), torch.from_numpy(min_p)


@pytest.mark.parametrize("vocabulary", [1, 5, 64, 65, 700, 4000])
@pytest.mark.parametrize("spread", [0.05, 1.0, 5.0])
@pytest.mark.parametrize("ties", [False, True])
def test_what_stays_is_what_a_stable_sort_says_and_each_row_says_so_alone(vocabulary: int, spread: float, ties: bool) -> None:
    for seed in range(6):
        scaled = spread * torch.randn(ROWS, vocabulary, generator=torch.Generator().manual_seed(seed))
        if ties:
            scaled = (scaled * 4 / spread).round() / 4
        bounds = asked(vocabulary, seed)
        gone = left_out(scaled, *bounds)
        assert torch.equal(gone, by_sorting(scaled, *bounds))
        for row in range(ROWS):
            assert torch.equal(left_out(scaled[row : row + 1], *(b[row : row + 1] for b in bounds))[0], gone[row])
