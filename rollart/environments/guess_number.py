"""Guess a hidden number from "above" and "below"; owns the game and its few words."""

from __future__ import annotations

import random
from typing import Any, ClassVar

from pydantic import Field, model_validator

from rollart.environments.protocol import StepResult
from rollart.environments.registry import Settings


class GuessNumberSettings(Settings):
    """The number lies in `lowest`..`highest`, both included; `turns` guesses are allowed.

    `script_skill`: chance that a scripted guess is the middle of what the hints leave; otherwise it is drawn from the whole range.
    """

    lowest: int = 1
    highest: int = 9
    turns: int = Field(default=4, ge=1)
    script_skill: float = Field(default=0.0, ge=0.0, le=1.0)

    @model_validator(mode="after")
    def _has_a_range(self) -> GuessNumberSettings:
        if self.highest <= self.lowest:
            raise ValueError(f"highest ({self.highest}) must be over lowest ({self.lowest})")
        return self


class GuessNumber:
    """Reward 1 for the number itself, else 0. An action that is no integer of the range uses up a turn and is answered "invalid".

    The game is written here since the text-game libraries' versions of it repeat their rules and the whole history in each
    observation (hundreds of characters), which a small policy would spend most of its compute on reading.
    """

    Settings: ClassVar[type[GuessNumberSettings]] = GuessNumberSettings

    def __init__(self, settings: GuessNumberSettings | None = None) -> None:
        self.settings = settings or GuessNumberSettings()
        self._number = self._low = self._high = self._turn = 0

    def reset(self, seed: int) -> str:
        s = self.settings
        self._low, self._high, self._turn = s.lowest, s.highest, 0
        self._number = random.Random(seed).randint(s.lowest, s.highest)
        return f"guess {s.lowest} to {s.highest}\n"

    def step(self, action: str) -> StepResult:
        s = self.settings
        self._turn += 1
        guess = _integer(action)
        valid = guess is not None and s.lowest <= guess <= s.highest
        hit = valid and guess == self._number
        hint = "invalid"
        if valid and guess is not None and not hit:
            above = guess < self._number
            hint = f"above {guess}" if above else f"below {guess}"
            self._low, self._high = (max(self._low, guess + 1), self._high) if above else (self._low, min(self._high, guess - 1))
        truncated = not hit and self._turn >= s.turns
        info: dict[str, Any] = {"turns": self._turn, "number": self._number, "hit": hit, "valid": valid}
        return StepResult("" if hit or truncated else f"{hint}\n", float(hit), hit, truncated, info)

    def close(self) -> None:
        """Nothing to give back."""

    def actions(self) -> list[str]:
        return [str(number) for number in range(self.settings.lowest, self.settings.highest + 1)]

    def script(self, rng: random.Random) -> str:
        """The middle of what the hints leave with probability `script_skill`, else any number of the range."""
        s = self.settings
        skilled = rng.random() < s.script_skill
        return str((self._low + self._high) // 2 if skilled else rng.randint(s.lowest, s.highest))


def _integer(text: str) -> int | None:
    """The integer that `text` spells in plain digits; at most 18 of them, so that no text costs more than its length."""
    text = text.strip()
    digits = text.removeprefix("-")
    return int(text) if digits.isascii() and digits.isdigit() and len(digits) <= 18 else None
