"""Tool calls in what the policy writes: the protocol of a format, and the one that Hermes and Qwen models use. Evaluates nothing."""

from __future__ import annotations

import json
import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass
from json.decoder import scanstring  # type: ignore[attr-defined]  # typeshed leaves it out
from typing import Any, Protocol

from rollart.import_paths import why_not_imported

__all__ = ["FORMATS", "Hermes", "ToolCall", "ToolFormat", "UnknownFormat", "tool_format"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of the tool `name`; `arguments` is the JSON object as it was written."""

    id: str
    name: str
    arguments: str

    @property
    def parsed_arguments(self) -> Any:
        """The arguments as JSON value, or as text if they are none."""
        try:
            return json.loads(self.arguments)
        except (ValueError, RecursionError):
            return self.arguments


class ToolFormat(Protocol):
    """How a policy writes tool calls. `id_of` names the n-th call."""

    def parse(self, text: str) -> tuple[str, list[tuple[str, str]]]:
        """What `text` says beside its calls, and (name, arguments) of each of these. A malformed call stays text."""
        ...

    def write(self, name: str, arguments: str) -> str:
        """A call as the policy would write it, for templates that know no calls."""
        ...

    def describe(self, tools: Sequence[dict[str, Any]]) -> str:
        """What a system message says of the tools, for templates that know none."""
        ...


class UnknownFormat(ValueError):
    """No tool format has that name."""


OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Hermes:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as in the templates of Hermes, Qwen and SmolLM2 models."""

    def parse(self, text: str) -> tuple[str, list[tuple[str, str]]]:
        rest, calls, at = [], [], 0
        while (start := text.find(OPEN, at)) >= 0:
            end = text.find(CLOSE, start)
            inner = text[start + len(OPEN) : end if end >= 0 else len(text)]
            call = _call(inner)
            stop = len(text) if end < 0 else end + len(CLOSE)
            rest.append(text[at:start] if call else text[at:stop])
            if call:
                calls.append(call)
            at = stop
        rest.append(text[at:])
        said = "".join(rest)
        return (said.strip() if calls else said), calls

    def write(self, name: str, arguments: str) -> str:
        return f'{OPEN}\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n{CLOSE}'

    def describe(self, tools: Sequence[dict[str, Any]]) -> str:
        listed = "\n".join(json.dumps(tool) for tool in tools)
        return (
            f"You may call functions. They are:\n<tools>\n{listed}\n</tools>\nWrite a call as a JSON object with name and arguments in "
            f'{OPEN}{CLOSE}:\n{OPEN}\n{{"name": <function-name>, "arguments": <args-json-object>}}\n{CLOSE}'
        )


FORMATS: dict[str, str] = {"hermes": "rollart.agents.tool_calls:Hermes"}
"""Short name to `module:Class`; an import path is a name too."""


def tool_format(name: str) -> ToolFormat:
    """A new tool format `name`, a short name or `module:Class`; UnknownFormat if there is none."""
    if name not in FORMATS and ":" not in name:
        raise UnknownFormat(f"unknown tool format {name!r}; known are {', '.join(sorted(FORMATS))}, and any import path module:Class")
    path = FORMATS.get(name, name)
    try:
        made: ToolFormat = pkgutil.resolve_name(path)()
    except (Exception, SystemExit) as error:  # importing runs a user's module, which may end in anything
        raise UnknownFormat(f"tool format {name!r} cannot be made from {path!r}: {why_not_imported(path, error)}") from error
    missing = [m for m in ("parse", "write", "describe") if not callable(getattr(made, m, None))]
    if missing:
        raise UnknownFormat(f"{path!r} is no tool format; it lacks {', '.join(missing)}")
    return made


def _call(text: str) -> tuple[str, str] | None:
    """Name and arguments of one call; None if it is malformed."""
    try:
        text = text.strip()
        said = json.loads(text)
        name, arguments, value = said["name"], _members(text).get("arguments", "{}"), said.get("arguments", {})
        if isinstance(value, str):  # some models write the object as text
            arguments, value = value, json.loads(value)
        f"{name}{arguments}".encode()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return (name, arguments) if isinstance(name, str) and name and isinstance(value, dict) else None


_DECODER = json.JSONDecoder()


def _members(text: str) -> dict[str, str]:
    """The members of `text`, which is a JSON object, each value as it was written."""
    found, at = {}, _skip(text, 1)
    while text[at] != "}":
        name, at = scanstring(text, at + 1)
        start = _skip(text, _skip(text, at) + 1)
        _, at = _DECODER.raw_decode(text, start)
        found[name] = text[start:at]
        at = _skip(text, at)
        if text[at] == ",":
            at = _skip(text, at + 1)
    return found


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at
