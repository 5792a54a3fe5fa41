"""What a scheduler has beside its model when it speculates: a draft, how long drafts are, and how they fare. Samples nothing itself."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from rollart.control.speculation import AcceptanceWatch, DraftLengths
from rollart.engines.embedded.attention import PackedStep
from rollart.engines.embedded.model import WeightsError
from rollart.engines.embedded.request import Request
from rollart.engines.embedded.slots import SlotTable
from rollart.engines.speculative.draft import Asked, Draft, DraftError, Ints, Proposal, ReadsHidden, Weighted

__all__ = ["SpeculationTally", "Speculator"]

log = logging.getLogger(__name__)


@dataclass(slots=True)
class SpeculationTally:
    """Counts since the start, over requests that may be drafted for: decoding passes, tokens proposed, those that stood."""

    verified: int = 0
    drafted: int = 0
    correct: int = 0


class Speculator:
    """Asks `draft` for at most `length` tokens a request, or for fewer where `lengths` finds those faster; for none where a request wants no
    drafts, and for no more than may still come."""

    def __init__(self, draft: Draft, length: int, lengths: DraftLengths | None = None, watch: AcceptanceWatch | None = None) -> None:
        self.draft = draft
        self._reads = draft if isinstance(draft, ReadsHidden) else None
        self.tally = SpeculationTally()
        self.asked = length
        self._length = length
        self._lengths = lengths
        self._watch = watch or AcceptanceWatch()

    @property
    def loads(self) -> dict[str, Any]:
        """What `/v1/loads` tells of it: totals under the names that SGLang gives them in replies, the length asked for last, and the alarm."""
        t = self.tally
        return {
            "draft": self.draft.name, "draft_version": self.draft.version, "draft_length": self.asked, "spec_verify_ct": t.verified,
            "spec_num_proposed_drafts": t.drafted, "spec_num_correct_drafts": t.correct,
            "spec_accept_length": 1.0 + t.correct / t.verified if t.verified else None, "spec_alarm": self._watch.alarm,
        }  # fmt: skip

    def stage(self, folder: Path) -> Any:
        """Reads the draft's own weights, for `swap`; WeightsError if the folder holds none that fit, or if this draft has none."""
        try:
            return self._weighted().stage(folder)
        except DraftError as error:
            raise WeightsError(str(error)) from error

    def swap(self, staged: Any, version: str | None) -> None:
        """Gives the draft staged weights, between two steps."""
        self._weighted().swap(staged, version or self.draft.version)

    def _weighted(self) -> Weighted:
        if not isinstance(self.draft, Weighted):
            raise WeightsError(f"the {self.draft.name} draft has no weights; leave selector out to load the policy's")
        return self.draft

    @property
    def reads_hidden(self) -> bool:
        """Whether the draft has to be told where the policy's hidden states are."""
        return self._reads is not None

    def placed(self, slot: int, source: int, length: int) -> None:
        """Hears where a request starts from, as `ReadsHidden.placed`."""
        if self._reads is not None:
            self._reads.placed(slot, source, length)

    def observed(self, step: PackedStep, hidden: Tensor, slots: Ints, starts: Ints, counts: Ints) -> None:
        """Hears what a pass has computed, as `ReadsHidden.observed`."""
        if self._reads is not None:
            self._reads.observed(step, hidden, slots, starts, counts)

    def propose(self, table: SlotTable, slots: Ints, decoding: npt.NDArray[np.bool_]) -> Proposal:
        """Drafts for the requests in `slots` [R] that are `decoding`, and writes the tokens behind the known ones in the table."""
        if self._lengths is not None:
            self.asked = self._lengths.length(int(decoding.sum()))
        limits = np.zeros(len(slots), dtype=np.int64)
        requests: list[Request] = []
        for row, (slot, decodes) in enumerate(zip(slots.tolist(), decoding.tolist(), strict=True)):
            request = table.requests[slot]
            if request is None:
                raise RuntimeError(f"slot {slot} is to be drafted for and holds nobody")
            requests.append(request)
            if decodes and request.speculate:
                limits[row] = min(self.asked, request.max_new_tokens - len(request.output_ids) - 1)
        if not limits.any():
            return Proposal.none(len(slots))
        totals = table.total[slots]
        proposal = self.draft.propose(Asked(requests, slots, table.tokens, totals, limits, table.transforms(slots), table.seed[slots]))
        for row in np.flatnonzero(proposal.lengths).tolist():
            n = int(proposal.lengths[row])
            table.tokens[slots[row], totals[row] : totals[row] + n] = proposal.ids[row, :n]
        return proposal

    def verified(self, requests: Sequence[Request], drafted: Ints, correct: Ints, seconds: float | None, version: str) -> None:
        """Hears what became of the drafts of requests that decode, under the policy's `version`, in a step of that many seconds if it tells."""
        for request, proposed, stood in zip(requests, drafted.tolist(), correct.tolist(), strict=True):
            if request.speculate:
                request.verified += 1
                request.drafted += proposed
                request.correct += stood
                self.tally.verified += 1
                self.tally.drafted += proposed
                self.tally.correct += stood
        alarm = self._watch.verified(int(np.count_nonzero(drafted)), int(correct.sum()), self.draft.name, self.draft.version, version)
        if alarm is not None:
            log.warning("%s", alarm)
        if self._lengths is not None and len(requests):
            self._lengths.stepped(len(requests), self.asked, correct.tolist(), seconds)

    def ended(self, request: Request) -> None:
        """Hears that a request has ended, however it did."""
        self.draft.ended(request)
