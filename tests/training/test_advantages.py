import random
from typing import get_args

import pytest
import torch

from rollart.training.advantages.finish import finished
from rollart.training.advantages.gae import gae
from rollart.training.advantages.grpo import grpo
from rollart.training.advantages.registry import ADVANTAGES, advantages_of
from rollart.training.advantages.reinforce import RunningBaselines, reinforce
from rollart.training.advantages.rloo import rloo
from rollart.training.batch import TrainBatch, TrainSequence
from rollart.training.errors import BatchError
from rollart.training.settings import AdvantageName, AdvantagePlan, AdvantageSettings
from rollart.types import Attempt, Episode, Group, Member, Receipt, Score

# Groups of 4, 3 and 1 with (score, r - mean, sample variance) written out by hand.
SCORED = [
    ("a", 1.0, 0.5, 1.0 / 3.0), ("a", 0.0, -0.5, 1.0 / 3.0), ("a", 0.0, -0.5, 1.0 / 3.0), ("a", 1.0, 0.5, 1.0 / 3.0),
    ("b", 0.2, -0.3, 0.07), ("b", 0.7, 0.2, 0.07), ("b", 0.6, 0.1, 0.07),
    ("c", 0.9, 0.0, 0.0),
]  # fmt: skip


@pytest.mark.parametrize("divide", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_shuffled_groups_of_4_3_and_1_match_the_hand_computed_oracle(divide: bool, seed: int) -> None:
    rows = random.Random(seed).sample(SCORED, len(SCORED))
    found = grpo([r[1] for r in rows], [r[0] for r in rows], divide_by_std=divide)
    expected = [r[2] / (r[3] ** 0.5 + 1e-4) if divide else r[2] for r in rows]
    assert found == pytest.approx(expected, abs=1e-9)


def test_a_group_without_spread_gets_exactly_zero_though_its_mean_does_not_round() -> None:
    assert grpo([0.1, 0.1, 0.1, 0.5], ["a", "a", "a", "b"]) == [0.0] * 4


def test_the_table_holds_every_name_that_the_settings_accept() -> None:
    assert set(ADVANTAGES) == set(get_args(AdvantageName))


def _member(episode: Episode, member: int, value: float, nonce: str = "n") -> Member:
    attempt = Attempt(episode, member)
    return Member(Receipt(attempt, "n", 0, "f", 0, "terminated", 0, 0, 2, 1, 1), Score(attempt, nonce, value))


def test_advantages_come_by_attempt_from_each_groups_own_scores() -> None:
    one, two = Episode("t", 0), Episode("t", 1)
    groups = [Group(two, (_member(two, 0, 5.0), _member(two, 1, 7.0))), Group(one, (_member(one, 0, 0.0), _member(one, 1, 1.0)))]
    found = advantages_of(groups, AdvantageSettings(divide_by_std=False))
    assert found == {Attempt(two, 0): -1.0, Attempt(two, 1): 1.0, Attempt(one, 0): -0.5, Attempt(one, 1): 0.5}


def test_a_score_of_another_execution_is_refused() -> None:
    episode = Episode("t", 0)
    with pytest.raises(BatchError, match="another execution"):
        advantages_of([Group(episode, (_member(episode, 0, 1.0, nonce="other"),))], AdvantageSettings())


def test_an_attempt_that_stands_twice_is_refused() -> None:
    episode = Episode("t", 0)
    with pytest.raises(BatchError, match="twice"):
        advantages_of([Group(episode, (_member(episode, 0, 1.0), _member(episode, 0, 0.0)))], AdvantageSettings())


def test_a_member_of_another_episode_is_refused() -> None:
    with pytest.raises(BatchError, match="one episode"):
        advantages_of([Group(Episode("t", 0), (_member(Episode("t", 1), 0, 1.0),))], AdvantageSettings())


@pytest.mark.parametrize("seed", range(3))
def test_leave_one_out_compares_each_score_with_the_mean_of_the_others(seed: int) -> None:
    # a: (1, 0, 0, 1), whose others average 1/3 and 2/3; b: (0.2, 0.7, 0.6), whose others average 0.65, 0.4 and 0.45; c is alone.
    oracle = [("a", 1.0, 2 / 3), ("a", 0.0, -2 / 3), ("a", 0.0, -2 / 3), ("a", 1.0, 2 / 3)]
    oracle += [("b", 0.2, -0.45), ("b", 0.7, 0.3), ("b", 0.6, 0.15), ("c", 0.9, 0.0)]
    rows = random.Random(seed).sample(oracle, len(oracle))
    assert rloo([r[1] for r in rows], [r[0] for r in rows]) == pytest.approx([r[2] for r in rows], abs=1e-9)


def test_leave_one_out_gives_a_group_without_spread_exactly_zero() -> None:
    assert rloo([0.1, 0.1, 0.1], ["a"] * 3) == [0.0] * 3


def test_reinforce_compares_each_score_with_its_tasks_mean_in_the_batch() -> None:
    found = reinforce([1.0, 0.0, 0.25, 5.0, 6.0], ["x", "x", "x", "y", "y"])
    assert found == pytest.approx([1 - 1.25 / 3, -1.25 / 3, 0.25 - 1.25 / 3, -0.5, 0.5], abs=1e-9)


def test_a_running_baseline_is_what_was_known_before_the_batch() -> None:
    baselines = RunningBaselines()
    assert baselines.baseline("x", [1.0, 0.0, 0.5]) == pytest.approx(0.5, abs=1e-9)  # nothing before: its own mean
    baselines.update("x", [1.0, 0.0, 0.5], 0.9)
    assert baselines.baseline("x", [9.0]) == pytest.approx(0.5, abs=1e-9)
    baselines.update("x", [1.0, 1.0], 0.9)
    assert baselines.baseline("x", [9.0]) == pytest.approx(0.9 * 0.5 + 0.1 * 1.0, abs=1e-9)
    assert RunningBaselines(baselines.means).means == baselines.means


@pytest.mark.parametrize(("discount", "trace"), [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (0.7, 0.0)])
def test_generalised_advantages_match_the_sum_over_later_differences(discount: float, trace: float) -> None:
    values, score = [0.3, -0.2, 0.8, 0.1], 2.0
    deltas = [discount * values[t + 1] - values[t] for t in range(3)] + [score - values[3]]
    oracle = [sum((discount * trace) ** (k - t) * deltas[k] for k in range(t, 4)) for t in range(4)]
    advantages, returns = gae(torch.tensor(values, dtype=torch.float64), score, discount=discount, trace=trace)
    assert advantages.tolist() == pytest.approx(oracle, abs=1e-9)
    assert returns.tolist() == pytest.approx([a + v for a, v in zip(oracle, values, strict=True)], abs=1e-9)


def _sequence(task: str, trajectory: int, advantage: float, tokens: int = 2) -> TrainSequence:
    ids = torch.arange(tokens + 1)
    spread = torch.full((tokens,), advantage, dtype=torch.float64)
    return TrainSequence(ids, ids[1:], spread, ids[1:], spread, 1.0, trajectory, task)


def test_a_tasks_advantages_are_brought_to_one_scale_each_trajectory_counting_once() -> None:
    # x: 1, 3 and 8 of three trajectories, the first in two segments and the last with many tokens: mean 4, deviation sqrt(26/3).
    batch = TrainBatch(0, (_sequence("x", 0, 1.0, 1), _sequence("x", 0, 1.0, 3), _sequence("x", 1, 3.0), _sequence("x", 2, 8.0, 9),
                           _sequence("y", 3, 0.5), _sequence("y", 4, 2.5), _sequence("z", 5, 7.0), _sequence("z", 6, 7.0)), 7)  # fmt: skip
    common = AdvantageSettings(normalise="task", weight=2.0)
    plan = AdvantagePlan(**common.model_dump(), tasks={"y": AdvantageSettings(weight=3.0)})
    found = finished(batch, plan, RunningBaselines(), None)
    scale = 2.0 / (26.0 / 3.0) ** 0.5
    oracle = [-3 * scale, -3 * scale, -1 * scale, 4 * scale, 1.5, 7.5, 0.0, 0.0]
    assert [float(s.advantages[0]) for s in found.sequences] == pytest.approx(oracle, abs=1e-9)


def test_a_running_baseline_is_subtracted_by_task_and_taken_in_once() -> None:
    settings = AdvantageSettings(name="reinforce", baseline="running", baseline_decay=0.5)
    baselines = RunningBaselines({"x": 0.25})
    batch = TrainBatch(0, (_sequence("x", 0, 1.0), _sequence("x", 0, 1.0, 5), _sequence("x", 1, 0.0)), 2)
    found = finished(batch, settings, baselines, None)
    assert [float(s.advantages[-1]) for s in found.sequences] == [0.75, 0.75, -0.25]
    assert baselines.means == {"x": 0.5 * 0.25 + 0.5 * 0.5}


def test_a_trajectorys_segments_are_one_chain_for_the_value_head() -> None:
    batch = TrainBatch(0, (_sequence("x", 0, 1.0, 1), _sequence("y", 1, 0.5), _sequence("x", 0, 1.0, 2)), 2)
    plan = AdvantagePlan(tasks={"x": AdvantageSettings(name="gae", trace=0.5)})
    values = {1: [0.1], 2: [0.5, 0.6]}  # by the number of tokens
    found = finished(batch, plan, RunningBaselines(), lambda chosen: [torch.tensor(values[len(s.positions)]) for s in chosen])
    first, other, second = found.sequences
    # Differences 0.4, 0.1, 0.4, each with half of what follows it.
    assert torch.cat([first.advantages, second.advantages]).tolist() == pytest.approx([0.55, 0.3, 0.4], abs=1e-6)
    assert second.returns is not None and second.returns.tolist() == pytest.approx([0.8, 1.0], abs=1e-6)
    assert other.returns is None and other.advantages.tolist() == [0.5, 0.5]


def test_each_task_has_the_estimator_that_its_settings_name() -> None:
    one, two = Episode("x", 0), Episode("y", 0)
    groups = [Group(e, (_member(e, 0, 0.0), _member(e, 1, 1.0), _member(e, 2, 1.0))) for e in (one, two)]
    plan = AdvantagePlan(name="rloo", tasks={"y": AdvantageSettings(name="grpo", divide_by_std=False)})
    found = advantages_of(groups, plan)
    assert [found[Attempt(one, i)] for i in range(3)] == pytest.approx([-1.0, 0.5, 0.5], abs=1e-9)
    assert [found[Attempt(two, i)] for i in range(3)] == pytest.approx([-2 / 3, 1 / 3, 1 / 3], abs=1e-9)


def test_a_baseline_of_the_task_gives_a_group_without_spread_a_signal() -> None:
    one, two = Episode("x", 0), Episode("x", 1)
    groups = [Group(one, (_member(one, 0, 1.0), _member(one, 1, 1.0))), Group(two, (_member(two, 0, 0.0), _member(two, 1, 0.0)))]
    assert list(advantages_of(groups, AdvantageSettings(name="reinforce")).values()) == [0.5, 0.5, -0.5, -0.5]
