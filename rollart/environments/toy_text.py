"""Gymnasium's toy-text games with text in and out; owns how a state reads and what an action is called, gymnasium owns the rest."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import Field, field_validator

from rollart.environments.protocol import StepResult
from rollart.environments.registry import Settings


@dataclass(frozen=True, slots=True)
class Game:
    """How a game reads: the names of its actions in gymnasium's order, the text of (environment, observation), and actions a turn may take."""

    actions: tuple[str, ...]
    render: Callable[[Any, Any], str]
    turns: int


def _lake(env: Any, observation: Any) -> str:
    """The map with `@` where you stand, `.` ice, `#` a hole, `*` the goal."""
    columns = env.unwrapped.ncol
    rows = [[{b"H": "#", b"G": "*"}.get(bytes(cell), ".") for cell in row] for row in env.unwrapped.desc]
    rows[observation // columns][observation % columns] = "@"
    return "\n".join("".join(row) for row in rows)


def _cliff(env: Any, observation: Any) -> str:
    """Four rows of twelve: `@` you, `#` the cliff, `*` the goal."""
    rows = [["."] * 12 for _ in range(3)] + [["."] + ["#"] * 10 + ["*"]]
    rows[observation // 12][observation % 12] = "@"
    return "\n".join("".join(row) for row in rows)


def _taxi(env: Any, observation: Any) -> str:
    """The map with its walls, `@` the taxi, and where the passenger is and wants to go, as letters of the map."""
    row, column, passenger, destination = env.unwrapped.decode(observation)
    board = [[bytes(cell).decode() for cell in line] for line in env.unwrapped.desc]
    board[row + 1][2 * column + 1] = "@"
    where = "in the taxi" if passenger == 4 else f"at {'RGYB'[passenger]}"
    return "\n".join("".join(line) for line in board) + f"\npassenger {where}, wants to {'RGYB'[destination]}"


def _blackjack(env: Any, observation: Any) -> str:
    total, dealer, ace = observation
    return f"you {total}{' with a usable ace' if ace else ''}, dealer {dealer}"


GAMES: dict[str, Game] = {
    "FrozenLake-v1": Game(("left", "down", "right", "up"), _lake, 20),
    "CliffWalking-v1": Game(("up", "right", "down", "left"), _cliff, 50),
    "Taxi-v4": Game(("south", "north", "east", "west", "pickup", "dropoff"), _taxi, 50),
    "Blackjack-v1": Game(("stick", "hit"), _blackjack, 20),
}
"""Games by gymnasium's id. Another toy-text game needs a line here: names for its actions, and a function that writes its state."""


class ToyTextSettings(Settings):
    """`game`: gymnasium's id. `options`: keyword arguments of `gymnasium.make`, such as `is_slippery: false`. `turns`: actions an episode may
    take (default: the game's). `invalid_reward`: what an action that isn't one earns."""

    game: str = "FrozenLake-v1"
    options: dict[str, Any] = Field(default_factory=dict)
    turns: int | None = Field(default=None, ge=1)
    invalid_reward: float = Field(default=0.0, allow_inf_nan=False)

    @field_validator("game")
    @classmethod
    def _is_known(cls, game: str) -> str:
        if game not in GAMES:
            raise ValueError(f"no toy-text game with a text form; known are {', '.join(GAMES)}")
        return game

    @field_validator("options")
    @classmethod
    def _leaves_what_is_ours(cls, options: dict[str, Any]) -> dict[str, Any]:
        if reserved := sorted({"id", "render_mode", "max_episode_steps"} & set(options)):
            raise ValueError(f"{', '.join(reserved)} cannot be set here; `turns` limits an episode")
        return options


class ToyText:
    """One action a turn, by its name (`left`) or gymnasium's number; the first observation lists the names. Rewards are gymnasium's.

    An action that is neither moves nothing, earns `invalid_reward` and uses up a turn.
    """

    Settings: ClassVar[type[ToyTextSettings]] = ToyTextSettings

    def __init__(self, settings: ToyTextSettings | None = None) -> None:
        import gymnasium

        self.settings = settings or ToyTextSettings()
        self._game = GAMES[self.settings.game]
        self._turns = self.settings.turns or self._game.turns
        self._env: Any = gymnasium.make(self.settings.game, max_episode_steps=-1, **self.settings.options)
        self._turn = 0

    def reset(self, seed: int) -> str:
        observation, _ = self._env.reset(seed=seed % 2**31)
        self._turn = 0
        return f"{self._text(observation)}actions: {' '.join(self._game.actions)}\n"

    def step(self, action: str) -> StepResult:
        self._turn += 1
        number = self._number(action)
        observation, reward, terminated = None, self.settings.invalid_reward, False
        if number is not None:
            observation, reward, terminated, _, _ = self._env.step(number)
        truncated = not terminated and self._turn >= self._turns
        said = "" if terminated or truncated else self._text(observation) if number is not None else "invalid\n"
        return StepResult(said, float(reward), bool(terminated), truncated, {"turns": self._turn, "valid": number is not None})

    def close(self) -> None:
        self._env.close()

    def actions(self) -> list[str]:
        return list(self._game.actions)

    def script(self, rng: random.Random) -> str:
        """Any action."""
        return rng.choice(self._game.actions)

    def _number(self, action: str) -> int | None:
        word = action.strip().lower()
        if word in self._game.actions:
            return self._game.actions.index(word)
        numbers = [str(number) for number in range(len(self._game.actions))]
        return numbers.index(word) if word in numbers else None

    def _text(self, observation: Any) -> str:
        return self._game.render(self._env, observation) + "\n"
