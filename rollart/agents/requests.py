"""What every API's request and answer come down to; owns shapes and bounds alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rollart.agents.errors import bad_request
from rollart.agents.messages import Message
from rollart.types import FinishReason

__all__ = ["Answer", "Ask"]

MOST_MESSAGES = 4096
MOST_TOOLS = 128
MOST_STOPS = 4


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. `tools` are in the form of chat completions; with `may_call` false, calls stay text. `max_tokens`: None as the task says."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    may_call: bool = True
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """ApiError for what is too little or too much."""
        if not self.messages:
            raise bad_request("there are no messages; give at least one", "messages")
        for name, count, most in (
            ("messages", len(self.messages), MOST_MESSAGES),
            ("tools", len(self.tools), MOST_TOOLS),
            ("stop", len(self.stop), MOST_STOPS),
        ):
            if count > most:
                raise bad_request(f"{count} {name} are over the {most} that a request may have", name)
        if "" in self.stop:
            raise bad_request("a stop string is empty", "stop")


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer: the `message` as it is told, tokens of prompt and answer, and each sampled token's spelling and log-probability.

    `id` is unique within the attempt, and the same when the same request is answered again after nobody had heard of it.
    """

    id: str
    message: Message
    finish_reason: FinishReason
    prompt_tokens: int
    tokens: int
    cached_tokens: int
    logprobs: tuple[tuple[str, float], ...]
