"""What a streamed reply of `POST /generate` has told so far, whether its events repeat all tokens or hold new ones alone; reads no connection."""

from __future__ import annotations

import dataclasses
from typing import Any

from rollart.types import GenerateResult, KeptSets, versions_of

__all__ = ["StreamedReply"]

PER_TOKEN = ("output_token_logprobs",)
"""What an event's `meta_info` has an entry of for each token."""


class StreamedReply:
    """The response whose events are taken one after the other.

    The tokens of an event are the last ones of as many as its `completion_tokens` says, all of them or those that no event had before: one
    rule for SGLang with `--incremental-streaming-output` and without, and for the abort of a request that had been sent back to the queue,
    which repeats its last token with the log-probabilities of all. Until the end SGLang tells of one version alone, the one it
    serves at that moment, and the tokens of that event get it; the spans of the last event say it for all.
    """

    def __init__(self) -> None:
        self._so_far: GenerateResult | None = None

    def take(self, event: dict[str, Any]) -> GenerateResult:
        """The response as of this event; ValueError, KeyError or TypeError if that is not of the form or leaves tokens out."""
        meta, ids, before = event["meta_info"], event["output_ids"], self._so_far
        known = 0 if before is None else len(before.ids)
        total = int(meta.get("completion_tokens", len(ids)))
        new = total - known
        if not 0 <= new <= len(ids):
            raise ValueError(f"an event has {len(ids)} tokens up to number {total}, after {known} were known; there must be none between")
        spans = meta.get("weight_versions")
        fresh = {name: values[len(values) - new :] for name in PER_TOKEN if (values := meta.get(name)) is not None}
        if spans:
            fresh["weight_versions"] = [{**s, "start": max(s["start"] - known, 0), "end": max(s["end"] - known, 0)} for s in spans]
        if meta.get("output_kept") is not None and new < len(ids):
            fresh["output_kept"] = KeptSets.from_wire(meta["output_kept"]).last(new).to_wire()
        part = GenerateResult.from_wire({"output_ids": ids[len(ids) - new :], "meta_info": {**meta, **fresh}})
        whole = part if before is None else part.after(before)
        self._so_far = dataclasses.replace(whole, versions=versions_of(spans)) if spans and before is not None else whole
        return self._so_far
