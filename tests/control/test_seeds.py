"""Seeds follow from what they are for, and from nothing else."""

from dataclasses import replace

from rollart.control.seeds import derive, environment_seed, sampling_seed
from rollart.types import Attempt, Episode

EPISODE = Episode("lake", 3)


def test_parts_do_not_run_into_each_other() -> None:
    assert derive(0, "a", "bc") != derive(0, "ab", "c")
    assert 0 <= derive(7, "x") < 2**31


def test_members_and_attempts_share_an_environment_and_draw_apart() -> None:
    attempts = [Attempt(EPISODE, member) for member in range(8)]
    assert len({sampling_seed(1, a, 0) for a in attempts}) == 8
    assert sampling_seed(1, attempts[0], 0) != sampling_seed(1, attempts[0], 1)
    assert sampling_seed(1, attempts[0].retried(), 0) == sampling_seed(1, attempts[0], 0)


def test_held_out_episodes_have_other_seeds_than_trained_ones() -> None:
    assert environment_seed(1, EPISODE) != environment_seed(1, replace(EPISODE, purpose="evaluate"))
    assert environment_seed(1, EPISODE) != environment_seed(2, EPISODE)
    assert environment_seed(1, EPISODE) == environment_seed(1, Episode("lake", 3, "train"))
