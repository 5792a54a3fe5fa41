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

__all__ = ["ATTENTION", "PackedStep", "QueryGroup", "SlotCache", "attend", "slot_attention"]

ATTENTION = "rollart_slots"
"""The name under which the attention function is registered with transformers."""


_SHARING = 16
"""With so many queries a row, heads that share a key head are computed as one; with more, the kernel is fast enough without, and the mask smaller."""


class SlotCache:
    """Keys and values of `slots` sequences of at most `max_length` tokens, per layer [slots, kv_heads, max_length, head_dim].

    A layer is allocated when it is first written, since only then its heads are known. Memory is reserved, not touched.
    """

    def __init__(self, slots: int, max_length: int) -> None:
        self.slots = slots
        self.max_length = max_length
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._joint: dict[int, Tensor] = {}

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

    def write(self, index: int, owners: Tensor, positions: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
        """The two tensors of layer `index`, with `new` [N, 2, kv_heads, head_dim], keys then values, put at `positions` [N] of slots `owners` [N]."""
        joint = self._joint.get(index)
        if joint is None:
            joint = self._joint[index] = new.new_zeros((2, self.slots, new.shape[2], self.max_length, new.shape[3]))
            self._layers[index] = (joint[0], joint[1])
        joint[:, owners, :, positions] = new
        return self._layers[index]

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
    any), None if they all stand in order; `positions` [R, C] are the queries' places in their sequences.
    """

    slots: Tensor | slice
    tokens: Tensor | None
    positions: Tensor
    length: int
    _masks: dict[int | None, Tensor] = field(default_factory=dict)
    _biases: dict[tuple[int | None, int, torch.dtype], Tensor] = field(default_factory=dict)

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

    def bias(self, window: int | None, shared: int, dtype: torch.dtype) -> Tensor:
        """`mask` as what is added to scores, 0 or -inf [R, 1, C * shared, L], each query standing for `shared` heads."""
        found = self._biases.get((window, shared, dtype))
        if found is None:
            mask = self.mask(window)
            found = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf).repeat_interleave(shared, 2)
            self._biases[window, shared, dtype] = found
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


def _softcapped(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scaling: float, softcap: float) -> Tensor:
    """What scaled_dot_product_attention would be if it capped scores: [R, heads, C, dim] x [R, heads, L, dim] -> [R, heads, C, dim]."""
    scores = softcap * (torch.matmul(query, key.transpose(2, 3)) * (scaling / softcap)).tanh()
    return torch.matmul((scores.float() + bias).softmax(-1).to(value.dtype), value)


def attend(step: PackedStep, keys: Tensor, values: Tensor, query: Tensor, scaling: float | None, softcap: float | None, window: int | None) -> Tensor:
    """Attention of all queries [N, heads, dim] of a step over the layer's `keys` and `values`: [N, heads, dim of a value]."""
    heads, kv_heads = query.shape[1], keys.shape[1]
    shared = heads // kv_heads
    outputs = []
    for group in step.groups:
        rows, chunk = group.positions.shape
        q = query if group.tokens is None else query[group.tokens]
        k = keys[group.slots, :, : group.length]
        v = values[group.slots, :, : group.length]
        if chunk <= _SHARING or softcap is not None:
            # Queries of the heads that share a key head stand in one matrix: the kernel reads each key once, and no key is repeated.
            q = q.view(rows, chunk, kv_heads, shared, q.shape[2]).transpose(1, 2).reshape(rows, kv_heads, chunk * shared, q.shape[2])
            bias = group.bias(window, shared, q.dtype)
            if softcap is not None:
                out = _softcapped(q, k, v, bias, q.shape[3] ** -0.5 if scaling is None else scaling, softcap)
            else:
                out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scaling)
            out = out.view(rows, kv_heads, chunk, shared, v.shape[3]).transpose(1, 2)
        else:
            q = q.view(rows, chunk, heads, q.shape[2]).transpose(1, 2)
            mask = group.mask(window)
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling, enable_gqa=shared > 1).transpose(1, 2)
        outputs.append(out.reshape(rows * chunk, heads, v.shape[3]))
    packed = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return packed if step.restore is None else packed[step.restore]


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
    return attend(step, keys, values, query[0].transpose(0, 1), scaling, softcap, sliding_window).unsqueeze(0), None


AttentionInterface.register(ATTENTION, slot_attention)
