import random
from typing import get_args

import pytest

from rollart.training.advantages.grpo import grpo
from rollart.training.advantages.registry import ADVANTAGES, advantages_of
from rollart.training.errors import BatchError
from rollart.training.settings import AdvantageName, AdvantageSettings
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
