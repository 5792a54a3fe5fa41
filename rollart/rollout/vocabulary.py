"""Text to token ids and back, for rollout, by a model's chat template if it is asked for. Needs only the tokenizer's files, no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from rollart.config import ConfigError
from rollart.rollout import chat_template


class VocabularyError(ConfigError):
    """A policy's folder lacks what is needed to turn text into tokens."""


class Vocabulary:
    """A policy's tokenizer and its end-of-response ids; with `chat`, observations and responses are messages of its chat template.

    Sampled ids are kept for ever: text is only ever encoded in pieces that are appended, never decoded and encoded again.
    """

    def __init__(self, folder: str | Path, chat: bool = False) -> None:
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise VocabularyError(f"policy.model: {folder} has no tokenizer.json; save the policy's fast tokenizer there")
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises no type of its own
            raise VocabularyError(f"policy.model: {path} is no tokenizer ({error}); save the policy's fast tokenizer there") from error
        self._special = {i for i, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}
        self.eos_ids = _eos_ids(folder)
        self._template: chat_template.ChatTemplate | None = None
        if chat:
            self._template = chat_template.of_folder({p.name for p in folder.iterdir()}, lambda name: (folder / name).read_bytes())
            self.eos_ids = self._with_end_of_message(self._template)

    def encode(self, text: str, first: bool = False) -> list[int]:
        """Ids of a piece of context; special tokens of the start (BOS) only where it is the first piece."""
        return self._tokenizer.encode(text, add_special_tokens=first).ids

    def prompt(self, observations: Sequence[str], last: int | None = None, system: str = "") -> list[int]:
        """What to append for the last of `observations`: the first one opens the context, the others follow a response each.

        `last` is the id that the context ends with. A message that the policy ended itself is not ended again. `system` is the
        message before all others, for a chat template only.
        """
        if self._template is None:
            return self.encode(observations[-1], first=len(observations) == 1)
        if last is None:
            return self.encode(self._template.opening(system, observations[-1]))
        return self.going_on(self._template.following(system, observations), last)

    def going_on(self, following: str, last: int) -> list[int]:
        """Ids of the text `following` after a response that ends with the id `last`; what ended it there isn't said again."""
        ended = self._tokenizer.id_to_token(last) if last in self.eos_ids else None
        if ended is None or not following.startswith(ended):
            return self.encode(following)
        # Encoded with what it follows, since a tokenizer may treat the start of a text in a way of its own.
        return self.encode(following)[1:]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of sampled ids, without special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    @property
    def end(self) -> str:
        """The text of the special token that ends a response."""
        return str(self._tokenizer.id_to_token(self.eos_ids[0]))

    def spelled(self, token: int) -> str:
        """A single token as its vocabulary spells it, which for bytes of a character is not the text."""
        return str(self._tokenizer.id_to_token(token))

    def _with_end_of_message(self, template: chat_template.ChatTemplate) -> tuple[int, ...]:
        """The end ids, and before them the special token that ends a response in the template: a policy trained on it stops by it."""
        try:
            following = self.encode(template.following("", ["", ""]))
        except chat_template.TemplateRefused:  # for one turn alone it needs no second one
            return self.eos_ids
        if not following or following[0] not in self._special:
            return self.eos_ids
        return (following[0], *(i for i in self.eos_ids if i != following[0]))


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
