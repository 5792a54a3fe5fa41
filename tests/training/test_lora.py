"""Adapters: only they are trained, they come back by themselves, and merged they are the policy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rollart.training.batch import TrainBatch, build_batch
from rollart.training.errors import StateError
from rollart.training.learner import Learner
from rollart.training.lora import adapters, load_adapters
from rollart.training.settings import LearnerSettings

peft = pytest.importorskip("peft", reason="peft comes with the dev extra")


def _learner(folder: Path, **lora: object) -> Learner:
    settings = {"model": {"lora": {"rank": 2, "alpha": 4.0, **lora}}, "optimiser": {"lr": 0.01}}
    return Learner(folder, LearnerSettings.model_validate(settings))


def _batch(make_trajectories, step: int = 0) -> TrainBatch:
    trajectories = make_trajectories((3, 2), seed=step)
    return build_batch(trajectories, {t.attempt: float(t.attempt.member % 2) - 0.5 for t in trajectories}, step)


def _logits(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(9).unsqueeze(0)).logits


def test_adapters_change_nothing_at_first_and_are_all_that_is_trained(llama: Path, make_trajectories) -> None:
    learner, plain = _learner(llama), Learner(llama, LearnerSettings())
    assert torch.equal(_logits(learner.policy.model), _logits(plain.policy.model))
    before = {name: p.detach().clone() for name, p in learner.policy.model.named_parameters()}
    assert learner.train_step(_batch(make_trajectories)).optimiser_steps == 1
    moved = {name for name, p in learner.policy.model.named_parameters() if not torch.equal(before[name], p)}
    assert moved == {name for name in before if "lora_B" in name}  # where B is 0, A has no gradient yet
    assert set(learner.policy.parameters()) == {name for name in before if "lora_" in name}


def test_what_is_published_is_a_plain_model_that_computes_the_same(llama: Path, make_trajectories) -> None:
    learner, plain = _learner(llama), Learner(llama, LearnerSettings())
    for step in range(3):
        learner.train_step(_batch(make_trajectories, step))
    published = learner.weights()
    assert set(published) == set(plain.weights())
    plain.load_weights(published)
    assert float((_logits(plain.policy.model) - _logits(learner.policy.model)).abs().max()) < 1e-5
    assert float((_logits(plain.policy.model) - _logits(Learner(llama, LearnerSettings()).policy.model)).abs().max()) > 1e-3
    learner.load_weights(published, step=3)  # the merged weights become the base, with fresh adapters
    assert torch.equal(_logits(learner.policy.model), _logits(plain.policy.model))


def test_a_run_goes_on_from_its_state_bit_for_bit(llama: Path, make_trajectories) -> None:
    through, first, second = (_learner(llama) for _ in range(3))
    expected = [through.train_step(_batch(make_trajectories, step)) for step in range(4)]
    for step in range(2):
        first.train_step(_batch(make_trajectories, step))
    second.load_state(*first.state())
    found = [second.train_step(_batch(make_trajectories, step)) for step in range(2, 4)]
    assert [(m.loss, m.grad_norm) for m in found] == [(m.loss, m.grad_norm) for m in expected[2:]]


def test_adapters_alone_are_carried_to_another_learner_and_to_peft_itself(llama: Path, make_trajectories) -> None:
    learner, other = _learner(llama), _learner(llama)
    for step in range(3):
        learner.train_step(_batch(make_trajectories, step))
    carried = adapters(learner.policy.model)
    assert sum(v.numel() for v in carried.values()) < 0.5 * sum(v.numel() for v in learner.weights().values())
    load_adapters(other.policy.model, carried)
    assert torch.equal(_logits(other.policy.model), _logits(learner.policy.model))

    base = AutoModelForCausalLM.from_config(learner.policy.model.config)
    base.load_state_dict(Learner(llama, LearnerSettings()).weights(), strict=False)
    config = peft.LoraConfig(r=2, lora_alpha=4.0, target_modules="all-linear", task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(base, config).eval()
    assert set(carried) == set(peft.get_peft_model_state_dict(theirs))
    peft.set_peft_model_state_dict(theirs, carried)
    assert float((_logits(theirs) - _logits(learner.policy.model)).abs().max()) < 1e-5
    with pytest.raises(StateError, match="another rank"):
        load_adapters(_learner(llama, rank=3).policy.model, carried)


def test_only_the_layers_that_are_named_get_an_adapter(llama: Path) -> None:
    names = set(_learner(llama, targets=["q_proj"]).policy.parameters())
    assert names and all("q_proj.lora_" in name for name in names)
    with pytest.raises(StateError, match=r"training\.model\.lora\.targets"):
        _learner(llama, targets=["nowhere"])


def test_a_layer_that_is_not_linear_or_shares_its_weights_gets_none(llama: Path) -> None:
    with pytest.raises(StateError, match="embed_tokens of LlamaForCausalLM is no linear layer"):
        _learner(llama, targets=["embed_tokens"])
    with pytest.raises(StateError, match="lm_head of LlamaForCausalLM shares its weights"):
        _learner(llama, targets=["lm_head"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_merged_weights_are_those_that_peft_merges(llama: Path, gpt2: Path, make_trajectories, dtype: str) -> None:
    for folder in (llama, gpt2):
        settings = {"model": {"dtype": dtype, "lora": {"rank": 2, "alpha": 4.0}}, "optimiser": {"lr": 0.01}}
        learner = Learner(folder, LearnerSettings.model_validate(settings))
        for step in range(2):
            learner.train_step(_batch(make_trajectories, step))
        ours = learner.weights()
        for name, module in learner.policy.model.named_modules():
            if hasattr(module, "get_delta_weight"):
                module.merge()
                theirs = module.base_layer.weight.detach()
                off = float((ours[f"{name}.weight"].float() - theirs.float()).abs().max())
                assert off <= (1e-7 if dtype == "float32" else 2e-3), name  # they round what they add to bfloat16 first
