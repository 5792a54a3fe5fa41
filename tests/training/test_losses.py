import math
from typing import get_args

import pytest
import torch
from torch import Tensor

from rollart.training.losses.kl import kl_to_reference
from rollart.training.losses.registry import LOSSES
from rollart.training.losses.terms import LossInputs
from rollart.training.settings import LossName, LossSettings

# (current, proximal, behaviour, advantage): inside the range; above it with A > 0 and A < 0; below it with A > 0 and A < 0; a
# behaviour weight over the cap; A = 0.
TOKENS = [
    (-1.0, -1.1, -1.2, 0.7), (-1.0, -1.6, -1.5, 1.3), (-1.0, -1.6, -1.5, -1.3), (-2.0, -1.2, -1.3, 0.9), (-2.0, -1.2, -1.3, -0.9),
    (-1.0, -1.0, -3.0, 1.0), (-0.5, -0.4, -0.6, 0.0),
]  # fmt: skip
SETTINGS = LossSettings(clip_low=0.2, clip_high=0.3, truncate=2.0)


def _inputs() -> tuple[LossInputs, Tensor]:
    columns = torch.tensor(TOKENS, dtype=torch.float64).T
    current = columns[0].clone().requires_grad_(True)
    return LossInputs(current, columns[1], columns[2], columns[3], torch.zeros(len(TOKENS), dtype=torch.long)), current


def _clipped(ratio: float, advantage: float) -> tuple[float, float]:
    """PPO's objective of one token and its derivative by the current log-probability."""
    held = min(max(ratio, 1.0 - 0.2), 1.0 + 0.3) * advantage
    if ratio * advantage <= held:
        return ratio * advantage, ratio * advantage
    return held, 0.0


def test_decoupled_ppo_matches_the_oracle_in_value_and_gradient() -> None:
    inputs, current = _inputs()
    terms = LOSSES["decoupled_ppo"](inputs, SETTINGS)
    terms.per_token.sum().backward()
    for i, (now, centre, behaviour, advantage) in enumerate(TOKENS):
        weight = min(math.exp(centre - behaviour), 2.0)
        value, slope = _clipped(math.exp(now - centre), advantage)
        assert terms.per_token[i].item() == pytest.approx(-weight * value, abs=1e-9)
        assert current.grad is not None and current.grad[i].item() == pytest.approx(-weight * slope, abs=1e-9)
    assert terms.marks["clipped"].tolist() == [False, True, False, False, True, False, False]
    assert terms.marks["truncated"].tolist() == [False, False, False, False, False, True, False]


def test_ppo_clip_matches_the_oracle_in_value_and_gradient() -> None:
    inputs, current = _inputs()
    terms = LOSSES["ppo_clip"](inputs, SETTINGS)
    terms.per_token.sum().backward()
    for i, (now, _, behaviour, advantage) in enumerate(TOKENS):
        value, slope = _clipped(math.exp(now - behaviour), advantage)
        assert terms.per_token[i].item() == pytest.approx(-value, abs=1e-9)
        assert current.grad is not None and current.grad[i].item() == pytest.approx(-slope, abs=1e-9)


def test_no_gradient_reaches_the_behaviour_weight() -> None:
    inputs, _ = _inputs()
    proximal = inputs.proximal.clone().requires_grad_(True)
    other = LossInputs(inputs.proximal, proximal, inputs.behaviour, inputs.advantages, inputs.sequence)
    LOSSES["decoupled_ppo"](other, SETTINGS).per_token.sum().backward()
    # With current equal to proximal only the ratio's own derivative is left, -(w * A): the weight adds none.
    expected = [min(math.exp(c - b), 2.0) * a for _, c, b, a in TOKENS]
    assert proximal.grad is not None and proximal.grad.tolist() == pytest.approx(expected, abs=1e-9)


def test_a_behaviour_weight_that_overflows_is_capped_and_not_nan() -> None:
    one = torch.ones(1)
    terms = LOSSES["decoupled_ppo"](LossInputs(-one, -one, -2000.0 * one, one, torch.zeros(1, dtype=torch.long)), SETTINGS)
    assert terms.per_token.item() == -2.0


def test_the_kl_estimate_matches_its_formula_and_averages_to_the_divergence() -> None:
    p, q = [0.7, 0.2, 0.1], [0.5, 0.25, 0.25]
    current, reference = torch.tensor(p, dtype=torch.float64).log(), torch.tensor(q, dtype=torch.float64).log()
    found = kl_to_reference(current, reference)
    assert found.tolist() == pytest.approx([b / a - math.log(b / a) - 1.0 for a, b in zip(p, q, strict=True)], abs=1e-9)
    divergence = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    assert float((found * current.exp()).sum()) == pytest.approx(divergence, abs=1e-9)


def test_the_table_holds_every_name_that_the_settings_accept() -> None:
    assert set(LOSSES) == set(get_args(LossName))
