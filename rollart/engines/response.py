"""One response that may come in parts, from one engine after another: what there is of it, and what is left to ask for. Asks nobody itself."""

from __future__ import annotations

import dataclasses

from rollart.types import GenerateRequest, GenerateResult

__all__ = ["STREAM_INTERVAL", "Response"]

STREAM_INTERVAL = 32
"""Tokens between two increments of a streamed response, which are all that the loss of its engine costs."""


class Response:
    """What `whole` is answered with. `heard` takes what a running engine has sampled so far of `left`; `lost` keeps that when the engine is gone or
    has aborted the request, and `left` is then what goes on from there, with the rest of the budget and the same random numbers."""

    def __init__(self, whole: GenerateRequest) -> None:
        self._whole = whole
        self._kept: GenerateResult | None = None
        self._heard: GenerateResult | None = None
        self._losses = 0

    @property
    def left(self) -> GenerateRequest:
        """The request for what is missing, each time under another name: two seconds after a stream has ended, however it did, SGLang aborts
        what then runs under the same."""
        if not self._losses:
            return self._whole
        whole, ids = self._whole, () if self._kept is None else self._kept.ids
        return dataclasses.replace(
            whole, rid=f"{whole.rid}/{self._losses}", input_ids=(*whole.input_ids, *ids), max_new_tokens=whole.max_new_tokens - len(ids)
        )

    @property
    def worth_streaming(self) -> bool:
        """Whether what is missing is to be streamed. Of less than two increments the loss costs no more than asking again."""
        return self.left.max_new_tokens > 2 * STREAM_INTERVAL

    def heard(self, so_far: GenerateResult) -> None:
        """The engine that answers `left` has sampled this so far."""
        self._heard = so_far

    def lost(self, what: GenerateResult | None = None) -> bool:
        """The engine's answer ends with what was heard of it, or with `what`; whether that was anything."""
        self._losses += 1
        part, self._heard = what or self._heard, None
        if part is None or not part.ids:
            return False
        self._kept = self._with(part)
        return True

    @property
    def whole(self) -> GenerateResult | None:
        """The response, if nothing is missing of it: whoever sampled its last token was lost before it could say so."""
        if self._kept is None:
            return None
        if self._kept.ids[-1] in self._whole.stop_token_ids:
            return dataclasses.replace(self._kept, finish_reason="stop")
        return dataclasses.replace(self._kept, finish_reason="length") if len(self._kept.ids) >= self._whole.max_new_tokens else None

    def ended(self, last: GenerateResult) -> GenerateResult:
        """The whole response, of which an engine's last answer is `last`."""
        return self._with(last)

    def _with(self, part: GenerateResult) -> GenerateResult:
        kept = self._kept
        if kept is None:
            return dataclasses.replace(part, rid=self._whole.rid)
        return dataclasses.replace(part.after(kept), rid=kept.rid, service=None)
