"""Hints, limits and scripted play of the number game."""

import random

import pytest

from rollart.environments.registry import EnvironmentSettingsError, make


def number_of(seed, **settings):
    game = make("guess_number", **settings)
    game.reset(seed)
    return game.step("5").info["number"]


def test_hints_point_to_the_number_and_hitting_it_pays_one():
    game = make("guess_number")
    seed = next(s for s in range(100) if number_of(s) == 6)
    assert game.reset(seed) == "guess 1 to 9\n"
    assert game.step("3").observation == "above 3\n"
    assert game.step(" 8\n").observation == "below 8\n"
    result = game.step("6")
    assert (result.observation, result.reward, result.terminated, result.truncated) == ("", 1.0, True, False)


def test_the_last_turn_truncates_unless_it_hits():
    game = make("guess_number", turns=2)
    game.reset(next(s for s in range(100) if number_of(s) == 6))
    assert not game.step("1").truncated
    result = game.step("1")
    assert (result.reward, result.terminated, result.truncated) == (0.0, False, True)


@pytest.mark.parametrize("action", ["", "x", "0", "10", "5 5", "5.0", "-3", "٣", "--3", "9" * 5000])
def test_what_is_no_number_of_the_range_uses_a_turn(action):
    game = make("guess_number")
    game.reset(1)
    result = game.step(action)
    assert (result.observation, result.reward, result.info["valid"], result.info["turns"]) == ("invalid\n", 0.0, False, 1)


def test_negative_ranges_are_played_too():
    game = make("guess_number", lowest=-5, highest=-5 + 1)
    game.reset(0)
    assert game.step("-5").terminated or game.step("-4").terminated


def test_a_seed_fixes_the_number_and_seeds_cover_the_range():
    numbers = [number_of(seed) for seed in range(200)]
    assert numbers == [number_of(seed) for seed in range(200)]
    assert set(numbers) == set(range(1, 10))


def test_middle_play_finds_every_number_in_four_turns():
    for seed in range(60):
        game, rng = make("guess_number", script_skill=1.0), random.Random(0)
        game.reset(seed)
        results = []
        while not results or not (results[-1].terminated or results[-1].truncated):
            results.append(game.step(game.script(rng)))
        assert results[-1].reward == 1.0


def test_an_empty_range_is_refused():
    with pytest.raises(EnvironmentSettingsError, match=r"highest \(1\) must be over lowest \(3\)"):
        make("guess_number", lowest=3, highest=1)
