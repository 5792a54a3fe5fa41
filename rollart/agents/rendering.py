"""Conversations to token ids by a chat template, and what of a conversation is still to be said after a response. Keeps nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from rollart.agents.errors import bad_request
from rollart.agents.messages import Message
from rollart.agents.tool_calls import ToolFormat
from rollart.rollout import chat_template
from rollart.rollout.chat_template import ChatTemplate
from rollart.rollout.vocabulary import Vocabulary

__all__ = ["PLAIN", "Rendering"]

PLAIN = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
"""The template of a policy that has none: a line a message, and the end-of-response token after the policy's own."""

_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "probe", "description": "probe", "parameters": {"type": "object", "properties": {}}},
}
_USER = {"role": "user", "content": "probe"}
_CALLING = {
    "role": "assistant", "content": "", "tool_calls": [{"id": "a", "type": "function", "function": {"name": "called", "arguments": {}}}],
}  # fmt: skip


class Rendering:
    """A policy's vocabulary and its chat template. What a template doesn't say of tools and calls is said as text."""

    def __init__(self, vocabulary: Vocabulary, template: ChatTemplate) -> None:
        self.vocabulary, self._template = vocabulary, template
        self._takes_tools = self._differs([_USER], [_TOOL])
        self._takes_calls = self._says("called", [_USER, _CALLING, _USER])

    @classmethod
    def of_folder(cls, folder: str | Path) -> Rendering:
        """By the chat template in a policy's folder, or by `PLAIN` where it has none. VocabularyError, TemplateRefused."""
        folder = Path(folder)
        found = chat_template.if_any({p.name for p in folder.iterdir()}, lambda name: (folder / name).read_bytes())
        vocabulary = Vocabulary(folder, chat=found is not None)
        return cls(vocabulary, found or ChatTemplate(PLAIN, {"eos_token": vocabulary.end}))

    def text(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], tool_format: ToolFormat) -> str:
        """The prompt that asks for what follows `messages`. ApiError where the template refuses them."""
        said = messages if self._takes_calls else [_calls_as_text(m, tool_format) for m in messages]
        if tools and not self._takes_tools:
            said, tools = _with_tools_as_text(said, tool_format.describe(tools)), ()
        try:
            text = self._template.render([m.template_form() for m in said], tools or None)
            text.encode()
        except (TemplateError, RecursionError, TypeError, ValueError, KeyError, AttributeError) as error:  # what a template meets in strange messages
            raise bad_request(f"the model's chat template refuses these messages: {error}", "messages") from error
        return text

    def opening(self, text: str) -> list[int]:
        """Ids of a prompt that begins a context."""
        return self.vocabulary.encode(text)

    def going_on(self, text: str, last: int) -> list[int]:
        """Ids of what comes after a response whose last id is `last`."""
        return self.vocabulary.going_on(text, last)

    def _differs(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> bool:
        try:
            return self._template.render(messages, tools) != self._template.render(messages)
        except TemplateError:
            return False

    def _says(self, word: str, messages: Sequence[Mapping[str, Any]]) -> bool:
        try:
            return word in self._template.render(messages)
        except TemplateError:
            return False


def _calls_as_text(message: Message, tool_format: ToolFormat) -> Message:
    if not message.calls:
        return message
    written = [tool_format.write(c.name, c.arguments) for c in message.calls]
    return replace(message, text="\n".join(([message.text] if message.text else []) + written), calls=())


def _with_tools_as_text(messages: Sequence[Message], described: str) -> list[Message]:
    if messages and messages[0].role == "system":
        return [replace(messages[0], text=f"{messages[0].text}\n\n{described}"), *messages[1:]]
    return [Message("system", described), *messages]
