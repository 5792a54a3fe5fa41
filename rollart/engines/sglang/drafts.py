"""How `engine.speculation` is said to an SGLang server, and what it would not sample as the policy does; knows flags, starts nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from rollart.engines.sglang.flags import Flag
from rollart.engines.speculative.settings import DraftKind, SpeculationSettings
from rollart.types import SamplingTransform

__all__ = ["HeadKind", "adaptive_steps", "draft_flags", "lossy_drafts"]

HeadKind = Literal["eagle", "eagle3"]
"""What a draft of kind head is a checkpoint of: EAGLE's read the last hidden states, EAGLE-3's those of three layers."""

DEPTH = 18
"""Of SGLang's n-gram tree: each token of its memory stands in up to so many places."""

BATCHES = {1: (1, 3, 5, 7), 8: (0, 1, 3), 32: (0, 1), 64: (0,)}
"""SGLang's own choice of draft lengths from so many requests on, which `length` cuts short."""


def draft_flags(speculation: SpeculationSettings, head: HeadKind) -> dict[str, Flag]:
    """The flags for these drafts, none where nothing is drafted. A draft is a chain of `length` tokens: with the one that is sampled after them
    a pass verifies `length` + 1.

    A head's tokens are tested against the probabilities that they were drawn with. SGLang has no such test for a model's nor for n-grams:
    there a token of the policy's is drawn at each place, and a draft stands as far as it agrees, which is lossless as well.
    """
    if speculation.draft == "none":
        return {}
    flags: dict[str, Flag] = {"speculative-num-draft-tokens": speculation.length + 1}
    if speculation.draft == "ngram":
        capacity = max(speculation.memory, 1) * DEPTH
        return {"speculative-algorithm": "NGRAM", **flags, "speculative-ngram-max-bfs-breadth": 1, "speculative-ngram-capacity": capacity}
    if speculation.model is None:
        raise ValueError(f"a draft of kind {speculation.draft} needs a folder by the time that its server starts")
    flags |= {
        "speculative-num-steps": speculation.length, "speculative-eagle-topk": 1, "speculative-draft-model-path": str(speculation.model),
        "speculative-draft-load-format": "auto",  # else the policy's, which is random weights
    }  # fmt: skip
    if speculation.draft == "model":
        return {"speculative-algorithm": "STANDALONE", **flags}
    return {"speculative-algorithm": head.upper(), **flags, "speculative-use-rejection-sampling": True}


def adaptive_steps(speculation: SpeculationSettings) -> dict[str, Any] | None:
    """What the file behind `--speculative-adaptive-config` says, by batch size; None where SGLang can't choose, which it can for a head alone."""
    if speculation.draft != "head" or not speculation.adaptive:
        return None
    most = speculation.length
    return {
        str(batch): {"candidate_steps": sorted({min(s, most) for s in steps} | ({most} if batch == 1 else set()))} for batch, steps in BATCHES.items()
    }


def lossy_drafts(draft: DraftKind, device: str, transform: SamplingTransform) -> Iterator[str]:
    """Why such drafts would change what SGLang samples on `device` under `transform`: each a reason and a remedy."""
    if draft == "none":
        return
    if device.partition(":")[0] == "cpu":
        yield "on a CPU SGLang accepts drafts greedily whatever the temperature; set draft to none, or engine.kind to embedded"
    if transform.min_p > 0:
        yield "SGLang verifies drafts without min_p; set draft to none, or evaluate.min_p to 0"
    if transform.top_k > 0 and transform.top_p < 1:
        yield "where SGLang verifies drafts, top_k and top_p cut one after the other otherwise than where it samples; leave one of them out"
