"""How an engine speculates; values only, and how they stand on its command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["WEIGHTED", "DraftKind", "SpeculationSettings"]

DraftKind = Literal["none", "ngram", "model", "head"]
"""Who drafts: nobody, the tokens seen so far, a smaller model, or a head on the policy's hidden states."""

WEIGHTED = ("model", "head")
"""The kinds that have weights."""


@dataclass(frozen=True, slots=True)
class SpeculationSettings:
    """Drafts of at most `length` tokens, which are shortened where that was measured to be faster if `adaptive`.

    A draft of kind model or head has weights. `model` is the folder with those to start from, of that `version`: a model's with the
    policy's vocabulary, or a head's; an engine's own is a local one, elsewhere any URL will do. Or they are the newest in the store
    `versions`, and `follow` says whether newer ones are taken as they appear. `memory` bounds the tokens of ended requests that a draft of
    kind ngram remembers. ValueError for what doesn't go together.
    """

    draft: DraftKind = "none"
    length: int = 4
    adaptive: bool = True
    model: str | Path | None = None
    memory: int = 65_536
    versions: str | None = None
    follow: bool = False
    version: str = "default"

    def __post_init__(self) -> None:
        if self.draft not in WEIGHTED and not (self.model is None and self.versions is None):
            raise ValueError(f"a draft of kind {self.draft} has no weights: leave its model and its versions out")
        if self.draft == "model" and self.model is None and self.versions is None:
            raise ValueError("a draft of kind model needs the folder of its model, or its versions")
        if self.follow and self.versions is None:
            raise ValueError("only a draft that has versions can follow them")

    def arguments(self) -> list[str]:
        """The arguments of `python -m rollart.engines.embedded`, none where nothing is drafted. That an engine follows versions is up to its host."""
        if self.draft == "none":
            return []
        options = ["--draft", self.draft, "--draft-length", str(self.length), "--draft-memory", str(self.memory)]
        if self.model is not None:
            options += ["--draft-model", str(self.model), "--draft-version", self.version]
        return options if self.adaptive else [*options, "--draft-fixed"]
