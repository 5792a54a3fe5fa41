"""A model's chat template: what it makes of a conversation, and that each prompt goes on from the one before. Knows no tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from rollart.config import ConfigError

__all__ = ["ChatTemplate", "TemplateRefused", "if_any", "of_folder", "of_text"]

TEMPLATE_FILE, TEMPLATE_JSON, TOKENIZER_CONFIG = "chat_template.jinja", "chat_template.json", "tokenizer_config.json"
SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")

RESPONSE = "response"
"""Stands for a response wherever text is rendered: what was sampled is kept as ids, and only what surrounds it is needed."""

REASONED = "<think>\nreason\n</think>\n\nresponse"
"""A response as reasoning models give it; templates that leave its reason out of later prompts are not rare."""


class TemplateRefused(ConfigError):
    """A chat template that is missing, can't be rendered, or changes what it said before."""


class ChatTemplate:
    """The Jinja template `text` of a tokenizer, with the special tokens (`bos_token`, ...) that it may name."""

    def __init__(self, text: str, special: Mapping[str, str] | None = None) -> None:
        self.text = text
        self.special = dict(special or {})

    def opening(self, system: str, observation: str) -> str:
        """The whole text of the first prompt. TemplateRefused where the template can't say it."""
        return self._render(system, [observation], RESPONSE)

    def following(self, system: str, observations: Sequence[str], response: str = RESPONSE) -> str:
        """The text between the last but one response and the place of the next one: its end, and the last of `observations`.

        TemplateRefused if the text before it isn't that of the prompts before.
        """
        before = self._render(system, observations[:-1], response) + response
        whole = self._render(system, observations, response)
        if not whole.startswith(before):
            raise TemplateRefused(
                "policy.chat: the model's chat template changes what it said in earlier turns (a date, or a response without its reasoning), so "
                "that no prompt could go on from what was sampled: give a model whose template doesn't, or tasks with max_turns 1"
            )
        return whole[len(before) :]

    def check(self, system: str, turns: int) -> None:
        """TemplateRefused unless the template can say `system` and an observation, and over several `turns` goes on from what it said."""
        self.opening(system, "observation")
        for response in (RESPONSE, REASONED) if turns > 1 else ():
            for n in (2, 3):
                self.following(system, [f"observation {i}" for i in range(n)], response)

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """The whole text of a prompt that asks for what follows `messages`. Raises what the template does."""
        from transformers.utils.chat_template_utils import render_jinja_template  # keeps the template in a sandbox

        conversations, given = [list(messages)], None if tools is None else list(tools)
        (text,), _ = render_jinja_template(conversations, given, chat_template=self.text, add_generation_prompt=True, **self.special)
        return text

    def _render(self, system: str, observations: Sequence[str], response: str) -> str:
        messages = [{"role": "system", "content": system}] if system else []
        for turn, observation in enumerate(observations):
            if turn:
                messages.append({"role": "assistant", "content": response})
            messages.append({"role": "user", "content": observation})
        try:
            return self.render(messages)
        except TemplateError as error:
            roles = "system, user and assistant" if system else "user and assistant"
            raise TemplateRefused(
                f"policy.chat: the model's chat template refuses messages of {roles} ({error}); leave tasks[].system out, or set policy.chat to false"
            ) from error


def of_folder(names: Collection[str], read: Callable[[str], bytes]) -> ChatTemplate:
    """The chat template of a model's folder, of whose files `names` are there and `read` gives the content. TemplateRefused without one."""
    return of_text(*_in_folder(names, read))


def if_any(names: Collection[str], read: Callable[[str], bytes]) -> ChatTemplate | None:
    """The same, but None without one. TemplateRefused where the files can't be read."""
    text, special = _in_folder(names, read)
    return of_text(text, special) if text else None


def _in_folder(names: Collection[str], read: Callable[[str], bytes]) -> tuple[str, dict[str, str]]:
    try:
        said = dict(json.loads(read(TOKENIZER_CONFIG))) if TOKENIZER_CONFIG in names else {}
        if TEMPLATE_FILE in names:
            text = read(TEMPLATE_FILE).decode()
        else:
            text = _chosen(json.loads(read(TEMPLATE_JSON))["chat_template"] if TEMPLATE_JSON in names else said.get("chat_template"))
    except (ValueError, TypeError, KeyError) as error:
        raise TemplateRefused(f"policy.chat: the model's tokenizer files can't be read ({type(error).__name__}: {error}); save them anew") from error
    return text, {name: _text(said[name]) for name in SPECIAL if said.get(name)}


def of_text(text: str, special: Mapping[str, str] | None = None) -> ChatTemplate:
    """The chat template `text`; TemplateRefused if it is empty, which is how a model has none."""
    if not text:
        raise TemplateRefused(f"policy.chat: the model has no chat template; put one into its folder as {TEMPLATE_FILE}, or set policy.chat to false")
    return ChatTemplate(text, special)


def _chosen(found: Any) -> str:
    """The one template, or of several by name the default one."""
    if isinstance(found, list):
        found = {entry["name"]: entry["template"] for entry in found}.get("default", "")
    return str(found or "")


def _text(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)
