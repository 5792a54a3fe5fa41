"""Function calls as a policy writes them, JSON or Python's notation, as names and literal arguments; evaluates nothing."""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass
from typing import Any

MAX_TEXT = 20_000
"""Characters of a response that may be calls."""

MAX_CALLS = 20
"""Calls of one response."""

LARGEST = 1e15
"""Magnitude of a number at most: Python's integers have no end, and a power of two large ones takes for ever."""


class NoCall(ValueError):
    """A text is no list of calls; the message, which the policy is shown, says why."""


@dataclass(frozen=True, slots=True)
class Call:
    """A function's name and its arguments, by position and by name."""

    name: str
    positional: tuple[Any, ...]
    named: dict[str, Any]


def parse_calls(text: str) -> list[Call]:
    """The calls of a text: `name(a=1)`, a list or lines of such, or JSON `{"name": ..., "arguments": {...}}`, or a list of such. NoCall."""
    text = text.strip()
    if len(text) > MAX_TEXT:
        raise NoCall(f"over {MAX_TEXT} characters")
    try:
        calls = _json(text) if text.startswith(("{", "[{")) else _python(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise error if isinstance(error, NoCall) else NoCall(f"{type(error).__name__}: {str(error)[:200]}") from error
    if not 0 < len(calls) <= MAX_CALLS:
        raise NoCall(f"{len(calls)} calls; between 1 and {MAX_CALLS} are taken")
    return calls


def _json(text: str) -> list[Call]:
    found = json.loads(text)
    calls = []
    for item in found if isinstance(found, list) else [found]:
        name, arguments = (item.get("name"), item.get("arguments", {})) if isinstance(item, dict) else (None, None)
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise NoCall('a call is {"name": ..., "arguments": {...}}')
        calls.append(Call(name, (), {key: _within_limits(value) for key, value in arguments.items()}))
    return calls


def _python(text: str) -> list[Call]:
    calls = []
    for statement in ast.parse(text).body:
        value = statement.value if isinstance(statement, ast.Expr) else None
        for node in value.elts if isinstance(value, ast.List | ast.Tuple) else [value]:
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                raise NoCall("a call is name(argument=value, ...)")
            if any(keyword.arg is None for keyword in node.keywords):
                raise NoCall("arguments are written out, without **")
            named = {str(keyword.arg): _literal(keyword.value) for keyword in node.keywords}
            calls.append(Call(node.func.id, tuple(_literal(a) for a in node.args), named))
    return calls


def _literal(node: ast.expr) -> Any:
    return _within_limits(ast.literal_eval(node))


def _within_limits(value: Any) -> Any:
    """The value, if it is of JSON's kinds (and tuples) and no number in it is over LARGEST."""
    if isinstance(value, list | tuple):
        for item in value:
            _within_limits(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            _within_limits(key)
            _within_limits(item)
    elif value is not None and not isinstance(value, str | bool):
        if not isinstance(value, int | float):
            raise NoCall(f"an argument is a {type(value).__name__}; text, numbers, lists and mappings are taken")
        if not abs(value) <= LARGEST:
            raise NoCall(f"a number is beyond {LARGEST:g}")
    return value
