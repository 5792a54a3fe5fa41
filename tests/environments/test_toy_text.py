"""Gymnasium's toy-text games, on the real library."""

import random

import gymnasium
import pytest

from rollart.environments.registry import EnvironmentSettingsError, make
from rollart.environments.toy_text import GAMES


def play(game, seed, turns=15):
    environment, rng = make("gymnasium", game=game, turns=turns), random.Random(seed)
    said = [environment.reset(seed)]
    while True:
        result = environment.step(environment.script(rng))
        said += [result.observation, result.reward]
        if result.terminated or result.truncated:
            environment.close()
            return said


@pytest.mark.parametrize("game", GAMES)
def test_the_same_seed_is_the_same_episode_and_seeds_differ(game):
    assert play(game, 5) == play(game, 5)
    assert len({tuple(play(game, seed)) for seed in range(10)}) > 5


@pytest.mark.parametrize("game", GAMES)
def test_the_actions_are_as_many_as_gymnasiums(game):
    assert gymnasium.make(game).action_space.n == len(GAMES[game].actions)


def test_a_lake_by_hand_by_names_and_numbers():
    lake = make("gymnasium", options={"is_slippery": False})
    assert lake.reset(0) == "@...\n.#.#\n...#\n#..*\nactions: left down right up\n"
    assert lake.step("right").observation == ".@..\n.#.#\n...#\n#..*\n"
    assert lake.step("0").observation == "@...\n.#.#\n...#\n#..*\n"
    rewards = [lake.step(action) for action in ("down", "down", " RIGHT\n", "down", "right", "right")]
    assert [r.reward for r in rewards] == [0, 0, 0, 0, 0, 1]
    assert rewards[-1].terminated and rewards[-1].observation == ""


def test_a_cliff_by_hand():
    cliff = make("gymnasium", game="CliffWalking-v1")
    assert cliff.reset(0).splitlines()[3] == "@##########*"
    fallen = cliff.step("right")
    assert (fallen.reward, fallen.terminated) == (-100.0, False)
    rewards = [cliff.step(action) for action in ["up", *["right"] * 11, "down"]]
    assert [r.reward for r in rewards] == [-1.0] * 13 and rewards[-1].terminated


def test_a_taxi_by_hand():
    taxi = make("gymnasium", game="Taxi-v4")
    seed = next(s for s in range(3000) if (text := taxi.reset(s)).splitlines()[1].startswith("|@") and "passenger at R, wants to Y" in text)
    first = "+---------+\n|@: | : :G|\n| : | : : |\n| : : : : |\n| | : | : |\n|Y| : |B: |\n+---------+\npassenger at R, wants to Y\n"
    assert taxi.reset(seed) == first + "actions: south north east west pickup dropoff\n"
    assert taxi.step("dropoff").reward == -10.0
    carried = taxi.step("pickup")
    assert carried.reward == -1.0 and carried.observation.endswith("passenger in the taxi, wants to Y\n")
    assert [taxi.step("south").reward for _ in range(4)] == [-1.0] * 4
    ended = taxi.step("dropoff")
    assert (ended.reward, ended.terminated, ended.observation) == (20.0, True, "")


def test_a_blackjack_hand_by_hand():
    table = make("gymnasium", game="Blackjack-v1")
    seed = next(s for s in range(500) if table.reset(s).startswith("you 20, dealer 6"))
    assert table.reset(seed) == "you 20, dealer 6\nactions: stick hit\n"
    ended = table.step("stick")
    assert ended.terminated and ended.reward in (-1.0, 0.0, 1.0)


@pytest.mark.parametrize("action", ["", "fly", "9", "-1", "1.0", "²", "left right", "x" * 100_000, "__import__('os')"])
@pytest.mark.parametrize("game", GAMES)
def test_a_malformed_action_is_scored_and_uses_a_turn(game, action):
    environment = make("gymnasium", game=game, invalid_reward=-0.5, turns=2)
    environment.reset(1)
    result = environment.step(action)
    assert (result.observation, result.reward, result.terminated, result.info["valid"]) == ("invalid\n", -0.5, False, False)
    assert environment.step(action).truncated


def test_a_game_without_a_text_form_and_reserved_options_are_refused():
    with pytest.raises(EnvironmentSettingsError, match=r"game: .*known are FrozenLake-v1"):
        make("gymnasium", game="CartPole-v1")
    with pytest.raises(EnvironmentSettingsError, match=r"options: .*render_mode cannot be set"):
        make("gymnasium", options={"render_mode": "human"})
