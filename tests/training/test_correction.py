"""Whether the correction for stale samples is right: a tabular policy, with every trajectory of every mix of versions enumerated."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config

from rollart.training.batch import build_batch
from rollart.training.learner import Learner, Minibatch
from rollart.training.losses.registry import policy_loss
from rollart.training.losses.terms import LossInputs
from rollart.training.observe import Observations
from rollart.training.settings import LearnerSettings, LossSettings
from rollart.types import Attempt, Episode, Segment, Trajectory

ACTIONS, LENGTH = 3, 3
PREFIXES = [p for n in range(LENGTH) for p in itertools.product(range(ACTIONS), repeat=n)]
TRAJECTORIES = list(itertools.product(range(ACTIONS), repeat=LENGTH))
# Which version samples each token, and how often: weights may be swapped between any two tokens.
MIXES = {(0, 0, 0): 0.3, (0, 0, 1): 0.2, (0, 1, 1): 0.1, (1, 1, 1): 0.15, (0, 1, 2): 0.25}


def _logits(seed: int, scale: float = 1.0) -> dict[tuple[int, ...], list[float]]:
    rng = random.Random(seed)
    return {p: [scale * rng.gauss(0, 1) for _ in range(ACTIONS)] for p in PREFIXES}


VERSIONS = [_logits(0), _logits(1), _logits(2)]
"""Versions 0, 1 and 2; the trainer is at 2."""
REWARD = {t: random.Random(f"reward {t}").uniform(-1, 1) for t in TRAJECTORIES}


def _log_p(version: int, prefix: tuple[int, ...], action: int) -> float:
    row = VERSIONS[version][prefix]
    return row[action] - math.log(sum(map(math.exp, row)))


def _slope(prefix: tuple[int, ...], action: int) -> list[float]:
    """The gradient of version 2's log-probability by its logits after `prefix`."""
    return [float(a == action) - math.exp(_log_p(2, prefix, a)) for a in range(ACTIONS)]


def _by_hand(weigh) -> Tensor:
    """Sum over mixes, trajectories and tokens of (chance of the trajectory) weight reward grad log p, [prefixes, actions]."""
    total = {p: [0.0] * ACTIONS for p in PREFIXES}
    for mix, share in MIXES.items():
        for trajectory in TRAJECTORIES:
            gaps = [_log_p(2, trajectory[:t], a) - _log_p(mix[t], trajectory[:t], a) for t, a in enumerate(trajectory)]
            chance = share * math.exp(sum(_log_p(mix[t], trajectory[:t], a) for t, a in enumerate(trajectory)))
            for t, action in enumerate(trajectory):
                for a, slope in enumerate(_slope(trajectory[:t], action)):
                    total[trajectory[:t]][a] += chance * weigh(gaps, t) * REWARD[trajectory] * slope
    return torch.tensor([total[p] for p in PREFIXES], dtype=torch.float64)


def _true_gradient() -> Tensor:
    """That of the expected reward of version 2, by differentiating the expectation itself."""
    logits = torch.tensor([VERSIONS[2][p] for p in PREFIXES], dtype=torch.float64, requires_grad=True)
    log_p = torch.log_softmax(logits, -1)
    rows = {p: i for i, p in enumerate(PREFIXES)}
    expected = torch.stack([REWARD[t] * sum(log_p[rows[t[:i]], a] for i, a in enumerate(t)).exp() for t in TRAJECTORIES]).sum()  # type: ignore[union-attr]
    return torch.autograd.grad(expected, logits)[0]


def _trained(settings: LossSettings) -> Tensor:
    """What the loss makes of all trajectories, each weighed by its chance under the versions that sampled it; uphill, [prefixes, actions]."""
    logits = torch.tensor([VERSIONS[2][p] for p in PREFIXES], dtype=torch.float64, requires_grad=True)
    log_p = torch.log_softmax(logits, -1)
    rows = {p: i for i, p in enumerate(PREFIXES)}
    places, behaviour, rewards, sequence, chances = [], [], [], [], []
    for number, ((mix, share), trajectory) in enumerate(itertools.product(MIXES.items(), TRAJECTORIES)):
        sampled = [_log_p(mix[t], trajectory[:t], a) for t, a in enumerate(trajectory)]
        places += [(rows[trajectory[:t]], a) for t, a in enumerate(trajectory)]
        behaviour += sampled
        rewards += [REWARD[trajectory]] * LENGTH
        sequence += [number] * LENGTH
        chances += [share * math.exp(sum(sampled))] * LENGTH
    index = torch.tensor(places)
    current = log_p[index[:, 0], index[:, 1]]
    stored = torch.tensor(behaviour, dtype=torch.float64)
    inputs = LossInputs(current, current.detach(), stored, torch.tensor(rewards, dtype=torch.float64), torch.tensor(sequence))
    loss = (torch.tensor(chances, dtype=torch.float64) * policy_loss(inputs, settings).per_token).sum()
    return -torch.autograd.grad(loss, logits)[0]


@pytest.mark.parametrize("name", ["tis", "decoupled_ppo"])
def test_the_untruncated_correction_by_sequence_gives_the_true_gradient(name: str) -> None:
    found = _trained(LossSettings.model_validate({"name": name, "correction": "sequence", "truncate": None}))
    assert float((found - _true_gradient()).abs().max()) < 1e-9


@pytest.mark.parametrize("name", ["tis", "decoupled_ppo"])
def test_without_correction_the_gradient_misses_by_the_predicted_amount(name: str) -> None:
    true = _true_gradient()
    found = _trained(LossSettings.model_validate({"name": name, "correction": "none"}))
    predicted = _by_hand(lambda gaps, t: 1.0) - _by_hand(lambda gaps, t: math.exp(sum(gaps)))
    assert float((found - true - predicted).abs().max()) < 1e-9
    assert float(predicted.norm() / true.norm()) > 0.5


@pytest.mark.parametrize(("level", "cap"), [("token", None), ("token", 2.0), ("sequence", 2.0)])
def test_a_correction_of_less_variance_misses_by_the_predicted_amount(level: str, cap: float | None) -> None:
    def weight(gaps: list[float], t: int) -> float:
        return min(math.exp(gaps[t] if level == "token" else sum(gaps)), math.inf if cap is None else cap)

    found = _trained(LossSettings.model_validate({"name": "tis", "correction": level, "truncate": cap}))
    assert float((found - _by_hand(weight)).abs().max()) < 1e-9
    assert float((found - _true_gradient()).norm()) > 1e-3


PROMPT = [0, 1]


def _versions_of_a_model(folder: Path) -> list[Learner]:
    """Three policies over the actions, far apart, in float64; the last is the trainer."""
    GPT2Config(vocab_size=ACTIONS, n_embd=8, n_layer=1, n_head=1, n_positions=8, initializer_range=0.5).save_pretrained(folder)

    def learner(seed: int) -> Learner:
        loss = {"name": "tis", "correction": "sequence", "truncate": None}
        return Learner(folder, LearnerSettings.model_validate({"model": {"dtype": "float64", "seed": seed}, "loss": loss}))

    return [learner(seed) for seed in range(3)]


def _log_p_of(learner: Learner) -> Tensor:
    """The log-probability of each action of each trajectory, [trajectories, LENGTH], by a plain forward pass."""
    ids = torch.tensor([[*PROMPT, *t] for t in TRAJECTORIES])
    log_p = torch.log_softmax(learner.policy.model(input_ids=ids).logits[:, len(PROMPT) - 1 : -1], -1)
    return log_p.gather(-1, torch.tensor(TRAJECTORIES).unsqueeze(-1)).squeeze(-1)


def _flat_gradient(learner: Learner) -> Tensor:
    return torch.cat([p.grad.flatten() for p in learner.policy.parameters().values() if p.grad is not None])


@pytest.mark.parametrize("correction", ["sequence", "token", "none"])
def test_trajectories_whose_tokens_are_of_several_versions_give_the_learner_the_right_gradient(tmp_path: Path, correction: str) -> None:
    """All of them, as segments with stored log-probabilities and versions: by sequence the true gradient, else the one that is predicted."""
    versions = _versions_of_a_model(tmp_path)
    trainer = versions[2]
    trainer.settings = trainer.settings.model_copy(update={"loss": trainer.settings.loss.model_copy(update={"correction": correction})})
    with torch.no_grad():
        stored = torch.stack([_log_p_of(learner) for learner in versions])
    tokens = len(MIXES) * len(TRAJECTORIES) * LENGTH
    trajectories, advantages, by_mix = [], {}, []
    for index, (mix, share) in enumerate(MIXES.items()):
        sampled = stored[list(mix), :, range(LENGTH)].T
        chance = share * sampled.sum(-1).exp()
        by_mix.append((chance, (stored[2] - sampled).exp()))
        for number, actions in enumerate(TRAJECTORIES):
            segment = Segment()
            segment.append_prompt(PROMPT)
            segment.append_response(list(actions), sampled[number].tolist(), list(mix), "stop")
            attempt = Attempt(Episode("tabular", index), number)
            trajectories.append(Trajectory(attempt, f"n{index}-{number}", 0, 0, [segment], "terminated"))
            advantages[attempt] = float(chance[number]) * REWARD[actions] * tokens  # the loss divides by all tokens
    seen = Observations()
    trainer.accumulate(Minibatch(trainer.cut(build_batch(trajectories, advantages, 2).sequences), None, None), 2, seen)
    found = -_flat_gradient(trainer)
    trainer.policy.model.zero_grad(set_to_none=True)
    own = _log_p_of(trainer)
    if correction == "sequence":
        gains = own.sum(-1).exp()  # whose gradient, with the rewards, is that of the expectation itself
    else:
        gains = sum(chance * ((ratio if correction == "token" else 1.0) * own).sum(-1) for chance, ratio in by_mix)
    (torch.tensor([REWARD[t] for t in TRAJECTORIES], dtype=torch.float64) * gains).sum().backward()
    assert float((found - _flat_gradient(trainer)).abs().max()) < 1e-9
    assert float(found.abs().max()) > 1e-2
    for age, told in seen.summary()["by_staleness"].items():
        ratios = [ratio[:, t] for mix, (_, ratio) in zip(MIXES, by_mix, strict=True) for t in range(LENGTH) if mix[t] == 2 - age]
        assert told.tokens == len(TRAJECTORIES) * len(ratios)
        assert told.weight == pytest.approx(float(torch.cat(ratios).mean()), rel=1e-9)


def test_weights_are_told_by_staleness_with_their_distribution_and_effective_sample_size() -> None:
    fresh, stale = [0.0] * 100, [math.log(i / 50) for i in range(1, 101)]
    behaviour = torch.tensor([-1.0 - g for g in fresh + stale], dtype=torch.float64)
    proximal = torch.full((200,), -1.0, dtype=torch.float64)
    inputs = LossInputs(proximal.clone().requires_grad_(), proximal, behaviour, torch.ones(200, dtype=torch.float64), torch.arange(200))
    seen = Observations()
    settings = LossSettings.model_validate({"truncate": 1.5, "mask": {"low": 0.1}})
    seen.add(inputs, policy_loss(inputs, settings), torch.tensor([0] * 100 + [2] * 100))
    found = seen.summary()
    new, old = found["by_staleness"][0], found["by_staleness"][2]
    assert (new.tokens, new.weight, new.drift, new.effective_sample_share, new.quantiles["0.99"]) == (100, 1.0, 0.0, 1.0, 1.0)
    weights = [i / 50 for i in range(1, 101)]
    assert old.weight == pytest.approx(sum(weights) / 100, abs=1e-9)
    assert old.effective_sample_share == pytest.approx(sum(weights) ** 2 / (100 * sum(w * w for w in weights)), abs=1e-9)
    assert old.quantiles == pytest.approx({"0.01": 0.02, "0.1": 0.2, "0.5": 1.0, "0.9": 1.8, "0.99": 1.98}, abs=1e-9)
    assert old.shares == {"clipped": 0.0, "truncated": 0.25, "masked": 0.04} and new.shares["truncated"] == 0.0
    assert found["shares"]["truncated"] == 0.125
    assert (found["drift"], found["drift_max"]) == (0.0, 0.0)
