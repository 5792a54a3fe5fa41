"""Drafts of a head on the policy's hidden states; owns those, the head's KV cache, and what of both still holds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rollart.drafts.folder import load_head
from rollart.drafts.head import DraftHead
from rollart.engines.embedded.attention import PackedStep, SlotCache, slot_attention
from rollart.engines.embedded.model import PolicyModel
from rollart.engines.embedded.packing import pack
from rollart.engines.embedded.sampling import choose, transformed_logprobs, uniforms
from rollart.engines.speculative.draft import Asked, Ints, Proposal, portions, rows_at
from rollart.engines.speculative.verification import DRAFT_STREAM

__all__ = ["HeadDraft"]


class _Layer(torch.nn.Module):
    """What the attention function asks for its layer's number."""

    layer_idx = 0


_LAYER = _Layer()


class HeadDraft:
    """Draws from a `DraftHead` on `policy` under each request's own transform, one token a pass, for `slots` slots of `max_length` tokens.

    It keeps the hidden states of all places of which the policy has KV: the scheduler hands them over after each pass, and says which prefix a
    request starts from. The head's own entry at place t stands for (h_t, x_{t+1}), so it is one place behind; what it hasn't read yet it
    reads when it is asked, at most `chunk` places at once, and a request of which it hasn't read all, or of which a hidden state was never
    handed over, gets no draft. Entries of drafted tokens stand for features in place of hidden states, and are written anew when those come.
    Without a head (None) it drafts nothing until it is given one. DraftError if the head is for another policy.
    """

    name = "head"

    def __init__(self, policy: PolicyModel, slots: int, max_length: int, chunk: int, head: DraftHead | None = None, version: str = "none") -> None:
        self._policy = policy
        self._head = head
        if head is not None:
            head.config.refuse_misfit(policy.config)
        self.version = version
        self._cache = SlotCache(slots, max_length)
        # Never read where `_known` doesn't say that it was written; so it takes no memory before.
        self._hidden = torch.empty((slots, max_length, int(policy.config.hidden_size)), dtype=policy.dtype, device=policy.device)
        self._known = np.zeros(slots, dtype=np.int64)  # the first places of each slot whose hidden states are here
        self._read = np.zeros(slots, dtype=np.int64)  # the first places of each slot of which the head has entries
        self._chunk = chunk

    def stage(self, folder: Path) -> DraftHead:
        """Reads a head of a folder into memory, of the present one's sizes if the folder doesn't say; safe beside a running step. DraftError."""
        head = load_head(folder, self._policy.dtype, self._policy.device, None if self._head is None else self._head.config)
        head.config.refuse_misfit(self._policy.config)
        return head

    def swap(self, staged: DraftHead, version: str) -> None:
        """Takes another head. Its entries are computed anew from the hidden states, which are the policy's and stay."""
        if self._head is None or self._head.config != staged.config:
            self._cache = SlotCache(self._cache.slots, self._cache.max_length)
        self._head, self.version = staged, version
        self._read[:] = 0

    def placed(self, slot: int, source: int, length: int) -> None:
        """Hears that a request starts in `slot` from the first `length` places of `source`, perhaps the same, perhaps none."""
        known = min(int(self._known[source]), length)
        # The entry at the last place stands for the token after the prefix too, which may be another one now.
        read = min(int(self._read[source]), max(length - 1, 0))
        if source != slot:
            self._hidden[slot, :known] = self._hidden[source, :known]
            self._cache.copy_prefix(source, slot, read)
        self._known[slot], self._read[slot] = known, read

    def observed(self, step: PackedStep, hidden: Tensor, slots: Ints, starts: Ints, counts: Ints) -> None:
        """Takes the policy's hidden states [N, H] of a pass over places [start, start + count) of `slots` [R]; no entry from there on holds any
        longer."""
        self._hidden[step.owners, step.positions[0]] = hidden
        follows = self._known[slots] >= starts  # elsewhere there is a gap, since the places before it were never handed over
        self._known[slots] = np.where(follows, starts + counts, self._known[slots])
        self._read[slots] = np.minimum(self._read[slots], starts)

    def ended(self, request: object) -> None:
        """Nothing to do: a slot's next request says what it starts from."""

    @property
    def state(self) -> tuple[Ints, Ints]:
        """Of each slot, how many places have hidden states and how many the head has read."""
        return self._known.copy(), self._read.copy()

    def propose(self, asked: Asked) -> Proposal:
        """Tokens drawn from q, of which the probabilities are handed over; the likeliest tokens, as point masses, of a greedy request."""
        head, requests = self._head, len(asked.slots)
        if head is None:
            return Proposal.none(requests)
        # The last known token's hidden state is not there yet, nor needed: the entry before it tells what may follow it.
        wanted = np.flatnonzero((asked.limits > 0) & (asked.totals > 1) & (self._known[asked.slots] >= asked.totals - 1))
        drawn = asked.rows.temperature > 0.0
        ids = np.zeros((requests, int(asked.limits.max(initial=0))), dtype=np.int64)
        lengths = np.zeros(requests, dtype=np.int64)
        steps: list[Tensor] = []
        wanted, features = self._catch_up(head, asked, wanted)
        for place in range(ids.shape[1]):
            if not len(wanted):
                break
            logits, rows = head.logits(features), rows_at(asked.rows, wanted)
            logprobs = transformed_logprobs(logits, rows)
            at = (asked.totals[wanted] + place).astype(np.uint64)
            tokens = head.kept[choose(logits, logprobs, rows, uniforms(asked.seeds[wanted], at, DRAFT_STREAM))]
            ids[wanted, place] = tokens.cpu().numpy()
            lengths[wanted] = place + 1
            if drawn[wanted].any():
                q = logprobs.new_zeros((requests, self._policy.vocabulary))
                q[torch.from_numpy(wanted).to(q.device).unsqueeze(1), head.kept] = logprobs.exp()
                steps.append(q)
            goes_on = np.flatnonzero(asked.limits[wanted] > place + 1)
            if len(goes_on) < len(wanted):
                on_device = torch.from_numpy(goes_on).to(features.device)
                wanted, features, tokens = wanted[goes_on], features[on_device], tokens[on_device]
            if len(wanted):
                step = self._packed(asked, wanted, asked.totals[wanted] - 1 + place, np.ones_like(wanted))
                features = self._features(head, step, features, tokens)
        return Proposal(ids, lengths, torch.stack(steps, 1) if steps else None, drawn & bool(steps))

    def _catch_up(self, head: DraftHead, asked: Asked, wanted: Ints) -> tuple[Ints, Tensor]:
        """Reads what is known of the requests `wanted`; those that are read to their end, and their features [S, H]."""
        slots, ends = asked.slots[wanted], asked.totals[wanted] - 1
        self._read[slots] = np.minimum(self._read[slots], ends - 1)  # a feature is needed of the last one
        counts = portions(ends - self._read[slots], self._chunk)
        due = counts > 0
        wanted, slots, ends, counts = wanted[due], slots[due], ends[due], counts[due]
        if not len(wanted):
            return wanted, self._hidden[:0, 0]
        step = self._packed(asked, wanted, self._read[slots], counts)
        features = self._features(head, step, self._hidden[step.owners, step.positions[0]], step.ids[0])
        self._read[slots] += counts
        complete = np.flatnonzero(self._read[slots] == ends)
        last = np.cumsum(counts)[complete] - 1
        return wanted[complete], features[torch.from_numpy(last).to(features.device)]

    def _packed(self, asked: Asked, wanted: Ints, starts: Ints, counts: Ints) -> PackedStep:
        """One pass over entries [start, start + count) of each request; its ids are those of the tokens after each place."""
        none = np.zeros_like(counts)
        return pack(self._cache, asked.tokens[:, 1:], asked.slots[wanted], starts, counts, none, self._policy.device)

    def _features(self, head: DraftHead, step: PackedStep, hidden: Tensor, ids: Tensor) -> Tensor:
        """The head's features [N, H] of a packed step, from hidden states (or features in their place) [N, H] and the ids [N] after them."""

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return slot_attention(_LAYER, query, key, value, None, step=step)[0].transpose(1, 2)

        features: Tensor = head(hidden.unsqueeze(0), self._policy.embed(ids).unsqueeze(0), step.positions, attend)
        return features[0]
