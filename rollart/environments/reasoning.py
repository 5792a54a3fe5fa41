"""Single-turn questions of reasoning-gym; owns which families have a safe scorer, leaves questions and scoring to the library."""

from __future__ import annotations

import json
import random
import re
from functools import cache, lru_cache
from typing import Any, ClassVar

from pydantic import Field, ValidationInfo, field_validator

from rollart.environments.protocol import StepResult
from rollart.environments.registry import EnvironmentSettingsError, Settings
from rollart.sandbox.limits import SandboxMissing
from rollart.sandbox.machine import machine

_INHERITED = "inherits the base scorer: string equality, else the share of the answer that the right one makes up"
_DECIMAL = "compares as decimal.Decimal, which parses digits and no expressions, else as the base scorer does"
_LETTERS = "compares letter by letter"

SAFE_FAMILIES: dict[str, str] = {
    "aiw": _INHERITED,
    "base_conversion": _INHERITED,
    "basic_arithmetic": _INHERITED,
    "binary_alternation": _INHERITED,
    "caesar_cipher": _INHERITED,
    "chain_sum": _DECIMAL,
    "count_bits": _INHERITED,
    "count_primes": _INHERITED,
    "decimal_chain_sum": "compares as decimal.Decimal, which parses digits and no expressions",
    "gcd": _INHERITED,
    "isomorphic_strings": _INHERITED,
    "largest_island": _INHERITED,
    "lcm": _INHERITED,
    "leg_counting": _INHERITED,
    "letter_counting": _INHERITED,
    "maze": _INHERITED,
    "number_filtering": _INHERITED,
    "number_sequence": _INHERITED,
    "products": _DECIMAL,
    "ransom_note": _INHERITED,
    "rotate_matrix": _INHERITED,
    "rotten_oranges": _INHERITED,
    "simple_equations": _INHERITED,
    "simple_geometry": _INHERITED,
    "spell_backward": _LETTERS,
    "string_manipulation": _INHERITED,
    "syllogism": _INHERITED,
    "word_sequence_reversal": _INHERITED,
}
"""Families by name, with why their scorer may be given a policy's text here: it was read and does not evaluate it. Any other is scored in a sandbox.

Left out on purpose: countdown, puzzle24, simple_integration, intermediate_integration and polynomial_multiplication hand the text
to sympy's parser, which runs Python code in it; coin_flip makes a Fraction of it, so `1e999999999` never ends.
"""


class UnsafeFamily(EnvironmentSettingsError):
    """The family does not exist, or its scorer is not known to leave a policy's text unevaluated and there is no sandbox for it."""


class ReasoningSettings(Settings):
    """`family`: reasoning-gym's name. `config`: that family's own settings, without `seed` and `size`, which the episode decides.

    `shown`: a regular expression; the observation is its first group where it matches, so that a small policy need not read the same
    instruction each time (empty: the whole question). `answer`: a regular expression; its last match in a response is what is scored,
    or the match's first group (empty: the whole response). `script_skill`: chance that scripted play gives the right answer;
    otherwise it gives the answer to another question of the family.
    """

    family: str = "chain_sum"
    config: dict[str, Any] = Field(default_factory=dict)
    shown: str = ""
    answer: str = ""
    script_skill: float = Field(default=0.5, ge=0.0, le=1.0)

    @field_validator("shown")
    @classmethod
    def _has_a_group(cls, shown: str) -> str:
        groups = _groups(shown)
        if shown and groups != 1:
            raise ValueError(f"it has {groups} groups; put exactly one around what is to be shown")
        return shown

    @field_validator("answer")
    @classmethod
    def _has_at_most_one_group(cls, answer: str) -> str:
        groups = _groups(answer)
        if groups > 1:
            raise ValueError(f"it has {groups} groups; put at most one, around what is to be scored")
        return answer

    @field_validator("config")
    @classmethod
    def _fits_the_family(cls, config: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        reserved = sorted({"seed", "size"} & set(config))
        if reserved:
            raise ValueError(f"{', '.join(reserved)} cannot be set: an episode's seed decides it")
        family = info.data["family"]
        if family in _families():
            try:
                _created(family, json.dumps(config, sort_keys=True))
            except (AssertionError, TypeError, ValueError) as error:
                raise ValueError(f"{family} refuses it: {error}") from error
        return config


def _groups(expression: str) -> int:
    """How many groups a regular expression has; ValueError if it is none."""
    try:
        return re.compile(expression).groups
    except re.error as error:
        raise ValueError(f"no regular expression: {error}") from error


@lru_cache(maxsize=64)
def dataset(family: str, config: str) -> Any:
    """The library's scorer and generator for a family, its config as JSON; UnsafeFamily unless it is in SAFE_FAMILIES."""
    if family not in SAFE_FAMILIES:
        raise UnsafeFamily(f"family {family!r} is not among those whose scorer was read: {', '.join(SAFE_FAMILIES)}")
    return _created(family, config)


def _created(family: str, config: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(family, **json.loads(config))


@cache
def _families() -> frozenset[str]:
    """All that the library has."""
    from reasoning_gym.factory import DATASETS

    return frozenset(DATASETS)


def can_be_scored(family: str) -> None:
    """Returns if the family is scored safely on this machine; else UnsafeFamily, which says what lacks."""
    if family in SAFE_FAMILIES:
        return
    if family not in _families():
        raise UnsafeFamily(f"reasoning-gym has no family {family!r}; it has {', '.join(sorted(_families()))}")
    try:
        machine()
    except SandboxMissing as error:
        raise UnsafeFamily(f"family {family!r} can only be scored in a sandbox: {error}") from error


class Reasoning:
    """One question, one answer. The observation is the question, or its `shown` part; the action is the answer, whole.

    `step` gives no reward: it hands family, config and entry to `info`, with which the verifier `reasoning` scores the answer: the
    whole action, or `info["answer"]` where the settings say what of it counts.
    """

    Settings: ClassVar[type[ReasoningSettings]] = ReasoningSettings

    def __init__(self, settings: ReasoningSettings | None = None) -> None:
        self.settings = settings or ReasoningSettings()
        self._config = json.dumps(self.settings.config, sort_keys=True)
        can_be_scored(self.settings.family)
        self._entry: dict[str, Any] = {}

    def reset(self, seed: int) -> str:
        self._entry = self._draw(seed)
        question = str(self._entry["question"])
        found = re.search(self.settings.shown, question) if self.settings.shown else None
        return found[1] if found else question

    def step(self, action: str) -> StepResult:
        info: dict[str, Any] = {"family": self.settings.family, "config": self.settings.config, "entry": self._entry}
        if self.settings.answer:
            found = re.findall(self.settings.answer, action)  # whole matches, or the groups of an expression that has one
            info["answer"] = found[-1] if found else ""
        return StepResult("", terminated=True, info=info)

    def close(self) -> None:
        """Nothing to give back."""

    def script(self, rng: random.Random) -> str:
        """The right answer with probability `script_skill`, else the answer to another question."""
        entry = self._entry if rng.random() < self.settings.script_skill else self._draw(rng.getrandbits(31))
        return str(entry["answer"])

    def _draw(self, seed: int) -> dict[str, Any]:
        import reasoning_gym

        entry = reasoning_gym.create_dataset(self.settings.family, seed=seed, size=1, **self.settings.config)[0]
        return json.loads(json.dumps(entry))
