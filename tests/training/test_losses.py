import math
from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import Tensor

from rollart.training.losses.kl import kl_to_reference
from rollart.training.losses.registry import LOSSES, policy_loss
from rollart.training.losses.terms import LossInputs
from rollart.training.settings import KLEstimator, LossName, LossSettings, MaskSettings

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


# Two sequences whose tokens alternate: 0, 2, 4, 6 belong to the first.
SEQUENCE = [0, 1, 0, 1, 0, 1, 0]


def _in_sequences() -> tuple[LossInputs, Tensor]:
    inputs, current = _inputs()
    return replace(inputs, sequence=torch.tensor(SEQUENCE)), current


def _of_sequence(i: int, value: Callable[[tuple[float, float, float, float]], float]) -> list[float]:
    return [value(t) for t, s in zip(TOKENS, SEQUENCE, strict=True) if s == SEQUENCE[i]]


def test_cispo_matches_the_oracle_in_value_and_gradient() -> None:
    inputs, current = _inputs()
    terms = LOSSES["cispo"](inputs, SETTINGS)
    terms.per_token.sum().backward()
    for i, (now, _, behaviour, advantage) in enumerate(TOKENS):
        weight = min(math.exp(now - behaviour), 1.3)
        assert terms.per_token[i].item() == pytest.approx(-weight * advantage * now, abs=1e-9)
        assert current.grad is not None and current.grad[i].item() == pytest.approx(-weight * advantage, abs=1e-9)
    assert terms.marks["truncated"].tolist() == [math.exp(t[0] - t[2]) > 1.3 for t in TOKENS]


def test_gspo_matches_the_oracle_in_value_and_gradient() -> None:
    # Each sequence has one advantage, as it has from any estimator but a value head.
    inputs, current = _in_sequences()
    of = [-0.8, 0.6]
    inputs = replace(inputs, advantages=torch.tensor([of[s] for s in SEQUENCE], dtype=torch.float64))
    terms = LOSSES["gspo"](inputs, SETTINGS)
    terms.per_token.sum().backward()
    for i in range(len(TOKENS)):
        gaps = _of_sequence(i, lambda t: t[0] - t[2])
        ratio = math.exp(sum(gaps) / len(gaps))
        value, slope = _clipped(ratio, of[SEQUENCE[i]])
        assert terms.per_token[i].item() == pytest.approx(-value, abs=1e-9)
        # All n tokens of the sequence have this loss, and each reaches the ratio with 1 / n.
        assert current.grad is not None and current.grad[i].item() == pytest.approx(-slope, abs=1e-9)
    assert terms.marks["clipped"].tolist() == [s == 1 for s in SEQUENCE]


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("cap", [2.0, None])
def test_truncated_importance_sampling_matches_the_oracle_at_both_levels(level: str, cap: float | None) -> None:
    inputs, current = _in_sequences()
    terms = LOSSES["tis"](inputs, LossSettings.model_validate({"correction": level, "truncate": cap}))
    terms.per_token.sum().backward()
    truncated = []
    for i, (now, centre, behaviour, advantage) in enumerate(TOKENS):
        gap = centre - behaviour if level == "token" else sum(_of_sequence(i, lambda t: t[1] - t[2]))
        weight = math.exp(gap) if cap is None else min(math.exp(gap), cap)
        truncated.append(cap is not None and math.exp(gap) > cap)
        expected = -weight * math.exp(now - centre) * advantage
        assert terms.per_token[i].item() == pytest.approx(expected, abs=1e-9)
        assert current.grad is not None and current.grad[i].item() == pytest.approx(expected, abs=1e-9)
    assert terms.marks["truncated"].tolist() == truncated


def test_the_decoupled_loss_corrects_by_sequence_when_told_to() -> None:
    inputs, _ = _in_sequences()
    found = LOSSES["decoupled_ppo"](inputs, SETTINGS.model_copy(update={"correction": "sequence", "truncate": None})).per_token
    for i, (now, centre, _, advantage) in enumerate(TOKENS):
        weight = math.exp(sum(_of_sequence(i, lambda t: t[1] - t[2])))
        assert found[i].item() == pytest.approx(-weight * _clipped(math.exp(now - centre), advantage)[0], abs=1e-9)


def _binary_kl(q: float, p: float) -> float:
    q, p = math.exp(q), math.exp(p)
    return q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))


MASKS = [
    {"level": "token", "low": 0.9, "high": 1.2}, {"level": "sequence", "high": 2.0}, {"level": "geometric", "low": 0.95, "high": 1.5},
    {"level": "token", "by": "divergence", "high": 0.01}, {"level": "sequence", "by": "divergence", "high": 0.1},
    {"level": "geometric", "by": "divergence", "high": 0.02}, {"level": "token", "low": 0.95, "negative_only": True},
]  # fmt: skip


@pytest.mark.parametrize("name", get_args(LossName))
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_a_mask_leaves_out_what_is_out_of_its_range_and_nothing_else(name: LossName, mask: dict) -> None:
    settings = LossSettings(name=name, clip_low=0.2, clip_high=0.3, mask=MaskSettings(**mask))
    inputs, current = _in_sequences()
    terms = policy_loss(inputs, settings)
    terms.per_token.sum().backward()
    measures = []
    for i in range(len(TOKENS)):
        one = (lambda t: t[1] - t[2]) if mask.get("by") != "divergence" else (lambda t: _binary_kl(t[2], t[1]))
        values = _of_sequence(i, one) if mask["level"] != "token" else [one(TOKENS[i])]
        value = sum(values) / (len(values) if mask["level"] == "geometric" else 1)
        measures.append(value if mask.get("by") == "divergence" else math.exp(value))
    out = [not mask.get("low", 0.0) <= m <= mask.get("high", math.inf) for m in measures]
    if mask.get("negative_only"):
        out = [o and t[3] < 0 for o, t in zip(out, TOKENS, strict=True)]
    assert terms.marks["masked"].tolist() == out and any(out) and not all(out)
    assert current.grad is not None
    for i, gone in enumerate(out):
        if gone:
            assert (terms.per_token[i].item(), current.grad[i].item()) == (0.0, 0.0)
    if mask["level"] != "token" or name in ("ppo_clip", "cispo", "tis"):
        plain, _ = _in_sequences()
        whole = LOSSES[name](plain, settings).per_token
        assert all(terms.per_token[i].item() == pytest.approx(whole[i].item(), abs=1e-9) for i, gone in enumerate(out) if not gone)


@pytest.mark.parametrize("name", get_args(LossName))
def test_a_token_that_is_left_out_gives_no_nan_though_its_ratio_is_infinite(name: LossName) -> None:
    current = torch.tensor([-1.0, -1.0], dtype=torch.float64, requires_grad=True)
    proximal, behaviour = torch.tensor([-1.0, -1.1]).double(), torch.tensor([-2000.0, -1.0]).double()
    inputs = LossInputs(current, proximal, behaviour, torch.ones(2).double(), torch.tensor([0, 0]))
    terms = policy_loss(inputs, LossSettings(name=name, truncate=None, mask=MaskSettings(high=10.0)))
    terms.per_token.sum().backward()
    assert current.grad is not None and current.grad[0] == 0.0 and bool(torch.isfinite(current.grad).all())
    assert bool(torch.isfinite(terms.per_token).all()) and current.grad[1] != 0.0


@pytest.mark.parametrize("name", get_args(LossName))
def test_losses_of_no_token_at_all_are_empty(name: LossName) -> None:
    nothing = torch.zeros(0, dtype=torch.float64)
    terms = policy_loss(LossInputs(nothing, nothing, nothing, nothing, nothing.long()), LossSettings(name=name, mask=MaskSettings(high=2.0)))
    assert terms.per_token.shape == (0,)


def test_the_divergence_of_a_certain_token_is_finite() -> None:
    sure, unsure = torch.zeros(1, dtype=torch.float64), torch.tensor([-0.5], dtype=torch.float64)
    for behaviour, proximal in ((sure, unsure), (unsure, sure), (sure, sure)):
        inputs = LossInputs(proximal, proximal, behaviour, sure + 1, sure.long())
        found = policy_loss(inputs, LossSettings(mask=MaskSettings(by="divergence", high=0.01)))
        assert found.marks["masked"].item() is not torch.equal(behaviour, proximal)


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


@pytest.mark.parametrize("estimator", get_args(KLEstimator))
def test_the_kl_estimates_match_their_formulas_in_value_and_gradient(estimator: KLEstimator) -> None:
    p, q = [0.7, 0.2, 0.1], [0.5, 0.25, 0.25]
    current, reference = torch.tensor(p, dtype=torch.float64).log().requires_grad_(), torch.tensor(q, dtype=torch.float64).log()
    found = kl_to_reference(current, reference, estimator)
    found.sum().backward()
    gaps = [math.log(a / b) for a, b in zip(p, q, strict=True)]
    values = {"k1": gaps, "k2": [0.5 * d * d for d in gaps], "k3": [math.exp(-d) - 1 + d for d in gaps]}
    slopes = {"k1": gaps, "k2": gaps, "k3": [1 - math.exp(-d) for d in gaps]}
    assert found.tolist() == pytest.approx(values[estimator], abs=1e-9)
    assert current.grad is not None and current.grad.tolist() == pytest.approx(slopes[estimator], abs=1e-9)
    divergence = sum(a * d for a, d in zip(p, gaps, strict=True))
    mean = float((found * current.exp()).sum().detach())
    assert (mean == pytest.approx(divergence, abs=1e-9)) is (estimator != "k2")


@pytest.mark.parametrize("estimator", ["k1", "k2"])
def test_the_gradient_of_k1_and_k2_averages_to_that_of_the_divergence(estimator: KLEstimator) -> None:
    logits = torch.tensor([0.4, -0.3, 0.9], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.tensor([0.1, 0.2, -0.5], dtype=torch.float64), 0)
    log_p = torch.log_softmax(logits, 0)
    exact = torch.autograd.grad((log_p.exp() * (log_p - reference)).sum(), logits, retain_graph=True)[0]
    (found,) = torch.autograd.grad((log_p.exp().detach() * kl_to_reference(log_p, reference, estimator)).sum(), logits)
    assert found.tolist() == pytest.approx(exact.tolist(), abs=1e-9)


@pytest.mark.parametrize(("low", "high", "message"), [(None, None, "without bounds"), (2.0, 1.0, "is not under high")])
def test_a_mask_that_leaves_out_nothing_or_everything_is_refused(low: float | None, high: float | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MaskSettings(low=low, high=high)


def test_the_table_holds_every_name_that_the_settings_accept() -> None:
    assert set(LOSSES) == set(get_args(LossName))
