"""A user's own questions and answers, one question an episode; owns what of an answer counts and how two of them compare."""

from __future__ import annotations

import json
import random
import re
from decimal import Decimal, InvalidOperation
from typing import Any, ClassVar

from pydantic import Field

from rollart.environments.protocol import StepResult
from rollart.environments.question_file import Source, Split, index, read
from rollart.environments.registry import Settings

MARK = "####"
"""What GSM8K puts before a solution's final answer."""


class QuestionsSettings(Settings):
    """`url`: a JSONL or Parquet file (`.parquet`, `.pq`) at any fsspec URL. `storage_options`: fsspec's, never credentials. `question`, `answer`:
    names of the fields. `split`: which questions are asked. `held_out`: the share of them that `training` never asks and `held_out` alone does.

    `suffix`: what follows each question. `script_skill`: chance that scripted play gives the right answer; otherwise it gives another's.
    """

    url: str = Field(min_length=1)
    storage_options: dict[str, Any] = Field(default_factory=dict)
    question: str = "question"
    answer: str = "answer"
    split: Split = "training"
    held_out: float = Field(default=0.1, ge=0.0, lt=1.0)
    suffix: str = "\n"
    script_skill: float = Field(default=0.5, ge=0.0, le=1.0)


class Questions:
    """One question, one response. What of it counts stands after its last `####`; without one it is the whole response.

    Reward is 1 where that equals the file's answer (whose own part after `####` counts), as numbers where both are, else as words in any case.
    `info` holds `question`, `solution` (the file's whole answer), `expected` and `answer`, for a verifier that judges otherwise.
    """

    Settings: ClassVar[type[QuestionsSettings]] = QuestionsSettings

    def __init__(self, settings: QuestionsSettings) -> None:
        self.settings = s = settings
        self._source = Source(s.url, json.dumps(s.storage_options, sort_keys=True), s.question, s.answer, s.split, s.held_out)
        self._places = index(self._source)
        self._question = self._solution = ""

    def reset(self, seed: int) -> str:
        self._question, self._solution = self._draw(random.Random(seed))
        return self._question + self.settings.suffix

    def step(self, action: str) -> StepResult:
        expected, answer = final(self._solution), final(action)
        info = {"question": self._question, "solution": self._solution, "expected": expected, "answer": answer}
        return StepResult("", float(same(answer, expected)), terminated=True, info=info)

    def close(self) -> None:
        """Nothing to give back."""

    def script(self, rng: random.Random) -> str:
        """The right solution with probability `script_skill`, else that of another question."""
        return self._solution if rng.random() < self.settings.script_skill else self._draw(rng)[1]

    def _draw(self, rng: random.Random) -> tuple[str, str]:
        return read(self._source, self._places[rng.randrange(len(self._places))])


def final(text: str) -> str:
    """What stands after the last `####`, or the whole text."""
    return text.rpartition(MARK)[2].strip()


def same(answer: str, expected: str) -> bool:
    """Whether two answers are the same number (1,000 and 1000.0 are), or else the same words in any case and spacing."""
    numbers = _number(answer), _number(expected)
    if None not in numbers:
        return numbers[0] == numbers[1]
    return answer.casefold().split() == expected.casefold().split()


_NUMBER = re.compile(r"[+-]?(\d{1,3}(,\d{3})+|\d{1,40})?(\.\d{1,40})?", re.ASCII)


def _number(text: str) -> Decimal | None:
    """The decimal number that a text is, with `$` or `%` around it left out; short, and without an exponent, so that comparing costs nothing."""
    text = text.strip().removeprefix("$").removesuffix("%").removesuffix(".").strip()
    if not 0 < len(text) <= 100 or not _NUMBER.fullmatch(text):
        return None
    try:
        return Decimal(text.replace(",", ""))
    except InvalidOperation:
        return None
