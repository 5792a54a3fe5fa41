"""What an environment is; owns the protocol and what crosses it, knows no environment."""

from __future__ import annotations

import random
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeGuard, runtime_checkable

RunIn = Literal["loop", "thread"]
"""Where an environment's calls run: in a thread, or in the caller's event loop, which suits coroutines and what takes under a millisecond."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came of an action: the next observation (text to append to the context), the reward, and whether it ended.

    `terminated`: the task itself ended; `truncated`: a limit of the environment did. `info` (JSON values) of the last step is
    stored with the trajectory, where verifiers find it.
    """

    observation: str
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: dict[str, Any] = field(default_factory=dict)


class Environment(Protocol):
    """One episode's world. `reset` and `step` may be coroutine functions; `close` is always called, once."""

    def reset(self, seed: int) -> str | Awaitable[str]:
        """Starts the episode that `seed` names and returns the first observation."""
        ...

    def step(self, action: str) -> StepResult | Awaitable[StepResult]:
        """Applies the decoded response. A malformed action is the policy's doing: score it, don't raise."""
        ...

    def close(self) -> Awaitable[None] | None: ...


@dataclass(frozen=True, slots=True)
class AgentResult:
    """What came of an agent's run: its reward, and what verifiers and reports should know of it (`info`, JSON values).

    `truncated`: a limit of the agent's own ended it, not the task.
    """

    reward: float = 0.0
    info: dict[str, Any] = field(default_factory=dict)
    truncated: bool = False


@runtime_checkable
class Agent(Protocol):
    """One episode that runs its own loop, and asks the policy over OpenAI's HTTP API. A method `close`, which is optional, is called once."""

    def run(self, seed: int, url: str, key: str) -> AgentResult | Awaitable[AgentResult]:
        """Plays the episode that `seed` names. `url` and `key` are an OpenAI client's `base_url` and `api_key`, and end with the run.

        A plain function runs in a thread, a coroutine function in the worker's event loop. What the policy caused is scored; what is raised
        is the agent's failure, unless the attempt's budget of tokens or turns was used up.
        """
        ...


def is_agent(made: object) -> TypeGuard[Agent]:
    """Whether an environment, or its class, is an `Agent`: it has `run`, and no `step` that somebody else would call."""
    return callable(getattr(made, "run", None)) and not callable(getattr(made, "step", None))


@runtime_checkable
class Scripted(Protocol):
    """An environment that can also play itself, imperfectly: `script` returns the next action's text."""

    def script(self, rng: random.Random) -> str: ...


@runtime_checkable
class Choosing(Protocol):
    """An environment that can list actions which it would take now, of which random play draws one."""

    def actions(self) -> list[str]: ...
