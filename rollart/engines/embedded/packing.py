"""Turns the slots' state into one packed forward pass. Decides how rows are grouped, not which tokens are due."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from rollart.engines.embedded.attention import PackedStep, QueryGroup, SlotCache

__all__ = ["pack"]

Ints = npt.NDArray[np.int64]

_IDLE_SHARE = 3
"""Keys of decode rows are read in place while the slots they span are at most this many times the rows: measured, a copy costs four."""

_IN_PLACE = 16
"""So many new tokens a row count as decoding: one, and those that were drafted."""

_GROUP_BOUNDS = (1, 16, 64)
"""Rows are grouped by the number of their new tokens at these bounds: decode rows apart, the rest padded little."""


def _ragged(starts: Ints, counts: Ints) -> Ints:
    """Concatenation of arange(start, start + count) for each pair."""
    offsets = np.repeat(np.cumsum(counts) - counts, counts)
    return np.arange(int(counts.sum())) - offsets + np.repeat(starts, counts)


def pack(
    cache: SlotCache,
    tokens: Ints,
    slots: Ints,
    starts: Ints,
    counts: Ints,
    wanted: Ints,
    device: torch.device,
    in_place: bool = True,
) -> PackedStep:
    """One pass over positions [start, start + count) of each slot; of each row's last `wanted` tokens, perhaps none, logits are wanted.

    `tokens` is the table's [slots, max_length]; the other arrays are [R]. Rows are packed in the order given.
    Without `in_place` every row's keys are copied, so that its arithmetic does not depend on where its slot lies.
    """

    def on_device(array: npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    def picked(queries: Ints) -> torch.Tensor | None:
        flat = queries.reshape(-1)
        return None if len(flat) == len(positions) and bool((flat == np.arange(len(flat))).all()) else on_device(flat)

    positions = _ragged(starts, counts)
    owners = np.repeat(slots, counts)
    firsts = np.cumsum(counts) - counts  # where each row begins in the packed sequence
    groups: list[QueryGroup] = []
    restore = np.empty(len(positions), dtype=np.int64)
    kind = np.searchsorted(_GROUP_BOUNDS, counts)
    laid = 0
    for k in np.unique(kind):
        rows = np.flatnonzero(kind == k)
        n, begin, first = counts[rows], starts[rows], firsts[rows]
        chunk = int(n.max())
        low, high = int(slots[rows].min()), int(slots[rows].max()) + 1
        column = np.minimum(np.arange(chunk)[None, :], n[:, None] - 1)  # [R, C], a short row repeats its last token
        if in_place and chunk <= _IN_PLACE and high - low <= _IDLE_SHARE * len(rows):
            at = slots[rows] - low
            query, place = np.full((high - low, chunk), first[0]), np.zeros((high - low, chunk), dtype=np.int64)
            query[at], place[at] = first[:, None] + column, begin[:, None] + column
            groups.append(QueryGroup(slice(low, high), picked(query), on_device(place), int((begin + n).max())))
            restore[_ragged(first, n)] = _ragged(laid + at * chunk, n)
            laid += (high - low) * chunk
            continue
        groups.append(
            QueryGroup(
                slots=on_device(slots[rows]),
                tokens=picked(first[:, None] + column),
                positions=on_device(begin[:, None] + column),
                length=int((begin + n).max()),
            )
        )
        restore[_ragged(first, n)] = _ragged(laid + np.arange(len(rows)) * chunk, n)
        laid += len(rows) * chunk
    in_order = laid == len(restore) and bool((restore == np.arange(laid)).all())
    return PackedStep(
        cache=cache,
        ids=on_device(tokens[owners, positions]).unsqueeze(0),
        positions=on_device(positions).unsqueeze(0),
        owners=on_device(owners),
        groups=groups,
        restore=None if in_order else on_device(restore),
        sampled=on_device(_ragged(firsts + counts - wanted, wanted)),
    )
