"""Which sequence each slot of the KV cache holds, and which of them a new prompt may start from. Owns no tensor of the model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rollart.engines.embedded.request import Request
from rollart.engines.embedded.sampling import RowTransforms

__all__ = ["MIN_COPY", "Placement", "SlotTable"]

_NO_KEY = -1
MIN_COPY = 8
"""A shorter shared prefix is cheaper to compute than to copy."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request goes: `slot`, whose first `cached` positions hold its prompt's KV once `source` (if another slot) is copied."""

    slot: int
    cached: int
    source: int


class SlotTable:
    """Arrays over slots, so that a step's bookkeeping is a handful of vector operations.

    `tokens` [slots, max_length] are the known ids, `total` [slots] how many there are, `computed` [slots] for how many of them
    KV stands in the cache, and `used` [slots] orders the slots by when they were last given or left. A finished request's slot
    stays as it is (retained) until another request needs it, oldest first.
    """

    def __init__(self, slots: int, max_length: int, reuse: bool) -> None:
        self.count = slots
        self.max_length = max_length
        self.reuse = reuse
        self.tokens = np.zeros((slots, max_length), dtype=np.int64)
        self.total = np.zeros(slots, dtype=np.int64)
        self.computed = np.zeros(slots, dtype=np.int64)
        self.requests: list[Request | None] = [None] * slots
        self.temperature = np.ones(slots, dtype=np.float32)
        self.top_p = np.ones(slots, dtype=np.float32)
        self.top_k = np.full(slots, -1, dtype=np.int64)
        self.min_p = np.zeros(slots, dtype=np.float32)
        self.keeps = np.zeros(slots, dtype=bool)
        self.seed = np.zeros(slots, dtype=np.uint64)
        self._running = np.zeros(slots, dtype=bool)
        self._key = np.full(slots, _NO_KEY, dtype=np.int64)
        self.used = np.zeros(slots, dtype=np.int64)
        self._clock = 0
        self._key_numbers: dict[str | None, int] = {}
        self._next_key = 0

    @property
    def running(self) -> npt.NDArray[np.int64]:
        """The slots with a request in them, in order of their numbers."""
        return np.flatnonzero(self._running)

    @property
    def free(self) -> int:
        """How many slots have no request in them."""
        return self.count - int(self._running.sum())

    def transforms(self, slots: npt.NDArray[np.int64]) -> RowTransforms:
        """The sampling transforms of the requests in `slots` [R]."""
        return RowTransforms(self.temperature[slots], self.top_p[slots], self.top_k[slots], self.min_p[slots])

    def _key_number(self, key: str | None) -> int:
        number = self._key_numbers.get(key)
        if number is None:
            if len(self._key_numbers) >= 4 * self.count:  # keys of long gone requests: forget those that no slot holds
                held = set(self._key.tolist())
                self._key_numbers = {k: n for k, n in self._key_numbers.items() if n in held}
            number = self._key_numbers[key] = self._next_key
            self._next_key += 1
        return number

    def place(self, request: Request) -> Placement | None:
        """Chooses a slot for `request`, or None while all are taken. Changes nothing."""
        idle = np.flatnonzero(~self._running)
        if not len(idle):
            return None
        oldest = int(idle[np.argmin(np.where(self._key[idle] == _NO_KEY, -1, self.used[idle]))])
        if not self.reuse:
            return Placement(oldest, 0, oldest)
        tokens = request.tokens
        known = self._key == self._key_number(request.extra_key)
        if not known.any():
            return Placement(oldest, 0, oldest)
        candidates = np.flatnonzero(known)
        equal = self.tokens[candidates, : len(tokens)] == np.asarray(tokens, dtype=np.int64)
        shared = np.minimum(np.where(equal.all(1), len(tokens), equal.argmin(1)), self.computed[candidates])
        # The last token is always computed, since its logits are what is sampled from.
        usable = np.minimum(shared, len(tokens) - 1)
        # An idle slot whose whole sequence the prompt continues is taken over: nothing is copied and nothing of worth is lost.
        whole = ~self._running[candidates] & (shared == self.computed[candidates]) & (usable > 0)
        if whole.any():
            at = int(np.argmax(np.where(whole, usable, -1)))
            if usable[at] >= usable.max():
                return Placement(int(candidates[at]), int(usable[at]), int(candidates[at]))
        at = int(np.argmax(usable))
        if usable[at] < MIN_COPY:
            return Placement(oldest, 0, oldest)
        return Placement(oldest, int(usable[at]), int(candidates[at]))

    def occupy(self, request: Request, placement: Placement) -> None:
        """Puts `request` into its slot; the caller has copied the KV."""
        slot, tokens, t = placement.slot, request.tokens, request.transform
        self.tokens[slot, : len(tokens)] = tokens
        self.total[slot], self.computed[slot] = len(tokens), placement.cached
        self.temperature[slot], self.top_p[slot], self.top_k[slot], self.min_p[slot] = t.temperature, t.top_p, t.top_k, t.min_p
        self.seed[slot] = request.seed % 2**64
        self.keeps[slot] = request.keeps
        self.requests[slot] = request
        self._running[slot] = True
        self._key[slot] = self._key_number(request.extra_key) if self.reuse else _NO_KEY
        self._touch(slot)
        request.slot = slot
        request.mixed_kv = False

    def release(self, request: Request, retain: bool) -> None:
        """Takes a request out. Its KV stays for a successor if `retain`, and is never offered to anyone otherwise."""
        slot = request.slot
        self._running[slot] = False
        self.requests[slot] = None
        request.slot = -1
        if retain and self.reuse and not request.mixed_kv:
            self._touch(slot)
        else:
            self._key[slot] = _NO_KEY

    def forget_idle(self) -> None:
        """Drops every retained sequence."""
        self._key[~self._running] = _NO_KEY

    def restart_running(self) -> None:
        """Makes every running request compute its KV anew, up to its last known token."""
        self.computed[self._running] = 0

    def close_running(self) -> None:
        """Keeps what runs from ever being a source for others: its KV is of more than one version from here on."""
        self._key[self._running] = _NO_KEY
        for slot in self.running:
            request = self.requests[slot]
            if request is not None:
                request.mixed_kv = True

    def _touch(self, slot: int) -> None:
        self._clock += 1
        self.used[slot] = self._clock
