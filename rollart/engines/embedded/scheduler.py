"""Continuous batching: who enters, what each step computes, who has finished. Runs in one thread, knows neither threads nor HTTP."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rollart.engines.embedded.attention import SlotCache
from rollart.engines.embedded.model import PolicyModel
from rollart.engines.embedded.packing import pack
from rollart.engines.embedded.request import Request
from rollart.engines.embedded.slots import MIN_COPY, SlotTable
from rollart.engines.speculative.draft import Proposal
from rollart.engines.speculative.speculator import Speculator
from rollart.engines.speculative.verification import verify
from rollart.types import KVMode

__all__ = ["PauseMode", "Scheduler", "Tally"]

PauseMode = Literal["abort", "retract", "in_place"]
"""What a pause does to requests: ends them, sends them back to the queue, or stops them where they are."""


@dataclass(slots=True)
class Tally:
    """Counts since the start: `steps`, tokens by kind, and the `seconds` spent in steps."""

    steps: int = 0
    generated: int = 0
    prefilled: int = 0
    cached: int = 0
    seconds: float = field(default=0.0)


class Scheduler:
    """Requests over the slots of one model.

    `chunk` bounds the prompt tokens of a step, so that a long prompt delays running responses little. With `deterministic`
    each pass holds one request in chunks that depend on it alone, and nothing is reused. `report` hears, after each
    step, of every request that has ended, or is streamed and has `stream_interval` tokens more than when it was last reported.
    With a `speculator`, decode rows carry drafted tokens, which the same pass verifies; ValueError if `deterministic` too.
    """

    def __init__(
        self,
        model: PolicyModel,
        slots: int,
        max_length: int,
        chunk: int,
        version: str,
        report: Callable[[list[Request]], None],
        kv: KVMode = "recomputed",
        deterministic: bool = False,
        stream_interval: int = 1,
        speculator: Speculator | None = None,
    ) -> None:
        if deterministic and speculator is not None:
            raise ValueError("a pass whose rows depend on what was drafted is not deterministic; switch one of them off")
        self._model = model
        self.speculator = speculator
        self._stream_interval = stream_interval
        self._table = SlotTable(slots, max_length, reuse=not deterministic)
        self._cache = SlotCache(slots, max_length)
        self._chunk = chunk
        self._deterministic = deterministic
        self._turn = 0
        self._kv = kv
        self._report = report
        self._waiting: deque[Request] = deque()
        self.version = version
        self.paused = False
        self.tally = Tally()

    @property
    def running(self) -> int:
        """How many requests hold a slot."""
        return self._table.count - self._table.free

    @property
    def waiting(self) -> int:
        """How many requests wait for a slot."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return not self.paused and bool(self._waiting or self.running)

    def add(self, request: Request) -> None:
        """Queues a request; the server has checked that it fits."""
        self._waiting.append(request)

    def abort(self, matches: Callable[[Request], bool], message: str = "aborted") -> int:
        """Ends every request that matches, with what it has; returns how many."""
        ended = [r for r in self._requests() if matches(r)]
        for request in ended:
            request.finish = {"type": "abort", "message": message}
        self._waiting = deque(r for r in self._waiting if r.finish is None)
        self._leave(ended)
        self._report(ended)
        return len(ended)

    def pause(self, mode: PauseMode) -> None:
        """Stops stepping until `resume`."""
        self.paused = True
        if mode == "abort":
            self.abort(lambda _: True, "generation was paused")
        elif mode == "retract":
            retracted = self._running_requests()
            for request in retracted:
                self._table.release(request, retain=True)
            self._waiting.extendleft(reversed(retracted))

    def resume(self) -> None:
        """Goes on after a pause."""
        self.paused = False

    def flush(self) -> None:
        """Drops every retained prefix."""
        self._table.forget_idle()

    def swap(self, staged: dict[str, Tensor], version: str) -> None:
        """Exchanges the weights between two steps. No KV of the old ones is ever offered to another request again."""
        self._model.swap(staged)
        self.version = version
        self._table.forget_idle()
        if self._kv == "recomputed":
            self._table.restart_running()
        else:
            self._table.close_running()

    @torch.inference_mode()
    def step(self) -> None:
        """Admits what fits, runs one forward pass, and samples a token for each request whose sequence is computed to its end."""
        begin = time.perf_counter()
        self._admit()
        slots = self._table.running
        if len(slots):
            self._forward(slots)
        self.tally.steps += 1
        self.tally.seconds += time.perf_counter() - begin

    def _requests(self) -> list[Request]:
        return [*self._waiting, *self._running_requests()]

    def _running_requests(self) -> list[Request]:
        return [r for r in self._table.requests if r is not None]

    def _leave(self, requests: Iterable[Request]) -> None:
        for request in requests:
            if request.slot >= 0:
                self._table.release(request, retain=True)
            if self.speculator is not None:
                self.speculator.ended(request)

    def _admit(self) -> None:
        # A prompt that another request is computing right now is worth a step's wait, if it is long enough for its KV to be copied then.
        computing = {(r.extra_key, r.prompt) for r in self._running_requests() if not r.output_ids} if self._waiting else set()
        deferred: list[Request] = []
        while self._waiting and self._table.free:
            request = self._waiting.popleft()
            placement = self._table.place(request)
            if placement is None:
                deferred.append(request)
                break
            identity = (request.extra_key, request.prompt)
            if self._table.reuse and identity in computing and placement.cached < len(request.prompt) - 1 >= MIN_COPY:
                deferred.append(request)
                continue
            if placement.source != placement.slot:
                self._cache.copy_prefix(placement.source, placement.slot, placement.cached)
            self._table.occupy(request, placement)
            if self.speculator is not None:
                self.speculator.placed(placement.slot, placement.source, placement.cached)
            if not request.output_ids:
                request.cached_tokens = placement.cached
                request.entered = request.entered or time.perf_counter()
            self.tally.cached += placement.cached
            computing.add(identity)
        self._waiting.extendleft(reversed(deferred))

    def _due(self, slots: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Which of the running `slots` take part in this step, and with how many tokens."""
        pending = self._table.total[slots] - self._table.computed[slots]
        if self._deterministic:
            self._turn = int(slots[np.searchsorted(slots, self._turn) % len(slots)])
            at = slots == self._turn
            self._turn += 1
            return slots[at], np.minimum(pending[at], self._chunk)
        # Decode rows first (one token each, never held back), then prompts as they came until the chunk is full.
        order = np.lexsort((self._table.used[slots], pending > 1))
        slots, pending = slots[order], pending[order]
        long = pending > 1
        before = np.cumsum(np.where(long, pending, 0)) - np.where(long, pending, 0)
        counts = np.where(long, np.clip(self._chunk - before, 0, pending), pending)
        return slots[counts > 0], counts[counts > 0]

    def _forward(self, running: npt.NDArray[np.int64]) -> None:
        begin = time.perf_counter()
        table, speculator = self._table, self.speculator
        slots, counts = self._due(running)
        starts = table.computed[slots]
        complete = starts + counts == table.total[slots]
        done, decoding = slots[complete], counts[complete] == 1
        self.tally.prefilled += int(counts[counts > 1].sum())
        proposal = Proposal.none(len(done)) if speculator is None else speculator.propose(table, done, decoding)
        wanted = np.zeros_like(counts)
        wanted[complete] = proposal.lengths + 1
        counts = counts + np.maximum(wanted - 1, 0)
        step = pack(self._cache, table.tokens, slots, starts, counts, wanted, self._model.device, in_place=not self._deterministic)
        if speculator is not None and speculator.reads_hidden:
            logits, hidden = self._model.logits_and_hidden(step)
            speculator.observed(step, hidden, slots, starts, counts)
        else:
            logits = self._model.logits(step)
        table.computed[slots] = starts + counts
        if not len(done):
            return
        at = table.total[done]
        verdict = verify(logits, proposal, table.transforms(done), table.seed[done], at, table.keeps[done])
        kept = np.zeros_like(at)  # how many tokens each request takes, fewer than stand where one of them ends it
        heard: list[Request] = []
        for row, (slot, stands) in enumerate(zip(done.tolist(), verdict.accepted.tolist(), strict=True)):
            request = table.requests[slot]
            if request is None:
                raise RuntimeError(f"slot {slot} sampled a token for nobody")
            before = len(request.output_ids)
            kept_ids = None if verdict.kept is None else verdict.kept[row]
            tokens, logprobs = verdict.ids[row, : stands + 1].tolist(), verdict.logprobs[row, : stands + 1].tolist()
            for i, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
                request.append(token, logprob, self.version, None if kept_ids is None else kept_ids[i])
                if request.finish is not None:
                    break
            after = len(request.output_ids)
            kept[row] = after - before
            table.tokens[slot, at[row] : at[row] + kept[row]] = verdict.ids[row, : kept[row]]
            if request.finish is not None or (request.streaming and after // self._stream_interval > before // self._stream_interval):
                heard.append(request)
        # What was computed beyond the last token but one was of tokens that don't stand, or the last one itself, which always comes anew.
        table.total[done] = at + kept
        table.computed[done] = at + kept - 1
        self.tally.generated += int(kept.sum())
        if speculator is not None:
            requests = [r for r, d in zip((table.requests[slot] for slot in done.tolist()), decoding.tolist(), strict=True) if d and r is not None]
            # The seconds of a step that reads prompts say nothing of what drafted tokens cost.
            seconds = time.perf_counter() - begin if len(requests) == len(slots) else None
            correct = np.minimum(verdict.accepted, kept)
            speculator.verified(requests, proposal.lengths[decoding], correct[decoding], seconds, self.version)
        self._leave(r for r in heard if r.finish is not None)
        if heard:
            self._report(heard)
