"""Names a version of a model's weights; owns nothing but the name and its spelling."""

from __future__ import annotations

import re
from dataclasses import dataclass
from numbers import Integral

_SPELLING = re.compile(r"([0-9]{1,6})-([0-9]{1,10})")
_LINEAGES, _STEPS = 10**6, 10**10
"""What the spelling has digits for: a version beyond that couldn't be found again by its commit's name."""


@dataclass(frozen=True, order=True, slots=True)
class Version:
    """Weights after `step` training steps of lineage `lineage`; both count from 0.

    Going back to a checkpoint opens the next lineage, so a version that an abandoned tail published is never equal to
    one of the lineage that goes on. Spelled `LINEAGE-STEP` (`0-42`) wherever it travels as text.
    """

    lineage: int
    step: int

    def __post_init__(self) -> None:
        whole = all(isinstance(number, Integral) and not isinstance(number, bool) for number in (self.lineage, self.step))
        if not whole or not (0 <= self.lineage < _LINEAGES and 0 <= self.step < _STEPS):
            raise ValueError(f"a version counts from 0, in whole numbers, to lineage 999999 and step 9999999999; got {self.lineage!r}, {self.step!r}")

    def __str__(self) -> str:
        return f"{self.lineage}-{self.step}"

    @classmethod
    def parse(cls, text: str) -> Version:
        """The version that `text` spells; ValueError for anything but `LINEAGE-STEP`."""
        found = _SPELLING.fullmatch(text)
        if found is None:
            raise ValueError(f"{text!r} is no version: write LINEAGE-STEP, such as 0-42")
        return cls(int(found[1]), int(found[2]))
