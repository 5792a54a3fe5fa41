"""A sequence is a trajectory, however many segments its context was cut into: losses over sequences against gradients worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from rollart.training.batch import TrainBatch, TrainSequence, build_batch
from rollart.training.learner import Learner, Minibatch
from rollart.training.observe import Observations
from rollart.training.settings import LearnerSettings

GSPO = {"name": "gspo", "clip_low": 0.5, "clip_high": 0.5}
TIS = {"name": "tis", "correction": "sequence", "truncate": 1.5}
PPO = {"name": "decoupled_ppo", "correction": "sequence", "truncate": 1.5}
SUM_MASK = {"name": "tis", "truncate": None, "mask": {"level": "sequence", "low": 0.1, "high": 2.0}}
MEAN_MASK = {"name": "tis", "truncate": None, "mask": {"level": "geometric", "low": 0.9, "high": 1.5}}


def _weight(loss: dict, gaps: Tensor, advantage: float) -> Tensor:
    """What multiplies -A grad log p of each token of a trajectory, at the proximal policy, by its log-probabilities' gaps to the sampler's."""
    if loss["name"] == "gspo":
        ratio = gaps.mean().exp()
        held = ratio > 1.5 if advantage > 0 else ratio < 0.5
        return torch.full_like(gaps, 0.0 if held else float(ratio))
    if loss.get("correction") == "sequence":
        return torch.full_like(gaps, min(float(gaps.sum().exp()), 1.5))
    measure = float(gaps.sum().exp() if loss["mask"]["level"] == "sequence" else gaps.mean().exp())
    return gaps.exp() * (loss["mask"]["low"] <= measure <= loss["mask"]["high"])


def _log_p(learner: Learner, s: TrainSequence) -> Tensor:
    log_p = torch.log_softmax(learner.policy.model(input_ids=s.ids.unsqueeze(0)).logits[0], -1)
    return torch.stack([log_p[t - 1, s.ids[t]] for t in s.positions.tolist()])


def _by_hand(learner: Learner, batch: TrainBatch, loss: dict) -> tuple[Tensor, set[float]]:
    """The gradient, and the weights that there were."""
    learner.policy.model.zero_grad(set_to_none=True)
    seen: set[float] = set()
    tokens = sum(len(s.positions) for s in batch.sequences)
    for number in {s.trajectory for s in batch.sequences}:
        segments = [s for s in batch.sequences if s.trajectory == number]
        chosen = torch.cat([_log_p(learner, s) for s in segments])
        advantage = float(segments[0].advantages[0])
        weight = _weight(loss, chosen.detach() - torch.cat([s.behaviour for s in segments]), advantage)
        seen |= set(weight.tolist())
        (-(weight * advantage * chosen).sum() / tokens).backward()
    return _flat(learner), seen


def _flat(learner: Learner) -> Tensor:
    return torch.cat([p.grad.flatten() for p in learner.policy.parameters().values() if p.grad is not None])


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("loss", [GSPO, TIS, PPO, SUM_MASK, MEAN_MASK])
def test_a_loss_over_sequences_looks_at_all_segments_of_a_trajectory_and_at_no_other(
    gpt2: Path, make_trajectories, loss: dict, packing: bool
) -> None:
    fields = {"model": {"dtype": "float64"}, "loss": loss}
    plain, learner = (
        Learner(gpt2, LearnerSettings.model_validate({**fields, "batch": {"token_budget": 30, "packing": p}})) for p in (False, packing)
    )
    trajectories = make_trajectories((3, 3, 2))
    assert max(len(t.segments) for t in trajectories) > 1
    batch = build_batch(trajectories, {t.attempt: (-1.0) ** i * (i + 1) for i, t in enumerate(trajectories)}, 0)
    behaviour_off = torch.Generator().manual_seed(0)  # near enough to the trainer that some weights are cut and some are not
    with torch.no_grad():
        for s in batch.sequences:
            own = _log_p(plain, s)
            s.behaviour.copy_(own - 0.3 * torch.randn(len(own), generator=behaviour_off, dtype=own.dtype))
    expected, weights = _by_hand(plain, batch, loss)
    assert len(weights) > 2

    micros = learner.cut(batch.sequences)
    assert len(micros) > 2
    learner.policy.model.zero_grad(set_to_none=True)
    learner.accumulate(Minibatch(micros), 0, Observations())
    assert float((_flat(learner) - expected).norm() / expected.norm()) < 1e-10


def test_a_loss_of_tokens_still_cuts_between_the_segments_of_a_trajectory(gpt2: Path, make_trajectories) -> None:
    batch = build_batch(trajectories := make_trajectories((2,)), {t.attempt: 1.0 for t in trajectories}, 0)
    counts = []
    for loss in ({"name": "decoupled_ppo"}, {"name": "gspo"}):
        learner = Learner(gpt2, LearnerSettings.model_validate({"loss": loss, "batch": {"token_budget": 1}}))
        micros = learner.cut(batch.sequences)
        counts.append(len(micros))
        assert [c for m in micros for c in m.counts] == [len(batch.sequences[i].positions) for m in micros for i in m.members]
    assert counts == [len(batch.sequences), 2] and counts[0] > 2
