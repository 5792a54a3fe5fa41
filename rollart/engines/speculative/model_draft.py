"""Drafts of a smaller model with the same vocabulary; owns that model's KV cache and what of it still holds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rollart.engines.embedded.attention import SlotCache
from rollart.engines.embedded.model import PolicyModel
from rollart.engines.embedded.packing import pack
from rollart.engines.embedded.request import Request
from rollart.engines.embedded.sampling import choose, transformed_logprobs, uniforms
from rollart.engines.embedded.slots import MIN_COPY
from rollart.engines.speculative.draft import Asked, DraftError, Ints, Proposal, portions, rows_at
from rollart.engines.speculative.verification import DRAFT_STREAM

__all__ = ["ModelDraft"]


class ModelDraft:
    """Draws from `model` under each request's own transform, one token a pass, for `slots` slots of `max_length` tokens.

    It reads at most `chunk` tokens of new prompts before each proposal; a request that it hasn't read to its end gets no draft yet. What
    it has KV of is found anew each time by comparing tokens, so nobody has to tell it what became of its drafts. That cache is of this
    model's weights and so outlives a swap of the policy's; `swap` is for its own. DraftError if the vocabularies differ in size.
    """

    name = "model"

    def __init__(self, model: PolicyModel, vocabulary: int, slots: int, max_length: int, chunk: int, version: str) -> None:
        if model.vocabulary != vocabulary:
            raise DraftError(f"the draft's vocabulary has {model.vocabulary} tokens and the policy's {vocabulary}; both need the same tokenizer")
        self.model = model
        self.version = version
        self._cache = SlotCache(slots, max_length)
        self._read = np.zeros((slots, max_length), dtype=np.int64)  # the tokens that KV stands for, in the first `_computed` places
        self._computed = np.zeros(slots, dtype=np.int64)
        self._chunk = chunk

    def stage(self, folder: Path) -> dict[str, Tensor]:
        """Reads weights of a folder, as `PolicyModel.stage` does."""
        return self.model.stage(folder)

    def swap(self, staged: dict[str, Tensor], version: str) -> None:
        """Exchanges this model's weights; what was computed with the old ones is dropped."""
        self.model.swap(staged)
        self.version = version
        self._computed[:] = 0

    def ended(self, request: Request) -> None:
        """Nothing to do: a slot's next request is told from this one by its tokens."""

    def propose(self, asked: Asked) -> Proposal:
        """Tokens drawn from q, of which the probabilities are handed over; the likeliest tokens, as point masses, of a greedy request."""
        wanted = np.flatnonzero(asked.limits > 0)
        slots, totals = asked.slots[wanted], asked.totals[wanted]
        lengths = np.zeros(len(asked.slots), dtype=np.int64)
        drawn = asked.rows.temperature > 0.0
        width = int(asked.limits.max(initial=0))
        ids = np.zeros((len(asked.slots), width), dtype=np.int64)
        counts = self._due(asked.tokens, slots, totals)
        complete = self._computed[slots] + counts == totals
        steps: list[Tensor] = []
        for place in range(width):
            logits = self._forward(slots[counts > 0], counts[counts > 0], complete[counts > 0])
            slots, totals, wanted, counts = slots[complete], totals[complete], wanted[complete], counts[complete]
            if logits is None:
                break
            rows = rows_at(asked.rows, wanted)
            logprobs = transformed_logprobs(logits, rows)
            tokens = choose(logits, logprobs, rows, uniforms(asked.seeds[wanted], (totals + place).astype(np.uint64), DRAFT_STREAM)).cpu().numpy()
            ids[wanted, place] = tokens
            lengths[wanted] = place + 1
            if drawn[wanted].any():
                q = logprobs.new_zeros((len(asked.slots), logprobs.shape[1]))
                q[torch.from_numpy(wanted).to(q.device)] = logprobs.exp()
                steps.append(q)
            self._read[slots, totals + place] = tokens
            complete = asked.limits[wanted] > place + 1
            counts = complete.astype(np.int64)
        return Proposal(ids, lengths, torch.stack(steps, 1) if steps else None, drawn & bool(steps))

    def _due(self, tokens: Ints, slots: Ints, totals: Ints) -> Ints:
        """How many tokens of each slot are to be read now, [R], after what is computed of them was found; rows with few come first."""
        for slot, total in zip(slots.tolist(), totals.tolist(), strict=True):
            self._computed[slot] = min(_shared(self._read[slot], tokens[slot], int(self._computed[slot])), total - 1)
            if total - self._computed[slot] > MIN_COPY:
                self._copy(slot, tokens[slot, :total])
            self._read[slot, :total] = tokens[slot, :total]
        pending = totals - self._computed[slots]
        return portions(pending, self._chunk)

    def _copy(self, slot: int, tokens: Ints) -> None:
        """Takes over another slot's KV where that one has read more of these tokens."""
        equal = self._read[:, : len(tokens)] == tokens
        shared = np.minimum(np.where(equal.all(1), len(tokens), equal.argmin(1)), np.minimum(self._computed, len(tokens) - 1))
        source = int(shared.argmax())
        if shared[source] > self._computed[slot] + MIN_COPY:
            self._cache.copy_prefix(source, slot, int(shared[source]))
            self._computed[slot] = shared[source]

    def _forward(self, slots: Ints, counts: Ints, complete: npt.NDArray[np.bool_]) -> Tensor | None:
        """One pass over the next `counts` tokens of `slots`; the logits [S, V] after those that are `complete`, None if there are none."""
        if not len(slots):
            return None
        starts = self._computed[slots]
        logits = self.model.logits(pack(self._cache, self._read, slots, starts, counts, complete.astype(np.int64), self.model.device))
        self._computed[slots] = starts + counts
        return logits if complete.any() else None


def _shared(left: Ints, right: Ints, length: int) -> int:
    """How many of the first `length` are equal from the start."""
    differs = np.flatnonzero(left[:length] != right[:length])
    return int(differs[0]) if len(differs) else length
