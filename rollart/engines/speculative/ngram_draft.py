"""Drafts from what was read and written before: a request's own tokens, and those of earlier requests under the same key."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from rollart.engines.embedded.request import Request
from rollart.engines.speculative.draft import Asked, Proposal
from rollart.engines.speculative.ngram_index import LEAST, NgramIndex

__all__ = ["NgramDraft"]

TOKENS = 65_536
"""Tokens of ended requests that are remembered, over all keys; each costs about half a kilobyte."""


@dataclass(eq=False, slots=True)
class _Shelf:
    """What requests of one key have in common: the counts, and the texts that were counted, of requests that run and that have ended."""

    index: NgramIndex = field(default_factory=NgramIndex)
    running: dict[Request, list[int]] = field(default_factory=dict)
    ended: deque[list[int]] = field(default_factory=deque)


class NgramDraft:
    """Prompt lookup with a memory: requests with one `draft_key` (those of one task, say) draft from each other's tokens, one without draws
    on its own alone. At most `tokens` tokens of ended requests are kept, those of the key used longest ago dropped first. A draft is as long as
    it is likely, by `least`, to stand to its end.

    Depends on no weights, so a swap changes nothing here: tokens of an older policy remain likely ones. `version` is always "none".
    """

    name = "ngram"
    version = "none"

    def __init__(self, tokens: int = TOKENS, least: float = LEAST) -> None:
        self._least = least
        self._bound = tokens
        self._kept = 0
        self._shelves: OrderedDict[str, _Shelf] = OrderedDict()
        self._where: dict[Request, _Shelf] = {}

    @property
    def remembered(self) -> int:
        """Tokens of ended requests that are held."""
        return self._kept

    def propose(self, asked: Asked) -> Proposal:
        """Point masses; of a request whose last tokens were never seen before, or before too many different ones, none."""
        drafted: list[list[int]] = []
        for request, slot, total, limit in zip(asked.requests, asked.slots.tolist(), asked.totals.tolist(), asked.limits.tolist(), strict=True):
            if limit == 0:
                drafted.append([])
                continue
            shelf = self._shelf(request)
            text = shelf.running.setdefault(request, [])
            self._read(shelf, text, asked.tokens[slot, len(text) : total].tolist())
            drafted.append(shelf.index.continuation(text, limit, self._least))
        return Proposal.certain(drafted)

    def ended(self, request: Request) -> None:
        """Keeps the request's tokens for others of its key."""
        shelf = self._where.pop(request, None)
        if shelf is None:
            return
        text = shelf.running.pop(request)
        self._read(shelf, text, request.tokens[len(text) :])
        if request.draft_key is None:
            return
        shelf.ended.append(text)
        self._kept += len(text)
        while self._kept > self._bound:
            self._forget()

    def _shelf(self, request: Request) -> _Shelf:
        shelf = self._where.get(request)
        if shelf is None:
            shelf = self._shelves.setdefault(request.draft_key, _Shelf()) if request.draft_key is not None else _Shelf()
            self._where[request] = shelf
        if request.draft_key is not None:
            self._shelves.move_to_end(request.draft_key)
        return shelf

    @staticmethod
    def _read(shelf: _Shelf, text: list[int], more: list[int]) -> None:
        start = len(text)
        text.extend(more)
        shelf.index.extend(text, start)

    def _forget(self) -> None:
        key, shelf = next((k, s) for k, s in self._shelves.items() if s.ended)
        text = shelf.ended.popleft()
        shelf.index.remove(text)
        self._kept -= len(text)
        if not shelf.ended and not shelf.running:
            del self._shelves[key]
