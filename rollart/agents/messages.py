"""Messages of a conversation in one form, whichever API they came by, and names for its beginnings. Renders nothing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollart.agents.tool_calls import ToolCall

__all__ = ["Message", "beginnings"]


@dataclass(frozen=True, slots=True)
class Message:
    """One message. `calls`: an assistant's tool calls; `call_id`: the call that a tool's message answers; `name`: who speaks, or the tool."""

    role: str
    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    name: str = ""

    @property
    def key(self) -> str:
        """Equal for messages that say the same, however their JSON was written."""
        calls = [[c.id, c.name, _same_json(c.arguments)] for c in self.calls]
        return json.dumps([self.role, self.text, calls, self.call_id, self.name])

    def template_form(self) -> dict[str, Any]:
        """As chat templates take it: the arguments of calls as objects."""
        form: dict[str, Any] = {"role": self.role, "content": self.text}
        if self.calls:
            form["tool_calls"] = [{"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.parsed_arguments}} for c in self.calls]
        if self.call_id:
            form["tool_call_id"] = self.call_id
        if self.name:
            form["name"] = self.name
        return form


def beginnings(tools: Sequence[dict[str, Any]], messages: Sequence[Message]) -> list[str]:
    """A name for each beginning of the conversation: the n-th of the list is that of the first n + 1 messages, under these tools.

    Equal names mean equal conversations (SHA-256 over all that they hold).
    """
    names, so_far = [], hashlib.sha256(json.dumps(tools, sort_keys=True).encode()).digest()
    for message in messages:
        so_far = hashlib.sha256(so_far + message.key.encode()).digest()
        names.append(so_far.hex())
    return names


def _same_json(text: str) -> str:
    """JSON in one spelling; what is none as it is."""
    try:
        return json.dumps(json.loads(text), sort_keys=True)
    except (ValueError, RecursionError):
        return text
