"""Sequences laid one after the other in one row without padding, and the attention that keeps them apart.

Projections and feed-forward layers see a row of T tokens and do no idle work; only attention falls apart into groups of
sequences of like length. No T by T mask is ever made. Knows nothing of losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

__all__ = ["ATTENTION", "PackedLayout", "layout_of"]

ATTENTION = "rollart_packed"
"""The name under which the attention function is registered with transformers."""

_LIKE = 0.75
"""Sequences at least this share of a group's longest go into one group: at most a quarter of its attention is idle."""


@dataclass(frozen=True, slots=True)
class Group:
    """R neighbouring sequences of at most L tokens: `tokens` [R * L] says where each query stands in the row (a short sequence repeats its
    last token), None if all have L tokens, so that [start, stop) of the row is the group as it lies."""

    rows: int
    length: int
    start: int
    stop: int
    tokens: Tensor | None


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Where sequences lie in a row of T tokens: `positions` [1, T] count from 0 in each; `restore` [T] finds each token in the groups'
    outputs laid one after the other, None if that is their order anyway."""

    groups: tuple[Group, ...]
    positions: Tensor
    restore: Tensor | None

    def to(self, device: torch.device) -> PackedLayout:
        """The same on `device`."""
        groups = tuple(Group(g.rows, g.length, g.start, g.stop, None if g.tokens is None else g.tokens.to(device)) for g in self.groups)
        return PackedLayout(groups, self.positions.to(device), None if self.restore is None else self.restore.to(device))


def layout_of(lengths: Sequence[int]) -> PackedLayout:
    """The layout of sequences of these lengths, ascending, in this order."""
    starts = [0]
    for n in lengths:
        starts.append(starts[-1] + n)
    cuts: list[list[int]] = []
    for i in range(len(lengths) - 1, -1, -1):  # from the longest down, since it sets the width of its group
        if cuts and lengths[i] >= _LIKE * lengths[cuts[-1][0]]:
            cuts[-1].append(i)
        else:
            cuts.append([i])
    groups, restore, at = [], torch.empty(starts[-1], dtype=torch.long), 0
    for cut in reversed(cuts):
        rows = sorted(cut)
        longest = lengths[rows[-1]]
        base = torch.tensor([starts[i] for i in rows]).unsqueeze(1)  # [R, 1]
        count = torch.tensor([lengths[i] for i in rows]).unsqueeze(1)
        steps = torch.arange(longest).unsqueeze(0)  # [1, L]
        tokens = (base + torch.minimum(steps, count - 1)).flatten()
        real = (steps < count).flatten()
        restore[tokens[real]] = at + real.nonzero().flatten()
        at += len(tokens)
        groups.append(Group(len(rows), longest, starts[rows[0]], starts[rows[-1] + 1], None if bool(real.all()) else tokens))
    positions = torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0)
    whole = at == starts[-1]
    return PackedLayout(tuple(groups), positions, None if whole else restore)


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sliding_window: int | None = None,
    layout: PackedLayout | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention function as transformers calls it: `query` [B, heads, T, dim] -> [B, T, heads, dim].

    Without a layout the rows are sequences with padding on the right. NotImplementedError for what the fused kernel lacks.
    """
    if softcap is not None or s_aux is not None or attention_mask is not None:
        raise NotImplementedError(f"{type(module).__name__} caps its scores, has attention sinks or brings a mask of its own")
    if layout is None:
        return _causal(query, key, value, scaling, sliding_window).transpose(1, 2), None
    flat = [x[0].transpose(0, 1) for x in (query, key, value)]  # [T, heads, dim]
    outputs = []
    for group in layout.groups:
        q, k, v = (_rows(x, group).transpose(1, 2) for x in flat)  # [R, heads, L, dim]
        outputs.append(_causal(q, k, v, scaling, sliding_window).transpose(1, 2).flatten(0, 1))
    packed = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    if layout.restore is not None:
        packed = packed[layout.restore]
    return packed.unsqueeze(0), None


def _rows(values: Tensor, group: Group) -> Tensor:
    chosen = values[group.start : group.stop] if group.tokens is None else values[group.tokens]
    return chosen.view(group.rows, group.length, *values.shape[1:])


def _causal(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
    grouped, length = query.shape[1] != key.shape[1], query.shape[2]
    attend = torch.nn.functional.scaled_dot_product_attention
    if window is None or length <= window:
        return attend(query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)
    places = torch.arange(length, device=query.device)
    ahead = places.unsqueeze(1) - places.unsqueeze(0)  # [L, L]: how far a query is after a key
    return attend(query, key, value, attn_mask=(ahead >= 0) & (ahead < window), scale=scaling, enable_gqa=grouped)


AttentionInterface.register(ATTENTION, packed_attention)
