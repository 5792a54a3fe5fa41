"""TextArena's games, on the real library."""

import random

import pytest

from rollart.environments.registry import EnvironmentSettingsError, make

pytest.importorskip("textarena", reason="the extra textarena isn't installed")

from rollart.environments.text_arena import GAMES

QUICK = sorted(set(GAMES) - {"Sokoban-v0", "RushHour-v0"})


def play(environment, seed, turns=6):
    said = [environment.reset(seed)]
    for _ in range(turns):
        result = environment.step(environment.script(random.Random(0)))
        said += [result.observation, result.reward]
        if result.terminated or result.truncated:
            break
    environment.close()
    return tuple(said)


@pytest.mark.parametrize("game", GAMES)
def test_the_same_seed_is_the_same_episode_also_where_others_draw_random_numbers(game):
    first = play(make("textarena", game=game), 3)
    random.seed(99)
    assert play(make("textarena", game=game), 3) == first


@pytest.mark.parametrize("game", sorted(set(QUICK) - {"Minesweeper-v0", "TowerOfHanoi-v0", "PegJump-v0", "Mastermind-v0"}))
def test_seeds_differ(game):
    assert len({play(make("textarena", game=game), seed) for seed in range(8)}) > 1


def test_two_games_played_in_turns_draw_what_each_draws_alone():
    alone = [play(make("textarena", game="2048-v0"), seed) for seed in (1, 2)]
    both = [make("textarena", game="2048-v0") for _ in range(2)]
    said = [[environment.reset(seed)] for environment, seed in zip(both, (1, 2), strict=True)]
    for _ in range(6):
        for environment, texts in zip(both, said, strict=True):
            result = environment.step("[Up]")
            if not (texts[-1] == 0.0 and texts[-2] == ""):
                texts += [result.observation, result.reward]
    assert [tuple(texts[: len(one)]) for texts, one in zip(said, alone, strict=True)] == alone


def test_playing_leaves_the_global_generator_alone():
    random.seed(5)
    expected = random.Random(5).random()
    play(make("textarena", game="2048-v0"), 1)
    assert random.random() == expected


def test_a_tower_of_hanoi_by_hand():
    tower = make("textarena", game="TowerOfHanoi-v0", rules=False)
    assert tower.reset(0) == "Current Board: \nA: [3, 2, 1]\nB: []\nC: []\n.\n"
    moves = ["[A C]", "[A B]", "[C B]", "[A C]", "[B A]", "[B C]"]
    for move in moves:
        result = tower.step(move)
        assert not result.terminated
    assert "A: [1]\nB: []\nC: [3, 2]" in result.observation and "[A C]" not in result.observation
    won = tower.step("[A C]")
    assert (won.reward, won.terminated, won.observation) == (1.0, True, "")


@pytest.mark.parametrize(
    "action", ["", "[", "[]", "[²]", "[-1 -1]", "[999999999999999999999 0]", "[" + "9" * 100_000 + "]", "[[[a b]]]", "\0", "[1.5 x]"]
)
@pytest.mark.parametrize("game", QUICK)
def test_a_malformed_action_is_scored(game, action):
    environment = make("textarena", game=game)
    environment.reset(1)
    for _ in range(3):
        result = environment.step(action)
        if result.terminated or result.truncated:
            break
    assert -1.0 <= result.reward <= 1.0


def test_a_game_that_downloads_is_refused_by_name():
    with pytest.raises(EnvironmentSettingsError, match="Wordle-v0 downloads when it starts"):
        make("textarena", game="Wordle-v0")
    with pytest.raises(EnvironmentSettingsError, match="no single-player game that was tried"):
        make("textarena", game="Chess-v0")


def test_an_episode_ends_with_its_turns():
    arms = make("textarena", game="Bandit-v0", turns=2)
    arms.reset(0)
    assert not arms.step("[red]").truncated
    assert arms.step("[red]").truncated
