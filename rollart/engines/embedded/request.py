"""One response in the making: what was asked, what was sampled so far, and how it ended. Decides nothing."""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from rollart.kept import KeptSets
from rollart.types import SamplingTransform

__all__ = ["Request"]


@dataclass(eq=False, slots=True)
class Request:
    """A request inside the engine. The loop thread alone writes to it; lists only grow, so another thread may read a prefix.

    `spans` are [version, start, end) over `output_ids`; `finish` is SGLang's `finish_reason` once it has ended. `slot` is -1
    while it waits. `cached_tokens` of the prompt were taken from another request's KV. `arrived`, `entered` (first given a slot), `began`
    (first token) and `ended` (by itself) are moments of `time.perf_counter`, 0 until then. With `return_kept` and a transform that cuts,
    `kept_ids` hold what was kept at each token, the first `kept_ends[i]` of them up to the i-th.

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
    return_kept: bool = False
    sink: Any = None
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[tuple[str, int, int]] = field(default_factory=list)
    kept_ids: array[int] = field(default_factory=lambda: array("i"))
    kept_ends: array[int] = field(default_factory=lambda: array("q"))
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

    @property
    def keeps(self) -> bool:
        """Whether what its cuts keep is wanted."""
        return self.return_kept and self.transform.is_cut

    def kept(self, since: int, upto: int) -> KeptSets:
        """What was kept at the tokens [since, upto) of the response."""
        ends = np.array(self.kept_ends[:upto], dtype=np.int64)
        first = int(ends[since - 1]) if since else 0
        return KeptSets(self.kept_ids[first : int(ends[-1]) if upto else 0], array("i", np.diff(ends, prepend=0)[since:].tolist()))

    def append(self, token: int, logprob: float, version: str, kept: npt.NDArray[np.int32] | None = None) -> None:
        """Adds a sampled token with the version that sampled it and what was `kept` there, if that is wanted; ends the request where a stop
        condition is met."""
        at = len(self.output_ids)
        if kept is not None:
            self.kept_ids.frombytes(kept.tobytes())
            self.kept_ends.append(len(self.kept_ids))
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
