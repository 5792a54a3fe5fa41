"""Packed rows against padded ones: the same numbers, less padding, and a fallback where a family can't."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor
from transformers import Gemma2Config, Gemma3TextConfig, LlamaConfig, Qwen2Config, Qwen3Config, RwkvConfig

from rollart.training.batch import TrainBatch, build_batch
from rollart.training.learner import Learner, Minibatch
from rollart.training.microbatch import MicroBatch, micro_batches
from rollart.training.observe import Observations
from rollart.training.packing import PackedLayout, layout_of
from rollart.training.policy import Policy, load_model
from rollart.training.settings import BatchSettings, LearnerSettings, ModelSettings

SMALL = {"vocab_size": 13, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
         "head_dim": 8, "max_position_embeddings": 64}  # fmt: skip


def _batch(trajectories: list, step: int = 0) -> TrainBatch:
    rng = random.Random(0)
    return build_batch(trajectories, {t.attempt: rng.uniform(-1, 1) for t in trajectories}, step)


def test_a_row_lays_sequences_end_to_end_and_finds_each_token_again() -> None:
    lengths = [1, 2, 2, 7, 8]
    layout = layout_of(lengths)
    assert layout.positions.tolist() == [[p for n in lengths for p in range(n)]]
    assert [(g.rows, g.length, g.start, g.stop) for g in layout.groups] == [(1, 1, 0, 1), (2, 2, 1, 5), (2, 8, 5, 20)]
    row = torch.arange(sum(lengths))
    outputs = torch.cat([row[g.start : g.stop] if g.tokens is None else row[g.tokens] for g in layout.groups])
    assert layout.restore is not None and outputs[layout.restore].equal(row)
    assert layout_of([3, 3]).restore is None


def test_packed_micro_batches_hold_each_sequence_once_without_padding_and_within_the_budget(make_trajectories) -> None:
    batch = _batch(make_trajectories((4, 4)))
    settings = BatchSettings(token_budget=40)
    packed = micro_batches(batch.sequences, settings, packed=True)
    padded = micro_batches(batch.sequences, settings)
    assert len(packed) <= len(padded)
    assert sorted(i for m in packed for i in m.members) == list(range(len(batch.sequences)))
    assert all(m.ids.numel() == m.real and (m.real <= 40 or len(m.members) == 1) for m in packed)
    for micro in packed:
        ids = torch.cat([batch.sequences[i].ids[:-1] for i in micro.members])
        assert micro.ids[0].equal(ids)
        targets = torch.cat([batch.sequences[i].ids[batch.sequences[i].positions] for i in micro.members])
        assert micro.targets.equal(targets)
    assert sum(float(m.weights.sum()) for m in packed) == pytest.approx(1.0, abs=1e-12)


def _gradient(learner: Learner, micros: list[MicroBatch]) -> Tensor:
    learner.policy.model.zero_grad(set_to_none=True)
    learner.accumulate(Minibatch(micros, None, learner.referred(micros)), 0, Observations())
    return torch.cat([p.grad.flatten() for p in learner.policy.parameters().values() if p.grad is not None])


def _learner(folder: Path, dtype: str, packing: bool, budget: int = 10_000) -> Learner:
    settings = {"model": {"dtype": dtype}, "loss": {"kl": 0.1, "entropy": 0.01}, "batch": {"packing": packing, "token_budget": budget}}
    return Learner(folder, LearnerSettings.model_validate(settings))


@pytest.mark.parametrize(("family", "dtype", "bound"), [("gpt2", "float64", 1e-10), ("llama", "float32", 1e-5)])
def test_gradients_are_equal_packed_or_padded_and_across_1_2_and_7_micro_batches_and_orders(
    request: pytest.FixtureRequest, make_trajectories, family: str, dtype: str, bound: float
) -> None:
    folder = request.getfixturevalue(family)
    padded, packed = _learner(folder, dtype, False), _learner(folder, dtype, True)
    assert packed.policy.packs and not padded.policy.packs
    batch = _batch(make_trajectories((3, 2, 1)))
    whole = _gradient(padded, padded.cut(batch.sequences))
    by_count = {}
    for budget in range(1, 1000):
        micros = micro_batches(batch.sequences, BatchSettings(token_budget=budget), packed=True)
        by_count[len(micros)] = [m.to(packed.policy.device, packed.policy.compute_dtype) for m in micros]
    for count in (1, 2, 7):
        for order in range(2):
            found = _gradient(packed, random.Random(order).sample(by_count[count], count))
            assert float((found - whole).norm() / whole.norm()) < bound


@pytest.mark.parametrize("config", [Qwen2Config, Qwen3Config, Gemma3TextConfig], ids=lambda c: c.__name__)
def test_log_probabilities_of_other_families_are_equal_packed_or_padded(tmp_path: Path, make_trajectories, config: type) -> None:
    # Gemma 3 looks back over 4 positions only in its sliding layers, which is less than most sequences here.
    extra = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]} if config is Gemma3TextConfig else {}
    config(**SMALL, **extra).save_pretrained(tmp_path)
    padded, packed = (Policy(load_model(tmp_path, ModelSettings()), packing=p) for p in (False, True))
    assert packed.packs
    batch = _batch(make_trajectories((4, 3)))
    found = {}
    for policy, is_packed in ((padded, False), (packed, True)):
        for micro in micro_batches(batch.sequences, BatchSettings(), packed=is_packed):
            with torch.no_grad():
                values = policy.logprobs(micro.to(policy.device, policy.compute_dtype))[0]
            counts = list(micro.counts)
            for member, part in zip(micro.members, values.split(counts), strict=True):
                found.setdefault(member, []).append(part)
    assert max(s.inputs for s in batch.sequences) > 8
    for one, other in found.values():
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_states_with_entries_far_larger_than_the_others_are_packed_unless_sequences_see_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: Literal["float32", "bfloat16"]
) -> None:
    LlamaConfig(**SMALL | {"hidden_size": 128, "head_dim": 64}).save_pretrained(tmp_path)
    model = load_model(tmp_path, ModelSettings(dtype=dtype))
    with torch.no_grad():
        model.get_parameter("model.norm.weight").mul_(1e5)  # rounding of entries of 1e5 is large beside entries of 1
    assert Policy(model, packing=True).packs
    monkeypatch.setattr("rollart.training.policy.layout_of", _run_together)
    assert not Policy(model, packing=True).packs


def _run_together(lengths: Sequence[int]) -> PackedLayout:
    """A layout that takes all sequences for one."""
    return dataclasses.replace(layout_of([sum(lengths)]), positions=layout_of(lengths).positions)


@pytest.mark.parametrize("kind", ["caps its scores", "carries a state"])
def test_a_family_that_cannot_be_packed_is_padded_and_says_so(tmp_path: Path, make_trajectories, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    if kind == "caps its scores":
        Gemma2Config(**SMALL, query_pre_attn_scalar=8).save_pretrained(tmp_path)
    else:
        RwkvConfig(vocab_size=13, hidden_size=16, attention_hidden_size=16, num_hidden_layers=2, context_length=64).save_pretrained(tmp_path)
    learner = _learner(tmp_path, "float32", True)
    assert not learner.policy.packs and "its batches are padded" in caplog.text
    metrics = learner.train_step(_batch(make_trajectories((2, 1))))
    assert metrics.optimiser_steps == 1 and metrics.padding_share > 0


def test_no_gradient_flows_from_one_sequence_of_a_row_to_another(gpt2: Path, make_trajectories) -> None:
    policy = Policy(load_model(gpt2, ModelSettings(dtype="float64")), packing=True)
    (micro,) = micro_batches(_batch(make_trajectories((3,))).sequences, BatchSettings(), packed=True)
    micro = micro.to(policy.device, policy.compute_dtype)
    seen: list[Tensor] = []

    def keep(_module: object, _args: object, output: Tensor) -> None:
        output.retain_grad()
        seen.append(output)

    policy.model.get_input_embeddings().register_forward_hook(keep)  # type: ignore[operator]
    second = slice(micro.counts[0], micro.counts[0] + micro.counts[1])
    policy.logprobs(micro)[0][second].sum().backward()
    assert micro.layout is not None and seen[0].grad is not None
    starts = (micro.layout.positions[0] == 0).cumsum(0) - 1
    moved = seen[0].grad[0].abs().sum(-1) > 0
    assert bool(moved[starts == 1].any()) and not bool(moved[starts != 1].any())


def test_a_step_reports_how_much_was_padding(llama: Path, make_trajectories) -> None:
    batch = _batch(make_trajectories((4, 4)))
    padded, packed = (_learner(llama, "float32", p, 60).train_step(batch) for p in (False, True))
    assert packed.padding_share == 0.0 < padded.padding_share
    assert packed.loss == pytest.approx(padded.loss, abs=1e-5)
