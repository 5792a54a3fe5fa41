"""TextArena's single-player games; owns compact observations and seeds that hold beside other episodes, TextArena owns the games.

The games draw from Python's and NumPy's global generators, also while they are played. Each episode here has their states to itself: they
are put in place for a call, under a lock, and taken out again.
"""

from __future__ import annotations

import contextlib
import io
import random
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
from pydantic import Field, field_validator

from rollart.environments.protocol import StepResult
from rollart.environments.registry import Settings

GAMES: dict[str, str] = {
    "2048-v0": "[Up]", "Bandit-v0": "[red]", "Blackjack-v0": "[Hit]", "FifteenPuzzle-v0": "[up]", "FrozenLake-v0": "[right]",
    "GuessTheNumber-v0": "[10]", "LightsOut-v0": "[0 0]", "Mastermind-v0": "[1 2 3 4]", "Minesweeper-v0": "[0 0]", "PegJump-v0": "[4 1]",
    "RushHour-v0": "[A+]", "Sokoban-v0": "[up]", "Sudoku-v0": "[1 1 1]", "TowerOfHanoi-v0": "[A C]",
}  # fmt: skip
"""Single-player games that were played without a network, by TextArena's id, each with an action that it understands."""

DOWNLOADING = ("Crosswords", "Hangman", "SpellingBee", "WordChains", "WordLadder", "WordSearch", "Wordle", "TwentyQuestions", "GuessWho")
"""Games that fetch word lists, or ask a model over the network, when they start."""

MAX_ACTION = 200
"""Characters of an action that are still given to a game: none has longer ones, and their regular expressions were not made for megabytes."""


class TextArenaSettings(Settings):
    """`game`: TextArena's id. `turns`: actions an episode may take. `rules`: whether the first observation begins with the game's rules."""

    game: str = "GuessTheNumber-v0"
    turns: int = Field(default=30, ge=1)
    rules: bool = True

    @field_validator("game")
    @classmethod
    def _is_offline(cls, game: str) -> str:
        if game.startswith(DOWNLOADING):
            raise ValueError(f"{game} downloads when it starts, which environments here don't; known are {', '.join(GAMES)}")
        if game not in GAMES:
            raise ValueError(f"no single-player game that was tried without a network; known are {', '.join(GAMES)}")
        return game


class TextArena:
    """An action is text with the move in square brackets, as the game's rules say. The observation is what is new since the action: no history.

    Reward comes at the end: the game's own (1 for a win; a share of it where the game tells of progress). A second invalid move in a row ends
    the episode, as TextArena has it; what a game raises upon an action does too, with reward 0 and the exception in `info["error"]`.
    """

    Settings: ClassVar[type[TextArenaSettings]] = TextArenaSettings

    def __init__(self, settings: TextArenaSettings | None = None) -> None:
        self.settings = settings or TextArenaSettings()
        self._turn = 0
        self._random: tuple[Any, Any] | None = None

    def reset(self, seed: int) -> str:
        import textarena

        self._turn = 0
        numpy_seed = np.random.RandomState(seed % 2**32).get_state()
        self._random = (random.Random(seed).getstate(), numpy_seed)
        with self._own_random():
            # `-raw`: without the wrappers that repeat the whole history in each observation
            self._env = textarena.make(f"{self.settings.game}-raw")
            self._env.reset(num_players=1, seed=seed % 2**31)
            return self._news(rules=self.settings.rules)

    def step(self, action: str) -> StepResult:
        self._turn += 1
        done, error = False, ""
        try:
            with self._own_random():
                done, _ = self._env.step(action[:MAX_ACTION])
                said = "" if done else self._news()
        except Exception as raised:  # noqa: BLE001 - of another's game, upon the policy's text: the policy's doing
            done, said, error = True, "", f"{type(raised).__name__}: {raised}"
        truncated = not done and self._turn >= self.settings.turns
        reward, info = 0.0, {"turns": self._turn, "error": error}
        if done and not error:
            rewards, told = self._env.close()
            reward = float((rewards or {}).get(0, 0.0))
            info["invalid"] = bool((told or {}).get(0, {}).get("invalid_move", False))
        return StepResult("" if truncated else said, reward, bool(done), truncated, info)

    def close(self) -> None:
        """Nothing to give back."""

    def script(self, rng: random.Random) -> str:
        """A move of the game's form, the same each time."""
        return GAMES[self.settings.game]

    def _news(self, rules: bool = True) -> str:
        """What the game said since the last action, without that action, the rules where they aren't wanted, and admonitions' second half."""
        from textarena.core import ObservationType as Kind

        _, said = self._env.get_observation()
        if isinstance(said, str):
            return said.strip() + "\n"
        left_out = {Kind.PLAYER_ACTION} | (set() if rules else {Kind.PROMPT})
        texts = [str(text).split(" Please resubmit")[0].strip() for _, text, kind in said if isinstance(kind, Kind) and kind not in left_out]
        return "\n".join(text for text in texts if text) + "\n"

    @contextlib.contextmanager
    def _own_random(self) -> Iterator[None]:
        """This episode's states of the global generators, and none of what a game prints."""
        with _LOCK:
            outside = (random.getstate(), np.random.get_state())
            if self._random is not None:
                random.setstate(self._random[0])
                np.random.set_state(self._random[1])
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    yield
            finally:
                self._random = (random.getstate(), np.random.get_state())
                random.setstate(outside[0])
                np.random.set_state(outside[1])


_LOCK = threading.Lock()
