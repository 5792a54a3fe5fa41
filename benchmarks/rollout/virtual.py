"""A script in virtual time: what the control objects alone make of it, with no overhead, and what no control could do better."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.rollout.script import Play
from rollart.control.ledger import Ledger
from rollart.types import Attempt, Batch, Outcome, Receipt, Score

Script = Callable[[Attempt], Play]

TICK_S = 1.0
"""How often the ledger is asked for what time alone decides, as the coordinator does."""


@dataclass(slots=True)
class Played:
    """`ready`: when each batch was formed; `trained`: when its step ended; seconds of the trace."""

    ready: list[float] = field(default_factory=list)
    trained: list[float] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)


@dataclass(slots=True)
class _Running:
    attempt: Attempt
    first: int | None = None


class VirtualRun:
    """Plays a ledger on `slots` slots in the order of dispatch, each step taking `train_s`; nothing else takes any time."""

    def __init__(self, ledger: Ledger, script: Script, slots: int, train_s: float) -> None:
        self.ledger, self.script, self.slots, self.train_s = ledger, script, slots, train_s
        self.now, self.version = 0.0, 0
        self.waiting: deque[Attempt] = deque()
        self.running: dict[Attempt, _Running] = {}
        self.played = Played()
        self._events: list[tuple[float, int, str, Attempt | None]] = []
        self._order = 0
        self._training: Batch | None = None

    def run(self, steps: int) -> Played:
        """Until so many steps have ended."""
        self._go_on()
        self._at(TICK_S, "tick", None)
        while len(self.played.trained) < steps:
            self.now, _, kind, attempt = heapq.heappop(self._events)
            if kind == "tick":
                self._at(TICK_S, "tick", None)
            elif kind == "trained":
                self._trained()
            elif attempt is not None and attempt in self.running:
                self._happens(kind, attempt)
            self._go_on()
        return self.played

    def _at(self, delay: float, kind: str, attempt: Attempt | None) -> None:
        self._order += 1
        heapq.heappush(self._events, (self.now + delay, self._order, kind, attempt))

    def _happens(self, kind: str, attempt: Attempt) -> None:
        if kind == "begun":
            self.running[attempt].first = self.version
            self.ledger.begun(attempt, self.now)
        elif kind == "failed":
            del self.running[attempt]
            self.ledger.failed(attempt, "environment", self.now)
        else:
            self._score(self.running.pop(attempt), "terminated")

    def _score(self, ended: _Running, outcome: Outcome) -> None:
        attempt, first = ended.attempt, ended.first if ended.first is not None else self.version
        sampled = sum(t.tokens for t in self.script(attempt).turns)
        receipt = Receipt(attempt, str(attempt), 0, "", 0, outcome, first, self.version, sampled, sampled, 1)
        self.ledger.scored(receipt, Score(attempt, receipt.nonce, float(attempt.member % 2)))

    def _trained(self) -> None:
        batch, self._training = self._training, None
        if batch is not None:
            self.played.trained.append(self.now)
            self.ledger.settle(batch)
            self.version = batch.step + 1
            window = self.ledger.window
            for old in [r for r in self.running.values() if r.first is not None and window.expired(r.first, self.version)]:
                self._score(self.running.pop(old.attempt), "over_age")

    def _go_on(self) -> None:
        for attempt in self.ledger.stops():
            self.running.pop(attempt, None)
        if self._training is None and (batch := self.ledger.form_batch()) is not None:
            self._training = batch
            self.played.ready.append(self.now)
            self.played.batches.append(batch)
            self._at(self.train_s, "trained", None)
        due = [a for group in self.ledger.admit(self.version, self.now) for a in group] + self.ledger.due(self.now)
        self.waiting.extend(due)
        wanted = set(self.ledger.running())
        while self.waiting and len(self.running) < self.slots:
            attempt = self.waiting.popleft()
            if attempt in wanted:
                self._start(attempt)

    def _start(self, attempt: Attempt) -> None:
        found = self.script(attempt)
        self.ledger.renew([attempt], self.now)
        self.running[attempt] = _Running(attempt)
        if found.fails:
            self._at(found.reset_s, "failed", attempt)
            return
        self._at(found.reset_s, "begun", attempt)
        self._at(found.seconds, "finished", attempt)


def one_by_one(seconds: Sequence[float], slots: int) -> list[float]:
    """When each of these pieces of work ends, on `slots` slots that are never idle while one waits, in their order."""
    free = [0.0] * slots
    ends = []
    for each in seconds:
        start = heapq.heappop(free)
        heapq.heappush(free, start + each)
        ends.append(start + each)
    return ends
