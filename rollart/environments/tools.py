"""Tool use on BFCL's stateful classes; owns which methods may be called, how, and the comparison at the end, BFCL owns classes and tasks.

Nothing of what a policy writes is evaluated, as BFCL's own executor would do: a call is parsed, looked up, and its literals are passed.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import random
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from importlib import resources
from typing import Any, ClassVar

from pydantic import Field

from rollart.environments.call_text import Call, NoCall, parse_calls
from rollart.environments.protocol import StepResult
from rollart.environments.registry import Settings

SOURCES = "bfcl_eval.eval_checker.multi_turn_eval.func_source_code"

CLASSES: dict[str, tuple[str, str]] = {
    "GorillaFileSystem": ("gorilla_file_system", "GorillaFileSystem"),
    "MathAPI": ("math_api", "MathAPI"),
    "MessageAPI": ("message_api", "MessageAPI"),
    "TicketAPI": ("ticket_api", "TicketAPI"),
    "TradingBot": ("trading_bot", "TradingBot"),
    "TravelAPI": ("travel_booking", "TravelAPI"),
    "TwitterAPI": ("posting_api", "TwitterAPI"),
    "VehicleControlAPI": ("vehicle_control", "VehicleControlAPI"),
}
"""BFCL's classes that keep a state and touch neither files nor network, as module and class, by the names that tasks use. The module's name
is that of its functions' descriptions too (but for posting)."""

DIGITS = 100
"""Digits of a result at most that a call may ask for: the arithmetic behind takes for ever over some thousands."""

MAX_RESULT = 4_000
"""Characters of a result that are shown."""


class ToolsSettings(Settings):
    """`turns`: responses a request may take, a text without calls ends it sooner. `parameters`: whether functions are listed with theirs.

    `script_skill`: chance that scripted play calls what the task's solution does; otherwise it calls nothing.
    """

    turns: int = Field(default=6, ge=1)
    parameters: bool = True
    script_skill: float = Field(default=0.8, ge=0.0, le=1.0)


class Tools:
    """One of the 200 tasks of `multi_turn_base`, which the seed chooses: requests that follow each other, each fulfilled by calls.

    A response is calls, `ls(a=True)` or JSON, or else text, which ends the request. Reward comes with the last: the share of requests after
    which every object's public state was as the solution leaves it and its results were among those seen (BFCL's multi-turn checker asks
    the same, and for all of them).
    """

    Settings: ClassVar[type[ToolsSettings]] = ToolsSettings

    def __init__(self, settings: ToolsSettings | None = None) -> None:
        self.settings = settings or ToolsSettings()
        self._tasks = _tasks()

    def reset(self, seed: int) -> str:
        self._task = self._tasks[random.Random(seed).randrange(len(self._tasks))]
        self._own, self._solved = _World(self._task), _World(self._task)
        self._request = self._turn = 0
        self._right: list[bool] = []
        self._seen: list[str] = []
        self._called = False
        return f"functions:\n{_listed(self._own, self.settings.parameters)}\n{self._asked()}"

    def step(self, action: str) -> StepResult:
        self._turn += 1
        said, going_on = "", False
        try:
            results = [self._own.call(call) for call in parse_calls(action)]
            self._seen += results
            self._called = going_on = True
            said = "".join(f"{result[:MAX_RESULT]}\n" for result in results)
        except NoCall as error:
            said = f"no call: {error}\n" if action.strip().startswith(("{", "[")) else ""
        if going_on and self._turn < self.settings.turns:
            return StepResult(said, info=self._info())
        self._judge()
        if self._request < len(self._task["requests"]):
            return StepResult(said + self._asked(), info=self._info())
        return StepResult("", sum(self._right) / len(self._right), terminated=True, info=self._info())

    def close(self) -> None:
        """Nothing to give back."""

    def script(self, rng: random.Random) -> str:
        """The calls of the task's solution to this request with probability `script_skill`, then the text that ends it."""
        wanted = self._task["solution"][self._request]
        return "\n".join(wanted) if wanted and not self._called and rng.random() < self.settings.script_skill else "done"

    def _judge(self) -> None:
        """Ends the request: its solution is called on objects of its own, which those of the policy should now equal."""
        results = [self._solved.call(call) for text in self._task["solution"][self._request] for call in parse_calls(text)]
        found = not Counter(results) - Counter(self._seen)
        self._right.append((self._called or not results) and found and self._own.state() == self._solved.state())
        self._request, self._turn, self._called = self._request + 1, 0, False

    def _asked(self) -> str:
        return f"request: {self._task['requests'][self._request]}\n"

    def _info(self) -> dict[str, Any]:
        return {"task": self._task["id"], "requests": len(self._task["requests"]), "right": list(self._right)}


class _World:
    """The objects of one task, as its start has them, and their methods by name."""

    def __init__(self, task: dict[str, Any]) -> None:
        self.classes: list[str] = task["classes"]
        self._objects: dict[str, Any] = {}
        self.methods: dict[str, Callable[..., Any]] = {}
        for name in self.classes:
            module, cls = CLASSES[name]
            made = getattr(importlib.import_module(f"{SOURCES}.{module}"), cls)()
            if hasattr(made, "_load_scenario"):
                made._load_scenario(copy.deepcopy(task["start"].get(name, {})), long_context=False)
            self._objects[name] = made
            public = inspect.getmembers(made, predicate=inspect.ismethod)
            self.methods |= {key: method for key, method in public if not key.startswith("_") and key not in task["excluded"]}

    def call(self, call: Call) -> str:
        """What the function returns, as text; an error is text too, since it is the policy's doing."""
        method = self.methods.get(call.name)
        if method is None:
            return f"Error: no function {call.name[:100]!r}"
        try:
            given = inspect.signature(method).bind(*call.positional, **call.named)
            if not abs(given.arguments.get("precision", 0)) <= DIGITS:
                return f"Error: precision is at most {DIGITS}"
            if call.name == "power":
                given.arguments = {key: float(value) for key, value in given.arguments.items()}
            result = method(*given.args, **given.kwargs)
            return result if isinstance(result, str) else json.dumps(result, default=str)
        except Exception as error:  # noqa: BLE001 - of another's class, upon the policy's arguments: the policy's doing
            return f"Error: {type(error).__name__}: {str(error)[:200]}"

    def state(self) -> dict[str, Any]:
        """The public attributes of every object, as BFCL's state checker compares them."""
        return {name: {key: value for key, value in vars(made).items() if key[0] != "_"} for name, made in self._objects.items()}


def _listed(world: _World, parameters: bool) -> str:
    """A line a function: its name, its parameters with their types, and which of them may be left out."""
    lines = []
    for name, described in sorted(_described().items()):
        if name in world.methods and described["class"] in world.classes:
            required = described["parameters"]["required"]
            fields = described["parameters"]["properties"].items()
            shown = ", ".join(f"{key}{'' if key in required else '?'}: {field['type']}" for key, field in fields)
            lines.append(f"{name}({shown})" if parameters else name)
    return "\n".join(lines)


def _lines(*path: str) -> list[dict[str, Any]]:
    text = resources.files("bfcl_eval").joinpath("data", *path).read_text()
    return [json.loads(line) for line in text.splitlines() if line.strip()]


@lru_cache(maxsize=1)
def _described() -> dict[str, dict[str, Any]]:
    pairs = [(name, module) for name, (module, _) in CLASSES.items()]
    return {row["name"]: {**row, "class": name} for name, module in pairs for row in _lines("multi_turn_func_doc", f"{module}.json")}


@lru_cache(maxsize=1)
def _tasks() -> list[dict[str, Any]]:
    """BFCL's multi_turn_base: objects' start, requests, and the calls that solve each."""
    solutions = {row["id"]: row["ground_truth"] for row in _lines("possible_answer", "BFCL_v4_multi_turn_base.json")}
    return [
        {
            "id": row["id"], "classes": sorted(row["involved_classes"]), "start": row["initial_config"], "solution": solutions[row["id"]],
            "requests": ["\n".join(m["content"] for m in turn) for turn in row["question"]], "excluded": row.get("excluded_function", []),
        }
        for row in _lines("BFCL_v4_multi_turn_base.json")
    ]  # fmt: skip
