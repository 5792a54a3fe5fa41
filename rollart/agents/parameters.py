"""Which parameters of a request go through: those that are the attempt's own business are passed over or refused. Parses no messages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

from rollart.agents.errors import bad_request
from rollart.types import SamplingTransform

__all__ = ["OtherParameters", "look_at"]

OtherParameters = Literal["ignore", "refuse"]
"""What becomes of a parameter that would change what is sampled, or that nobody here knows: ignored and counted, or refused with a 400."""

NEUTRAL = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "include", "truncation",
        "background", "max_tool_calls", "stream_options",
    }
)  # fmt: skip
"""They change nothing that is sampled."""

SAME: dict[str, tuple[Any, ...]] = {
    "n": (1,), "presence_penalty": (0,), "frequency_penalty": (0,), "repetition_penalty": (1,), "logit_bias": ({},),
    "response_format": ({"type": "text"},), "modalities": (["text"],), "text": ({"format": {"type": "text"}}, {}), "top_logprobs": (0,),
    "parallel_tool_calls": (True,), "functions": ([],), "reasoning": ({},), "verbosity": ("medium",),
    "tool_choice": ("auto", "none"),
}  # fmt: skip
"""Values that say what happens anyway."""

NEVER = ("n", "audio", "functions", "prompt", "conversation")
"""They ask for another kind of answer: refused, whatever else is ignored."""


def look_at(
    body: Mapping[str, Any], known: Collection[str], transform: SamplingTransform, others: OtherParameters, count: Callable[[str], None]
) -> None:
    """Passes over what changes nothing; what is left of `body` beside the `known` fields is ignored, and counted by name, or an ApiError."""
    own = {"temperature": transform.temperature, "top_p": transform.top_p, "top_k": transform.top_k, "min_p": transform.min_p}
    for name, value in body.items():
        if name in known or name in NEUTRAL or value is None or any(_equal(value, same) for same in SAME.get(name, ())):
            continue
        if name in own and _equal(value, own[name]):
            continue
        if name in NEVER:
            raise bad_request(f"{name} {str(value)[:80]!r} is not served here", name, "unsupported_parameter")
        if others == "refuse":
            says = f"; here it is {own[name]}" if name in own else ""
            raise bad_request(f"{name} is set by the training run, not by the agent{says}: leave it out", name, "unsupported_parameter")
        count(name[:64])


def _equal(value: Any, other: Any) -> bool:
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)
