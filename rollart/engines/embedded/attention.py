"""Attention over slots: the KV cache, and the attention function by which a transformers model reads and writes it.

A step's tokens are packed without padding into one sequence of N tokens, so that projections and MLPs do no idle work;
only attention itself falls apart into groups of rows with similar query lengths. Knows nothing of requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

__all__ = ["ATTENTION", "PackedStep", "QueryGroup", "SlotCache"]

ATTENTION = "rollart_slots"
"""The name under which the attention function is registered with transformers."""


class SlotCache:
    """Keys and values of `slots` sequences of at most `max_length` tokens, per layer [slots, kv_heads, max_length, head_dim].

    A layer is allocated when it is first written, since only then its heads are known. Memory is reserved, not touched.
    """

    def __init__(self, slots: int, max_length: int) -> None:
        self.slots = slots
        self.max_length = max_length
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The two tensors of layer `index`, with heads, type and device of `key` and `value` [1, kv_heads, N, head_dim]."""
        found = self._layers.get(index)
        if found is None:
            # Zeros, not empty: a masked key still takes part as 0 * value, and NaN from stale memory would survive that.
            found = (
                key.new_zeros((self.slots, key.shape[1], self.max_length, key.shape[3])),
                value.new_zeros((self.slots, value.shape[1], self.max_length, value.shape[3])),
            )
            self._layers[index] = found
        return found

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Gives slot `target` the first `length` positions of slot `source`."""
        for keys, values in self._layers.values():
            keys[target, :, :length] = keys[source, :, :length]
            values[target, :, :length] = values[source, :, :length]


@dataclass(slots=True)
class QueryGroup:
    """R rows with at most C new tokens each, which look at the first L positions of their slots.

    `slots` is [R], or a range of neighbouring slots that is read in place, since copying keys costs more than idle rows;
    `tokens` [R * C] says where each query stands in the packed step (a short row repeats its last token, an idle one has
    any); `positions` [R, C] are the queries' places in their sequences.
    """

    slots: Tensor | slice
    tokens: Tensor
    positions: Tensor
    length: int
    _masks: dict[int | None, Tensor] = field(default_factory=dict)

    def mask(self, window: int | None) -> Tensor:
        """Which keys a query sees, bool [R, 1, C, L]; `window` limits how far back a sliding layer looks."""
        found = self._masks.get(window)
        if found is None:
            keys = torch.arange(self.length, device=self.positions.device)
            queries = self.positions[:, None, :, None]
            found = keys <= queries
            if window is not None:
                found &= keys > queries - window
            self._masks[window] = found
        return found


@dataclass(slots=True)
class PackedStep:
    """One forward pass. `ids` and `positions` are [1, N], `owners` [N] the slot of each token.

    `restore` [N] finds each token in the groups' outputs laid one after the other; `sampled` [S] are the tokens whose logits are wanted.
    """

    cache: SlotCache
    ids: Tensor
    positions: Tensor
    owners: Tensor
    groups: list[QueryGroup]
    restore: Tensor | None
    sampled: Tensor


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None, softcap: float | None) -> Tensor:
    """[R, heads, C, dim] x [R, kv_heads, L, dim] -> [R, heads, C, dim]; `mask` is [R, 1, C, L]."""
    rows, heads, chunk, dim = query.shape
    kv_heads, length = key.shape[1:3]
    if chunk > 1 and softcap is None:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=heads != kv_heads)
    # For one query a row, two batched products are twice as fast as the fused kernel. The queries of the heads that share a
    # key head stand in one matrix, and rows and key heads form one batch, which is a view also where keys are read in place.
    shared = heads // kv_heads
    q = query.reshape(rows * kv_heads, shared * chunk, dim)
    k, v = key.reshape(-1, length, dim), value.reshape(-1, length, value.shape[3])
    scores = torch.bmm(q, k.transpose(1, 2)) * (dim**-0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.float().view(rows, kv_heads * shared, chunk, length).masked_fill_(~mask, -torch.inf)
    weights = scores.softmax(-1).to(value.dtype).view(rows * kv_heads, shared * chunk, length)
    return torch.bmm(weights, v).view(rows, heads, chunk, value.shape[3])


def slot_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sliding_window: int | None = None,
    step: PackedStep | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention function as transformers calls it: `query` [1, heads, N, dim] -> [1, N, heads, dim]."""
    if step is None or s_aux is not None:
        raise NotImplementedError(f"{type(module).__name__} hands over no packed step, or has attention sinks; use SGLang")
    keys, values = step.cache.layer(module.layer_idx, key, value)  # type: ignore[arg-type]
    positions = step.positions[0]
    keys[step.owners, :, positions] = key[0].transpose(0, 1)
    values[step.owners, :, positions] = value[0].transpose(0, 1)
    flat = query[0].transpose(0, 1)  # [N, heads, dim]
    outputs = []
    for group in step.groups:
        rows, chunk = group.positions.shape
        q = flat[group.tokens].view(rows, chunk, *flat.shape[1:]).transpose(1, 2)
        k = keys[group.slots, :, : group.length]
        v = values[group.slots, :, : group.length]
        out = _attend(q, k, v, group.mask(sliding_window), scaling, softcap)
        outputs.append(out.transpose(1, 2).reshape(rows * chunk, out.shape[1], out.shape[3]))
    packed = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    if step.restore is not None:
        packed = packed[step.restore]
    return packed.unsqueeze(0), None


AttentionInterface.register(ATTENTION, slot_attention)
