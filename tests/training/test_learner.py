import random
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor

from rollart.training.batch import TrainBatch, build_batch
from rollart.training.errors import NonFiniteError, StateError
from rollart.training.learner import Learner, Minibatch
from rollart.training.microbatch import MicroBatch, micro_batches
from rollart.training.observe import Observations
from rollart.training.settings import BatchSettings, LearnerSettings, LossName, LossSettings, MaskSettings, ModelSettings, OptimiserSettings
from rollart.types import Attempt, Episode, Segment, Trajectory


def _settings(**fields: object) -> LearnerSettings:
    return LearnerSettings.model_validate(fields)


def _batch(trajectories: list[Trajectory], step: int = 0, seed: int = 0) -> TrainBatch:
    rng = random.Random(seed)
    advantages = {t.attempt: rng.uniform(-1, 1) for t in sorted(trajectories, key=lambda t: t.attempt)}
    return build_batch(trajectories, advantages, step)


def _cut(learner: Learner, batch: TrainBatch, budget: int) -> list[MicroBatch]:
    micros = micro_batches(batch.sequences, BatchSettings(token_budget=budget))
    return [m.to(learner.policy.device, learner.policy.compute_dtype) for m in micros]


def _gradient(learner: Learner, micros: list[MicroBatch]) -> Tensor:
    """The whole gradient of one minibatch, flat."""
    learner.policy.model.zero_grad(set_to_none=True)
    reference = learner.referred(micros) if learner.reference is not None else None
    learner.accumulate(Minibatch(micros, None, reference), 0, Observations())
    return torch.cat([p.grad.flatten() for p in learner.policy.parameters().values() if p.grad is not None])


def _off(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize(("family", "dtype", "bound"), [("gpt2", "float64", 1e-10), ("llama", "float32", 1e-5)])
def test_gradients_are_equal_across_1_2_and_7_micro_batches_and_orders(
    request: pytest.FixtureRequest, make_trajectories, family: str, dtype: str, bound: float
) -> None:
    loss = {"entropy": 0.01, "kl": 0.1}
    learner = Learner(request.getfixturevalue(family), _settings(model={"dtype": dtype}, loss=loss))
    trajectories = make_trajectories((3, 2, 1))
    batch = _batch(trajectories)
    whole = _gradient(learner, _cut(learner, batch, 10_000))
    assert whole.norm() > 1e-3
    by_count = {len(micros): micros for budget in range(1, 1000) if (micros := _cut(learner, batch, budget))}
    for count in (1, 2, 7):
        for order in range(3):
            micros = random.Random(order).sample(by_count[count], count)
            assert _off(_gradient(learner, micros), whole) < bound
    arrived = random.Random(4).sample(trajectories, len(trajectories))
    assert _off(_gradient(learner, _cut(learner, _batch(arrived), 60)), whole) < bound


def test_the_gradient_of_a_step_equals_the_policy_gradient_worked_out_sequence_by_sequence(gpt2: Path, make_trajectories) -> None:
    learner = Learner(gpt2, _settings(model={"dtype": "float64"}))
    batch = _batch(make_trajectories())
    found = _gradient(learner, _cut(learner, batch, 60))
    model = learner.policy.model
    model.zero_grad(set_to_none=True)
    tokens = sum(len(s.positions) for s in batch.sequences)
    for s in batch.sequences:
        log_p = torch.log_softmax(model(input_ids=s.ids.unsqueeze(0)).logits[0], -1)
        chosen = torch.stack([log_p[t - 1, s.ids[t]] for t in s.positions.tolist()])
        weight = torch.exp(chosen.detach() - s.behaviour).clamp(max=2.0)
        (-(weight * s.advantages * chosen).sum() / tokens).backward()  # at the proximal policy the ratio's gradient is log p's
    expected = torch.cat([p.grad.flatten() for p in learner.policy.parameters().values() if p.grad is not None])
    assert _off(found, expected) < 1e-10


@pytest.mark.parametrize("mask", [None, {"level": "token", "low": 1e-9, "high": 1e9}, {"level": "geometric", "by": "divergence", "high": 1e9}])
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("loss", get_args(LossName))
def test_no_gradient_reaches_the_logits_of_prompt_and_environment_tokens(
    llama: Path, make_trajectories, loss: str, mask: dict | None, packing: bool
) -> None:
    estimator = {"ppo_clip": "k1", "gspo": "k2"}.get(loss, "k3")
    options = {"name": loss, "entropy": 0.01, "kl": 0.1, "kl_estimator": estimator, "mask": mask}
    learner = Learner(llama, _settings(loss=options, batch={"packing": packing}))
    learner.policy._split = False  # the whole forward, so that every position has logits whose gradient can be looked at
    batch = _batch(make_trajectories())
    seen: list[Tensor] = []

    def keep(_module: object, _args: object, output: Tensor) -> None:
        if output.requires_grad:
            output.retain_grad()
            seen.append(output)

    learner.policy.model.get_output_embeddings().register_forward_hook(keep)  # type: ignore[operator]
    micros = micro_batches(batch.sequences, BatchSettings(), packed=packing)
    _gradient(learner, [m.to(learner.policy.device, learner.policy.compute_dtype) for m in micros])
    (logits,) = seen
    assert logits.grad is not None
    assert (len(logits) == 1) is packing
    trained = torch.zeros(logits.shape[:2], dtype=torch.bool)
    starts = torch.tensor([0, *(batch.sequences[i].inputs for i in micros[0].members)]).cumsum(0).tolist()
    for row, member in enumerate(micros[0].members):
        places = batch.sequences[member].positions - 1
        trained[0 if packing else row, places + starts[row] if packing else places] = True
    assert bool((logits.grad[~trained] == 0).all()) and bool((~trained).any())
    assert bool((logits.grad[trained].abs().sum(-1) > 0).all())


def test_tokens_with_the_id_of_padding_are_trained_on(llama: Path) -> None:
    def ended(last: int) -> Trajectory:
        segment = Segment()
        segment.append_prompt([3, 4])
        segment.append_response([5, last], [-2.0, -2.0], [0, 0], "stop")
        return Trajectory(Attempt(Episode("t", 0), 0), "n", 0, 0, [segment], "terminated")

    # The padding id is 0; the last response token is 0 too, and its loss must be in the gradient like that of any other id.
    learner = Learner(llama, _settings())
    trajectory = ended(0)
    metrics = learner.train_step(build_batch([trajectory], {trajectory.attempt: 1.0}, 0))
    assert metrics.tokens == 2
    after = learner.policy.logprobs(learner.cut(build_batch([trajectory], {trajectory.attempt: 1.0}, 0).sequences)[0])[0]
    before = Learner(llama, _settings()).policy.logprobs(learner.cut(build_batch([trajectory], {trajectory.attempt: 1.0}, 0).sequences)[0])[0]
    assert bool((after > before).all())


def test_a_batch_in_which_everything_is_masked_changes_nothing_and_says_so(llama: Path) -> None:
    learner = Learner(llama, _settings(optimiser={"weight_decay": 0.1}))
    segment = Segment()
    segment.append_prompt([1, 2, 3])
    trajectory = Trajectory(Attempt(Episode("t", 0), 0), "n", 0, 0, [segment], "terminated")
    before = learner.weights()
    metrics = learner.train_step(build_batch([trajectory], {trajectory.attempt: 1.0}, 0))
    assert (metrics.skipped, metrics.optimiser_steps, metrics.loss, metrics.tokens) == (("no_tokens",), 0, 0.0, 0)
    assert all(torch.equal(before[name], value) for name, value in learner.weights().items())
    assert learner.step == 1
    assert learner.supervised_step([segment]).skipped == ("no_tokens",)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("loss", get_args(LossName))
def test_a_step_whose_tokens_are_all_masked_changes_nothing_and_says_so(llama: Path, make_trajectories, loss: str, level: str) -> None:
    learner = Learner(llama, _settings(optimiser={"weight_decay": 0.1}, loss={"name": loss, "mask": {"level": level, "high": 1e9}}))
    learner.train_step(_batch(make_trajectories()))  # momentum that would move the weights
    settings = learner.settings.loss.model_copy(update={"mask": MaskSettings(level=level, low=0.0, high=1e-30)})
    learner.settings = learner.settings.model_copy(update={"loss": settings})
    before = learner.weights()
    metrics = learner.train_step(_batch(make_trajectories(), 1))
    assert (metrics.skipped, metrics.optimiser_steps, metrics.loss, metrics.shares["masked"]) == (("masked",), 0, 0.0, 1.0)
    assert all(torch.equal(before[name], value) for name, value in learner.weights().items())
    assert learner.step == 2


def test_a_batch_without_signal_changes_nothing_even_after_momentum_has_built_up(llama: Path, make_trajectories) -> None:
    learner = Learner(llama, _settings())
    trajectories = make_trajectories()
    learner.train_step(_batch(trajectories))
    before = learner.weights()
    metrics = learner.train_step(build_batch(trajectories, {t.attempt: 0.0 for t in trajectories}, 1))
    assert metrics.skipped == ("no_signal",)
    assert all(torch.equal(before[name], value) for name, value in learner.weights().items())


def test_a_step_that_is_not_finite_is_skipped_and_counted_and_too_many_are_an_error(llama: Path, make_trajectories) -> None:
    learner = Learner(llama, _settings(optimiser={"max_skips": 1}))
    trajectories = make_trajectories()
    broken = [build_batch(trajectories, {t.attempt: float("inf") for t in trajectories}, step) for step in range(2)]
    before = learner.weights()
    metrics = learner.train_step(broken[0])
    assert (metrics.skipped, metrics.optimiser_steps) == (("non_finite",), 0)
    with pytest.raises(NonFiniteError, match="2 optimiser steps in a row"):
        learner.train_step(broken[1])
    assert all(torch.equal(before[name], value) for name, value in learner.weights().items())
    assert not learner.optimiser.arrays()


@pytest.mark.parametrize(
    "fields", [{}, {"loss": {"kl": 0.1}, "batch": {"minibatches": 2}, "optimiser": {"decay": "cosine", "warmup_steps": 3, "total_steps": 12}}]
)
def test_ten_steps_equal_five_a_save_and_a_load_and_five_bit_for_bit(llama: Path, make_trajectories, fields: dict) -> None:
    batches = [_batch(make_trajectories(seed=step), step, seed=step) for step in range(10)]
    through = Learner(llama, _settings(**fields))
    expected = [through.train_step(b) for b in batches]

    first = Learner(llama, _settings(**fields))
    for batch in batches[:5]:
        first.train_step(batch)
    arrays, document = first.state()
    drawn = torch.rand(3)  # what the process draws after the save, a resumed one draws too
    second = Learner(llama, _settings(**fields, model=ModelSettings(seed=9).model_dump()))
    second.load_state(arrays, document)
    assert torch.equal(torch.rand(3), drawn)
    found = [second.train_step(b) for b in batches[5:]]

    assert [(m.loss, m.grad_norm, m.lr) for m in found] == [(m.loss, m.grad_norm, m.lr) for m in expected[5:]]
    ours, theirs = second.state()[0], through.state()[0]
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours if name != "rng/torch")


def test_state_is_a_copy_that_later_steps_leave_alone(llama: Path, make_trajectories) -> None:
    learner = Learner(llama, _settings())
    learner.train_step(_batch(make_trajectories()))
    arrays, _ = learner.state()
    kept = {name: value.clone() for name, value in arrays.items()}
    learner.train_step(_batch(make_trajectories(), 1))
    assert all(torch.equal(kept[name], value) for name, value in arrays.items())


def test_state_and_weights_of_another_model_are_refused_before_anything_changes(llama: Path, gpt2: Path) -> None:
    learner, other = Learner(llama, _settings()), Learner(gpt2, _settings())
    before = learner.weights()
    assert "lm_head.weight" not in before  # tied: stored once
    with pytest.raises(StateError, match="another model"):
        learner.load_weights(other.weights())
    with pytest.raises(StateError, match="another model"):
        learner.load_state(*other.state())
    with pytest.raises(StateError, match="lacks"):
        learner.load_state({}, {})
    with pytest.raises(StateError, match="shape"):
        learner.load_weights({name: value[:1] for name, value in before.items()})
    assert all(torch.equal(before[name], value) for name, value in learner.weights().items())


def test_a_batch_for_another_step_is_refused(llama: Path, make_trajectories) -> None:
    learner = Learner(llama, _settings())
    with pytest.raises(StateError, match="version 3"):
        learner.train_step(_batch(make_trajectories(), 3))


def test_later_minibatches_are_clipped_around_the_policy_at_the_start_of_the_step(llama: Path, make_trajectories) -> None:
    trajectories = make_trajectories()
    one = Learner(llama, _settings(optimiser={"lr": 0.01}))
    two = Learner(llama, _settings(optimiser={"lr": 0.01}, batch={"minibatches": 2}))
    first, second = one.train_step(_batch(trajectories)), two.train_step(_batch(trajectories))
    assert (first.optimiser_steps, first.ratio_max, first.shares["clipped"]) == (1, 1.0, 0.0)
    assert second.optimiser_steps == 2
    assert second.ratio_max > 1.01
    # Proximal and behaviour policy do not depend on how many steps follow.
    assert second.weight_mean == pytest.approx(first.weight_mean, rel=1e-5)
    assert second.by_staleness[0].drift == pytest.approx(first.by_staleness[0].drift, rel=1e-5)


def test_metrics_tell_drift_weights_and_effective_sample_size_by_staleness(llama: Path, make_trajectories) -> None:
    learner = Learner(llama, _settings(batch={"packing": False}))
    learner.step = 2
    trajectories = make_trajectories((2,))
    micros = learner.cut(_batch(trajectories, 2).sequences)
    with torch.no_grad():
        own = learner.policy.logprobs(micros[0])[0].tolist()
    gap = 0.25
    values = iter(own)
    segments = []
    for row in range(len(micros[0].ids)):
        s = sorted(_batch(trajectories, 2).sequences, key=lambda s: s.inputs)[row]
        version = row % 2 + 1
        made = Segment()
        made.append_prompt(s.ids[: int(s.positions[0])].tolist())
        for t in range(int(s.positions[0]), len(s.ids)):
            if t in s.positions.tolist():
                made.append_response([int(s.ids[t])], [next(values) - (gap if version == 1 else 0.0)], [version], "stop")
            else:
                made.append_prompt([int(s.ids[t])])
        segments.append(made)
    trajectory = Trajectory(Attempt(Episode("t", 0), 0), "n", 0, 0, segments, "terminated")
    metrics = learner.train_step(build_batch([trajectory], {trajectory.attempt: 1.0}, 2))
    assert metrics.drift == pytest.approx(0.0, abs=1e-6)
    assert {age: round(m.drift, 5) for age, m in metrics.by_staleness.items()} == {0: 0.0, 1: gap}
    fresh, stale = metrics.by_staleness[0].tokens, metrics.by_staleness[1].tokens
    w = torch.tensor(gap).exp().item()
    n = fresh + stale
    assert metrics.weight_mean == pytest.approx((fresh + stale * w) / n, rel=1e-5)
    assert metrics.effective_sample_share == pytest.approx((fresh + stale * w) ** 2 / (n * (fresh + stale * w * w)), rel=1e-5)
    assert metrics.tokens == n and metrics.shares["truncated"] == 0.0


def test_supervised_steps_learn_the_masked_tokens_and_do_not_count_as_training_steps(llama: Path) -> None:
    learner = Learner(llama, _settings(optimiser={"lr": 0.01}))
    segment = Segment()
    segment.append_prompt([1, 2])
    segment.append_response([7, 8, 0], [0.0] * 3, [0] * 3, "stop")
    first = learner.supervised_step([segment] * 4)
    for _ in range(60):
        last = learner.supervised_step([segment] * 4)
    assert first.tokens == 12 and first.loss > 2.0
    assert last.loss < 0.1
    assert (learner.step, learner.optimiser.steps) == (0, 61)
    learner.begin(OptimiserSettings(lr=0.5, warmup_steps=10))
    assert learner.optimiser.steps == 0 and not learner.optimiser.arrays()


@pytest.mark.parametrize("loss", [LossSettings(), LossSettings(name="ppo_clip"), LossSettings(kl=0.001, entropy=0.001)])
def test_the_policy_learns_to_prefer_the_rewarded_token(llama: Path, loss: LossSettings) -> None:
    learner = Learner(llama, LearnerSettings(optimiser=OptimiserSettings(lr=0.01), loss=loss))
    rng = torch.Generator().manual_seed(0)
    rewarded, prompt = 4, [1, 2]

    def probabilities() -> Tensor:
        with torch.no_grad():
            return torch.softmax(learner.policy.model(input_ids=torch.tensor([prompt])).logits[0, -1], -1)

    start = float(probabilities()[rewarded])
    for step in range(30):
        p = probabilities()
        ids = torch.multinomial(p, 32, replacement=True, generator=rng).tolist()
        trajectories = []
        for member, token in enumerate(ids):
            segment = Segment()
            segment.append_prompt(prompt)
            segment.append_response([token], [float(p[token].log())], [step], "stop")
            trajectories.append(Trajectory(Attempt(Episode("bandit", step), member), "n", 0, 0, [segment], "terminated"))
        mean = sum(t == rewarded for t in ids) / len(ids)
        advantages = {t.attempt: float(token == rewarded) - mean for t, token in zip(trajectories, ids, strict=True)}
        metrics = learner.train_step(build_batch(trajectories, advantages, step))
        assert metrics.skipped == ("no_signal",) or (metrics.drift is not None and metrics.drift < 1e-5)
    assert start < 0.2
    assert float(probabilities()[rewarded]) > 0.9


def test_the_first_step_moves_weights_by_the_scheduled_learning_rate(llama: Path, make_trajectories) -> None:
    learner = Learner(llama, _settings(optimiser={"lr": 0.01, "warmup_steps": 10}))
    before = learner.weights()
    metrics = learner.train_step(_batch(make_trajectories()))
    moved = max(float((before[name] - value).abs().max()) for name, value in learner.weights().items())
    assert metrics.lr == pytest.approx(0.001)
    assert moved == pytest.approx(0.001, rel=1e-2)  # Adam's first step is lr times the gradient's sign


def test_the_kl_penalty_measures_the_distance_from_the_weights_that_training_began_with(llama: Path, make_trajectories) -> None:
    learner = Learner(llama, _settings(optimiser={"lr": 0.01}, loss={"kl": 0.1}))
    first, second = (learner.train_step(_batch(make_trajectories(), step)) for step in range(2))
    assert first.kl == 0.0
    assert second.kl > 1e-4
    learner.begin(step=2)
    assert learner.train_step(_batch(make_trajectories(), 2)).kl == 0.0


GAE = {"advantage": {"name": "gae", "trace": 0.9}, "loss": {"value": 0.5}}


def test_the_value_head_is_trained_towards_returns_with_its_own_share_of_the_loss(gpt2: Path, make_trajectories) -> None:
    learner = Learner(gpt2, _settings(model={"dtype": "float64"}, **GAE))
    trajectories = make_trajectories((2, 1))
    scored = build_batch(trajectories, {t.attempt: 1.0 + t.attempt.member for t in trajectories}, 0)
    batch = learner.finish(scored)
    assert all(s.returns is not None for s in batch.sequences)
    # The head starts at 0, so a trajectory's returns are its score, discounted by the trace from its last token back.
    last = batch.sequences[-1]
    assert last.returns is not None
    expected = [float(scored.sequences[-1].advantages[0]) * 0.9**k for k in range(len(last.positions))]
    assert last.returns.flip(0).tolist() == pytest.approx(expected, abs=1e-12)
    micros = learner.cut(batch.sequences)
    learner.policy.model.zero_grad(set_to_none=True)
    learner.accumulate(Minibatch(micros), 0, Observations())
    assert learner.value_head is not None and learner.value_head.weight.grad is not None
    oracle = torch.zeros_like(learner.value_head.weight[0])
    for micro in micros:
        hidden = learner.policy.score(micro, hidden=True).hidden
        assert hidden is not None
        oracle += (0.5 * micro.weights * (0.0 - micro.returns)) @ hidden.detach()
    assert torch.allclose(learner.value_head.weight.grad[0], oracle, atol=1e-12, rtol=1e-9)


def test_the_value_head_learns_and_says_how_much_it_explains(llama: Path, make_trajectories) -> None:
    learner = Learner(llama, _settings(optimiser={"lr": 0.01}, advantage={"name": "gae", "trace": 1.0}))
    trajectories = make_trajectories((3, 2))
    found = []
    for step in range(25):
        found.append(learner.train_step(build_batch(trajectories, {t.attempt: float(t.attempt.member % 2) for t in trajectories}, step)))
    assert found[0].explained == pytest.approx(0.0, abs=1e-6)
    assert found[-1].value_loss is not None and found[0].value_loss is not None and found[-1].value_loss < 0.2 * found[0].value_loss
    assert found[-1].explained is not None and found[-1].explained > 0.7


@pytest.mark.parametrize("fields", [GAE, {"advantage": {"name": "reinforce", "baseline": "running"}}])
def test_value_head_and_running_baselines_come_back_with_the_state(llama: Path, make_trajectories, fields: dict) -> None:
    batches = []
    for step in range(4):
        trajectories = make_trajectories((3, 2), seed=step)
        batches.append(build_batch(trajectories, {t.attempt: float((t.attempt.member + step) % 2) for t in trajectories}, step))
    through = Learner(llama, _settings(**fields))
    expected = [through.train_step(b) for b in batches]
    first, second = Learner(llama, _settings(**fields)), Learner(llama, _settings(**fields))
    for batch in batches[:2]:
        first.train_step(batch)
    second.load_state(*first.state())
    assert [second.train_step(b).loss for b in batches[2:]] == [m.loss for m in expected[2:]]
    assert second.state()[1] == through.state()[1]
    assert set(second.weights()) == set(Learner(llama, _settings()).weights())  # what is published is the policy alone
    with pytest.raises(StateError, match=r"another model|lacks|does not fit"):
        second.load_state(Learner(llama, _settings()).state()[0], {"step": 0})
