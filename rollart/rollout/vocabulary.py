"""Text to token ids and back, for rollout; owns no template and no model. Needs only `tokenizer.json` and `config.json`, no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from rollart.config import ConfigError


class VocabularyError(ConfigError):
    """A policy's folder lacks what is needed to turn text into tokens."""


class Vocabulary:
    """A policy's tokenizer and its end-of-sequence ids.

    Sampled ids are kept for ever: text is only ever encoded in pieces that are appended, never decoded and encoded again.
    """

    def __init__(self, folder: str | Path) -> None:
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise VocabularyError(f"policy.model: {folder} has no tokenizer.json; save the policy's fast tokenizer there")
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises no type of its own
            raise VocabularyError(f"policy.model: {path} is no tokenizer ({error}); save the policy's fast tokenizer there") from error
        self.eos_ids = _eos_ids(Path(folder))

    def encode(self, text: str, first: bool) -> list[int]:
        """Ids of a piece of context; special tokens of the start (BOS) only where it is the first piece."""
        return self._tokenizer.encode(text, add_special_tokens=first).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of sampled ids, without special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)


def _eos_ids(folder: Path) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if path.is_file():
            try:
                eos = dict(json.loads(path.read_text())).get("eos_token_id")
            except (ValueError, TypeError) as error:
                raise VocabularyError(f"policy.model: {path} is no JSON object ({error}); save the policy's configuration there") from error
            if eos is not None:
                return tuple(eos) if isinstance(eos, list) else (eos,)
    raise VocabularyError(f"policy.model: {folder} names no eos_token_id in generation_config.json or config.json; set it there")
