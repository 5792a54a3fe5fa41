"""Names a version of a model's weights; owns nothing but the name and its spelling."""

from __future__ import annotations

import re
from dataclasses import dataclass

_SPELLING = re.compile(r"(\d{1,6})-(\d{1,10})")


@dataclass(frozen=True, order=True, slots=True)
class Version:
    """Weights after `step` training steps of lineage `lineage`; both count from 0.

    Going back to a checkpoint opens the next lineage, so a version that an abandoned tail published is never equal to
    one of the lineage that goes on. Spelled `LINEAGE-STEP` (`0-42`) wherever it travels as text.
    """

    lineage: int
    step: int

    def __post_init__(self) -> None:
        if self.lineage < 0 or self.step < 0:
            raise ValueError(f"a version counts from 0, got lineage {self.lineage}, step {self.step}")

    def __str__(self) -> str:
        return f"{self.lineage}-{self.step}"

    @classmethod
    def parse(cls, text: str) -> Version:
        """The version that `text` spells; ValueError for anything but `LINEAGE-STEP`."""
        found = _SPELLING.fullmatch(text)
        if found is None:
            raise ValueError(f"{text!r} is no version: write LINEAGE-STEP, such as 0-42")
        return cls(int(found[1]), int(found[2]))
