"""Plays a batch of requests on the embedded engine's scheduler and measures it; owns what counts as a measured second."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, islice

from benchmarks.speculating.questions import Question
from rollart.engines.embedded.request import Request
from rollart.engines.embedded.scheduler import Scheduler
from rollart.types import SamplingTransform

_NUMBERS = count()


@dataclass(frozen=True, slots=True)
class Played:
    """`tokens` sampled in `seconds` of `passes` while every slot was taken; of the drafts, `drafted` tokens in `verified` passes of one
    request, of which `correct` stood. `texts`: prompt and response of each request."""

    tokens: int
    seconds: float
    passes: int
    verified: int
    drafted: int
    correct: int
    texts: list[tuple[str, tuple[int, ...], tuple[int, ...]]]

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    @property
    def pass_ms(self) -> float:
        """Milliseconds of a pass, drafting included."""
        return 1000.0 * self.seconds / self.passes

    @property
    def acceptance_length(self) -> float:
        """Tokens that a request takes from one pass."""
        return 1.0 + self.correct / self.verified if self.verified else 1.0


def play(
    scheduler: Scheduler, asked: Sequence[Question], members: int, batch: int, new: int, transform: SamplingTransform, stop: frozenset[int], seed: int
) -> Played:
    """`members` responses of up to `new` tokens to each question, `batch` at a time. Time counts while a batch is full, prompts are read before it
    or between: a last response that goes on alone says nothing of this batch."""
    requests = [
        Request(f"{next(_NUMBERS)}", question.prompt, new, transform, seed * 100_003 + at * members + member, stop, draft_key=question.task)
        for at, question in enumerate(asked)
        for member in range(members)
    ]
    waiting = iter(requests)
    running: list[Request] = []
    tokens = passes = 0
    seconds = 0.0
    while True:
        running = [r for r in running if r.finish is None]
        for request in islice(waiting, batch - len(running)):
            running.append(request)
            scheduler.add(request)
        if not running:
            break
        full = len(running) == batch
        decoding = all(r.output_ids for r in running)
        before, begun = scheduler.tally.generated, time.perf_counter()
        scheduler.step()
        if full and decoding:
            seconds += time.perf_counter() - begun
            tokens += scheduler.tally.generated - before
            passes += 1
    texts = [(r.draft_key or "", r.prompt, tuple(r.output_ids)) for r in requests]
    verified, drafted, correct = (sum(getattr(r, name) for r in requests) for name in ("verified", "drafted", "correct"))
    return Played(tokens, seconds, passes, verified, drafted, correct, texts)
