"""One response in the making: what was asked, what was sampled so far, and how it ended. Decides nothing."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from rollart.types import SamplingTransform

__all__ = ["Request"]


@dataclass(eq=False, slots=True)
class Request:
    """A request inside the engine. The loop thread alone writes to it; lists only grow, so another thread may read a prefix.

    `spans` are [version, start, end) over `output_ids`; `finish` is SGLang's `finish_reason` once it has ended. `slot` is -1
    while it waits. `cached_tokens` of the prompt were taken from another request's KV. `arrived`, `entered` (first given a slot), `began`
    (first token) and `ended` (by itself) are moments of `time.perf_counter`, 0 until then.

    `speculate` is whether tokens may be drafted for it; requests of one `draft_key` may be drafted for from each other's tokens. It took
    `verified` passes in which nothing but its last token was left to compute; in these, `drafted` tokens were proposed and `correct` stood.
    """

    rid: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    transform: SamplingTransform
    seed: int
    stop_token_ids: frozenset[int]
    extra_key: str | None = None
    streaming: bool = False
    speculate: bool = True
    draft_key: str | None = None
    sink: Any = None
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[tuple[str, int, int]] = field(default_factory=list)
    finish: dict[str, Any] | None = None
    slot: int = -1
    cached_tokens: int = 0
    mixed_kv: bool = False
    verified: int = 0
    drafted: int = 0
    correct: int = 0
    arrived: float = field(default_factory=time.perf_counter)
    entered: float = 0.0
    began: float = 0.0
    ended: float = 0.0

    @property
    def tokens(self) -> list[int]:
        """Prompt and response so far."""
        return [*self.prompt, *self.output_ids]

    def append(self, token: int, logprob: float, version: str) -> None:
        """Adds a sampled token with the version that sampled it, and ends the request where a stop condition is met."""
        at = len(self.output_ids)
        self.output_ids.append(token)
        self.logprobs.append(logprob)
        if self.spans and self.spans[-1][0] == version:
            self.spans[-1] = (version, self.spans[-1][1], at + 1)
        else:
            self.spans.append((version, at, at + 1))
        if token in self.stop_token_ids:
            self.finish = {"type": "stop", "matched": token}
        elif at + 1 >= self.max_new_tokens:
            self.finish = {"type": "length", "length": at + 1}
        if at == 0:
            self.began = time.perf_counter()
        if self.finish is not None:
            self.ended = time.perf_counter() if at else self.began
