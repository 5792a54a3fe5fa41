"""bfloat16 weights with float32 masters: small steps add up, states come back, and what is published is bfloat16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from rollart.training.batch import build_batch
from rollart.training.errors import StateError
from rollart.training.learner import Learner
from rollart.training.optimiser import Optimiser
from rollart.training.settings import LearnerSettings, OptimiserSettings

TINY_STEP = OptimiserSettings(lr=1e-4, betas=(0.0, 0.0), clip_norm=1e9)


def _step(optimiser: Optimiser, parameter: nn.Parameter, times: int) -> None:
    for _ in range(times):
        parameter.grad = torch.ones_like(parameter)
        optimiser.update(torch.zeros(()))


def test_steps_that_are_too_small_for_bfloat16_add_up_in_the_masters_and_are_lost_without() -> None:
    # Near 1 a bfloat16 has steps of 2^-8 = 0.0039; forty steps of 1e-4 are one of them.
    kept, lost = (nn.Parameter(torch.ones(3, 3, dtype=torch.bfloat16)) for _ in range(2))
    _step(Optimiser({"w": kept}, TINY_STEP, masters=True), kept, 50)
    _step(Optimiser({"w": lost}, TINY_STEP), lost, 50)
    assert kept[0, 0].item() == pytest.approx(1.0 - 50e-4, abs=2**-9)
    assert lost[0, 0].item() == 1.0


def test_gradients_of_many_passes_are_summed_in_float32() -> None:
    parameter = nn.Parameter(torch.zeros(2, 2, dtype=torch.bfloat16))
    optimiser = Optimiser({"w": parameter}, TINY_STEP, masters=True)
    for value in [256.0] + [1.0] * 64:  # 256 + 1 is 256 in bfloat16
        parameter.grad = torch.full_like(parameter, value)
        optimiser.collect()
    assert parameter.grad is None
    assert optimiser.update(torch.zeros(())).grad_norm == pytest.approx(2 * 320.0)


def test_float32_parameters_have_no_masters() -> None:
    optimiser = Optimiser({"w": nn.Parameter(torch.zeros(2))}, TINY_STEP, masters=True)
    assert optimiser.arrays() == {}


def _settings(masters: bool = True) -> LearnerSettings:
    return LearnerSettings.model_validate({"model": {"dtype": "bfloat16", "masters": masters}, "optimiser": {"lr": 1e-3}})


def test_a_bfloat16_run_goes_on_from_its_masters_bit_for_bit_and_publishes_bfloat16(llama: Path, make_trajectories) -> None:
    batches = []
    for step in range(6):
        trajectories = make_trajectories((3, 2), seed=step)
        batches.append(build_batch(trajectories, {t.attempt: float(t.attempt.member % 2) - 0.5 for t in trajectories}, step))
    through, first, second = (Learner(llama, _settings()) for _ in range(3))
    expected = [through.train_step(b) for b in batches]
    for batch in batches[:3]:
        first.train_step(batch)
    arrays, document = first.state()
    masters = {name: value for name, value in arrays.items() if name.startswith("optimiser/master/")}
    assert len(masters) == len(first.policy.parameters()) and {v.dtype for v in masters.values()} == {torch.float32}
    assert {v.dtype for v in first.weights().values()} == {torch.bfloat16}
    assert any(not torch.equal(v, v.bfloat16().float()) for v in masters.values())  # they hold more than the weights do
    second.load_state(arrays, document)
    found = [second.train_step(b) for b in batches[3:]]
    assert [(m.loss, m.grad_norm) for m in found] == [(m.loss, m.grad_norm) for m in expected[3:]]
    ours, theirs = second.state()[0], through.state()[0]
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs if name != "rng/torch")


def test_masters_come_with_the_weights_that_are_taken_over(llama: Path) -> None:
    learner, other = Learner(llama, _settings()), Learner(llama, LearnerSettings.model_validate({"model": {"dtype": "bfloat16", "seed": 4}}))
    learner.load_weights(other.weights())
    for name, parameter in learner.policy.parameters().items():
        assert torch.equal(learner.optimiser.arrays()[f"master/{name}"], parameter.detach().float())


def test_a_state_without_masters_is_refused_where_they_are_kept(llama: Path) -> None:
    arrays, document = Learner(llama, _settings(masters=False)).state()
    with pytest.raises(StateError, match="master/"):
        Learner(llama, _settings()).load_state(arrays, document)
