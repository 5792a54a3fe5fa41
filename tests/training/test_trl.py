"""The losses against TRL's own code, `GRPOTrainer._compute_loss`, on the same tensors; and the log-probabilities against its helpers.

TRL computes advantages and its behaviour weights inside the method that also samples, so these cannot be called alone: the
advantages have hand-written oracles only, and the weight is handed to TRL's loss as the input that it takes it as.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rollart.training.logits import chunked_logprobs, plain_logprobs
from rollart.training.losses.kl import kl_to_reference
from rollart.training.losses.registry import policy_loss
from rollart.training.losses.terms import LossInputs, behaviour_weight
from rollart.training.settings import LossSettings

pytest.importorskip("trl", reason="TRL comes with the dev extra")
logging.getLogger("transformers").setLevel(logging.ERROR)

from trl.trainer.grpo_trainer import GRPOTrainer  # noqa: E402
from trl.trainer.utils import entropy_from_logits, selective_log_softmax  # noqa: E402

LENGTHS = (5, 2, 7, 1)


class Loss(GRPOTrainer):
    """TRL's trainer as far as its loss goes: the policy's log-probabilities are given, nothing is sampled."""

    def __init__(self, current: Tensor, **fields: Any) -> None:
        self.given = current
        self.aux_loss_enabled = self._entropy_bonus_enabled = self.use_vllm = False
        self.top_entropy_quantile, self.off_policy_mask_threshold = 1.0, None
        self.importance_sampling_level, self.loss_type, self.beta = "token", "bnpo", 0.0
        self.epsilon_low, self.epsilon_high = 0.2, 0.3
        self.vllm_importance_sampling_correction = True
        self.model = SimpleNamespace(training=True)
        self.args = SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1)
        self.current_gradient_accumulation_steps = 1
        self.accelerator = SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x)
        self._metrics = {"train": defaultdict(list)}
        for name, value in fields.items():
            setattr(self, name, value)

    def _get_per_token_logps_and_entropies(self, *_: Any, **__: Any) -> tuple[Tensor, Tensor, None]:
        return self.given, torch.zeros_like(self.given), None


@pytest.fixture
def tokens() -> dict[str, Tensor]:
    """Padded [4, 7] tensors in float64: `mask`, log-probabilities `current`, `proximal`, `behaviour`, `reference`, and `advantages` [4]."""
    generator = torch.Generator().manual_seed(3)
    shape = (len(LENGTHS), max(LENGTHS))
    made = {"mask": torch.stack([(torch.arange(shape[1]) < n).long() for n in LENGTHS])}
    base = -2.5 * torch.rand(shape, generator=generator, dtype=torch.float64) - 0.1
    for name in ("current", "proximal", "behaviour", "reference"):
        made[name] = base - 0.5 * torch.rand(shape, generator=generator, dtype=torch.float64)
    made["advantages"] = torch.tensor([1.1, -0.7, 0.4, -1.6], dtype=torch.float64)
    return made


def _theirs(tokens: dict[str, Tensor], old: str, extra: dict[str, Tensor] | None = None, **fields: Any) -> tuple[float, Tensor]:
    """TRL's loss and its gradient by the current log-probabilities, padded."""
    current = tokens["current"].clone().requires_grad_()
    none = torch.zeros(len(LENGTHS), 0, dtype=torch.long)
    inputs = {
        "prompt_ids": none, "prompt_mask": none, "completion_ids": tokens["mask"], "completion_mask": tokens["mask"],
        "advantages": tokens["advantages"], "old_per_token_logps": tokens[old], "sampling_per_token_logps": tokens["behaviour"],
        "ref_per_token_logps": tokens["reference"], "num_items_in_batch": tokens["mask"].sum(), **(extra or {}),
    }  # fmt: skip
    loss = Loss(current, **fields)._compute_loss(Loss(current).model, inputs)
    loss.backward()
    assert current.grad is not None
    return loss.item(), current.grad


def _inputs(tokens: dict[str, Tensor]) -> tuple[LossInputs, Tensor]:
    there = tokens["mask"].bool()
    rows = torch.arange(len(LENGTHS)).unsqueeze(1).expand_as(there)[there]
    current = tokens["current"].clone().requires_grad_()
    flat = {name: tokens[name][there] for name in ("proximal", "behaviour")}
    return LossInputs(current[there], flat["proximal"], flat["behaviour"], tokens["advantages"][rows], rows), current


def _ours(tokens: dict[str, Tensor], settings: LossSettings, *, by_trajectory: bool = False) -> tuple[float, Tensor]:
    inputs, current = _inputs(tokens)
    per_token = policy_loss(inputs, settings).per_token
    if settings.kl:
        per_token = per_token + settings.kl * kl_to_reference(inputs.current, tokens["reference"][tokens["mask"].bool()])
    lengths = torch.tensor(LENGTHS, dtype=torch.float64)
    weights = (1.0 / (len(LENGTHS) * lengths))[inputs.sequence] if by_trajectory else torch.full_like(per_token, 1.0 / sum(LENGTHS))
    loss = (weights * per_token).sum()
    loss.backward()
    assert current.grad is not None
    return loss.item(), current.grad


def _same(ours: tuple[float, Tensor], theirs: tuple[float, Tensor]) -> None:
    assert ours[0] == pytest.approx(theirs[0], abs=1e-5)
    torch.testing.assert_close(ours[1], theirs[1], atol=1e-5, rtol=0)
    assert theirs[1].abs().sum() > 0.01


RANGE = {"clip_low": 0.2, "clip_high": 0.3}


@pytest.mark.parametrize(("loss_type", "by_trajectory"), [("bnpo", False), ("dapo", False), ("grpo", True)])
def test_ppo_clip_is_trls_loss_with_either_denominator(tokens: dict[str, Tensor], loss_type: str, by_trajectory: bool) -> None:
    ours = _ours(tokens, LossSettings(name="ppo_clip", **RANGE), by_trajectory=by_trajectory)
    _same(ours, _theirs(tokens, "behaviour", loss_type=loss_type))


def test_the_divergence_from_the_reference_is_trls(tokens: dict[str, Tensor]) -> None:
    _same(_ours(tokens, LossSettings(name="ppo_clip", kl=0.3, **RANGE)), _theirs(tokens, "behaviour", beta=0.3))


def test_cispo_is_trls(tokens: dict[str, Tensor]) -> None:
    # TRL's epsilon_high is the cap itself.
    ours = _ours(tokens, LossSettings(name="cispo", clip_high=0.2))
    _same(ours, _theirs(tokens, "behaviour", loss_type="cispo", epsilon_high=1.2))


def test_gspo_is_trls_at_the_level_of_sequences(tokens: dict[str, Tensor]) -> None:
    ours = _ours(tokens, LossSettings(name="gspo", clip_low=0.05, clip_high=0.04), by_trajectory=True)
    _same(ours, _theirs(tokens, "behaviour", loss_type="grpo", importance_sampling_level="sequence", epsilon_low=0.05, epsilon_high=0.04))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_decoupled_loss_is_trls_with_the_behaviour_weight_as_its_ratio(tokens: dict[str, Tensor], level: str) -> None:
    inputs, _ = _inputs(tokens)
    weight, _ = behaviour_weight(inputs, level, 1.2)
    ratio = torch.zeros_like(tokens["current"])
    ratio[tokens["mask"].bool()] = weight
    ours = _ours(tokens, LossSettings.model_validate({**RANGE, "truncate": 1.2, "correction": level}))
    _same(ours, _theirs(tokens, "proximal", {"importance_sampling_ratio": ratio}, use_vllm=True))


def test_the_geometric_mask_of_negative_sequences_is_trls_off_policy_mask(tokens: dict[str, Tensor]) -> None:
    tokens["proximal"] = tokens["current"]  # TRL's mask looks at the current policy
    gaps = ((tokens["behaviour"] - tokens["current"]) * tokens["mask"]).sum(1) / tokens["mask"].sum(1)
    bound = float(gaps[[1, 3]].mean())  # between the two negative ones
    mask = {"level": "geometric", "low": float(torch.tensor(-bound).exp()), "negative_only": True}
    ours = _ours(tokens, LossSettings.model_validate({"name": "ppo_clip", **RANGE, "mask": mask}))
    theirs = _theirs(tokens, "behaviour", off_policy_mask_threshold=bound)
    _same(ours, theirs)
    assert int((theirs[1][[1, 3]].abs().sum(1) == 0).sum()) == 1


@pytest.mark.parametrize("rows", [3, 100])
def test_log_probabilities_and_entropies_are_trls(rows: int) -> None:
    generator = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(10, 6, generator=generator), torch.randn(17, 6, generator=generator)
    targets = torch.randint(17, (10,), generator=generator)
    logits = hidden @ weight.T
    for found in (
        plain_logprobs(logits, targets, None, entropy_gradient=False),
        chunked_logprobs(hidden, weight, None, targets, None, rows, entropy_gradient=False),
    ):
        torch.testing.assert_close(found[0], selective_log_softmax(logits, targets), atol=1e-5, rtol=0)
        torch.testing.assert_close(found[1], entropy_from_logits(logits), atol=1e-5, rtol=0)
