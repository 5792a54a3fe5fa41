"""What a draft is asked and what it answers; owns the protocol, no draft."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from torch import Tensor

from rollart.drafts.errors import DraftError
from rollart.engines.embedded.attention import PackedStep
from rollart.engines.embedded.request import Request
from rollart.engines.embedded.sampling import RowTransforms

__all__ = ["Asked", "Draft", "DraftError", "Proposal", "ReadsHidden", "Weighted", "portions", "rows_at"]

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Asked:
    """Requests that are about to decode, R of them. `tokens` is the slot table's [slots, max_length]: request r stands in row `slots[r]`, and
    its first `totals[r]` ids are known. At most `limits[r]` tokens are wanted of it, perhaps none. Arrays are [R]."""

    requests: Sequence[Request]
    slots: Ints
    tokens: Ints
    totals: Ints
    limits: Ints
    rows: RowTransforms
    seeds: npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafted tokens: `ids` [R, K], of which the first `lengths[r]` count.

    Where `drawn[r]`, the tokens of row r were drawn from `q` fp32 [R, K, V], the draft's probabilities, with random numbers that nothing
    else sees. Elsewhere they stand for themselves, as point masses, and may depend on whatever was sampled before.
    """

    ids: Ints
    lengths: Ints
    q: Tensor | None
    drawn: npt.NDArray[np.bool_]

    @classmethod
    def none(cls, requests: int) -> Proposal:
        """No tokens at all for that many requests: what is sampled then is plain sampling."""
        return cls.certain([()] * requests)

    @classmethod
    def certain(cls, drafted: Sequence[Sequence[int]]) -> Proposal:
        """Point masses on the given tokens, a sequence a request."""
        lengths = np.fromiter(map(len, drafted), dtype=np.int64, count=len(drafted))
        ids = np.zeros((len(drafted), int(lengths.max(initial=0))), dtype=np.int64)
        for row, tokens in enumerate(drafted):
            ids[row, : len(tokens)] = tokens
        return cls(ids, lengths, None, np.zeros(len(drafted), dtype=bool))


class Draft(Protocol):
    """Guesses how requests go on. It follows them by their tokens alone: a request that was aborted, sent back to the queue or continued with
    other tokens than drafted looks to it like any other. Whether it drafts for a place must not depend on what it draws for that very place.
    """

    name: str
    version: str

    def propose(self, asked: Asked) -> Proposal:
        """Drafts for the requests; call it in inference mode."""
        ...

    def ended(self, request: Request) -> None:
        """Hears that a request has all its tokens and will not be asked for again."""
        ...


@runtime_checkable
class ReadsHidden(Protocol):
    """A draft that reads the policy's hidden states, and so has to be told where they are: it keeps them place by place, as the policy its KV."""

    def placed(self, slot: int, source: int, length: int) -> None:
        """Hears that a request starts in `slot` with the first `length` places of slot `source`, which may be the same one."""
        ...

    def observed(self, step: PackedStep, hidden: Tensor, slots: Ints, starts: Ints, counts: Ints) -> None:
        """Hears the last hidden states [N, H] of a pass over places [start, start + count) of `slots` [R], drafted tokens' among them."""
        ...


@runtime_checkable
class Weighted(Protocol):
    """A draft with weights of its own, which can be exchanged."""

    def stage(self, folder: Path) -> Any:
        """Reads weights of a folder into memory, beside a running step; WeightsError or DraftError if it holds none that fit."""
        ...

    def swap(self, staged: Any, version: str) -> None:
        """Takes what was staged, between two steps."""
        ...


def portions(pending: Ints, chunk: int) -> Ints:
    """How many of `pending` [R] tokens are read of each request in one pass: `chunk` beside one a request; those with few come first."""
    order = np.argsort(pending, kind="stable")
    before = np.cumsum(pending[order]) - pending[order]
    counts = np.zeros_like(pending)
    counts[order] = np.clip(chunk + len(pending) - before, 0, pending[order])
    return counts


def rows_at(rows: RowTransforms, at: Ints) -> RowTransforms:
    """The transforms of some of the rows."""
    return dataclasses.replace(rows, temperature=rows.temperature[at], top_p=rows.top_p[at], top_k=rows.top_k[at], min_p=rows.min_p[at])
