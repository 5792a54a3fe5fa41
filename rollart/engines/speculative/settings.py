"""How an engine speculates; values only, and how they stand on its command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["DraftKind", "SpeculationSettings"]

DraftKind = Literal["none", "ngram", "model"]
"""Who drafts: nobody, the tokens seen so far, or a smaller model."""


@dataclass(frozen=True, slots=True)
class SpeculationSettings:
    """Drafts of at most `length` tokens, which are shortened where that was measured to be faster if `adaptive`.

    `model` is the folder of a draft of kind model: config, tokenizer and weights, with the policy's vocabulary. `memory` bounds the tokens of
    ended requests that a draft of kind ngram remembers. ValueError if the two don't go together.
    """

    draft: DraftKind = "none"
    length: int = 4
    adaptive: bool = True
    model: str | Path | None = None
    memory: int = 65_536

    def __post_init__(self) -> None:
        if (self.draft == "model") != (self.model is not None):
            raise ValueError(f"a draft of kind {self.draft} {'needs the folder of its model' if self.model is None else 'has no model'}")

    def arguments(self) -> list[str]:
        """The arguments of `python -m rollart.engines.embedded`, none where nothing is drafted."""
        if self.draft == "none":
            return []
        options = ["--draft", self.draft, "--draft-length", str(self.length), "--draft-memory", str(self.memory)]
        if self.model is not None:
            options += ["--draft-model", str(self.model)]
        return options if self.adaptive else [*options, "--draft-fixed"]
