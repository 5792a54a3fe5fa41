"""Boards, moves, rewards and scripted play of the text FrozenLake."""

import random

import pytest
from gymnasium.envs.toy_text.frozen_lake import generate_random_map

from rollart.environments.registry import make


def play(environment, seed, rng):
    observations, rewards = [environment.reset(seed)], []
    while True:
        result = environment.step(environment.script(rng))
        observations.append(result.observation)
        rewards.append(result.reward)
        if result.terminated or result.truncated:
            return observations, rewards, result


def test_the_board_is_gymnasiums_for_that_seed_with_the_agent_in_its_corner():
    expected = "\n".join(generate_random_map(4, 0.8, 11)).translate(str.maketrans("SFHG", "@.#*")) + "\n"
    assert make("frozen_lake").reset(11) == expected


def test_a_seed_fixes_board_start_and_what_the_same_actions_bring():
    settings = {"random_start": True, "view": "local", "script_skill": 0.5}
    once = [play(make("frozen_lake", **settings), seed, random.Random(7)) for seed in range(20)]
    again = [play(make("frozen_lake", **settings), seed, random.Random(7)) for seed in range(20)]
    assert once == again
    assert len({observations[0] for observations, _, _ in once}) > 10


def test_moves_go_where_the_letters_say_and_the_goal_pays_one():
    lake = make("frozen_lake", size=2, frozen=1.0)
    assert lake.reset(0) == "@.\n.*\n"
    result = lake.step("R")
    assert (result.observation, result.reward, result.terminated) == (".@\n.*\n", 0.0, False)
    assert lake.step("L").observation == "@.\n.*\n"
    assert lake.step("D").observation == "..\n@*\n"
    assert lake.step("U").observation == "@.\n.*\n"
    lake.step(" D\n")
    result = lake.step("R")
    assert (result.observation, result.reward, result.terminated, result.truncated) == ("", 1.0, True, False)
    assert result.info == {"turns": 6, "goal": True, "valid": True}


def test_a_hole_ends_the_episode_without_reward():
    lake = make("frozen_lake", size=3, frozen=0.4)
    seed = next(s for s in range(200) if lake.reset(s).startswith("@#"))
    lake.reset(seed)
    result = lake.step("R")
    assert (result.reward, result.terminated, result.info["goal"]) == (0.0, True, False)


@pytest.mark.parametrize("action", ["", "X", "RR", "right", "é", "r", "LD"])
def test_a_malformed_action_moves_nothing_but_uses_a_turn(action):
    lake = make("frozen_lake", turns=2)
    board = lake.reset(5)
    result = lake.step(action)
    assert (result.observation, result.reward, result.terminated, result.info["valid"]) == (board, 0.0, False, False)
    assert lake.step(action).truncated


def test_the_local_view_names_left_below_right_above():
    lake = make("frozen_lake", size=2, frozen=1.0, view="local")
    assert lake.reset(0) == "@.\n.*\n|..|\n"
    assert lake.step("D").observation == "||*.\n"


def test_fully_skilled_play_always_reaches_the_goal_by_a_shortest_path():
    for seed in range(50):
        _, rewards, result = play(make("frozen_lake", random_start=True, script_skill=1.0, turns=30), seed, random.Random(seed))
        assert result.info["goal"] and sum(rewards) == 1.0
        assert result.info["turns"] <= 12


def test_a_random_start_is_never_the_goal_nor_a_hole():
    for seed in range(50):
        board = make("frozen_lake", random_start=True).reset(seed)
        assert board.count("@") == 1 and board.count("*") == 1 and board.rstrip().endswith("*")


def test_less_skill_reaches_the_goal_less_often():
    def rate(skill):
        return sum(sum(play(make("frozen_lake", script_skill=skill), s, random.Random(s))[1]) for s in range(200)) / 200

    assert rate(0.0) < 0.2 < rate(0.6) < 0.9 < rate(1.0) + 1e-9
