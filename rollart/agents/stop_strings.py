"""Where an answer ends by its request's stop strings, in text and in tokens; samples nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from rollart.kept import KeptSets
from rollart.types import GenerateResult

__all__ = ["cut", "first_tokens"]


def cut(decode: Callable[[int], str], tokens: int, stops: Sequence[str]) -> tuple[int, str | None]:
    """How many tokens an answer has up to the first of `stops`, the one that completes it included, and its text before that.

    `decode` gives the text of the first n of its `tokens` tokens. (tokens, None) if none of `stops` occurs.
    """
    text = decode(tokens)
    found = [(at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    if not found:
        return tokens, None
    at, _ = min(found, key=lambda each: each[0] + len(each[1]))
    low, high = 0, tokens  # the text of `low` tokens lacks it, that of `high` tokens has it
    while high - low > 1:
        middle = (low + high) // 2
        if any(s in decode(middle) for s in stops):
            high = middle
        else:
            low = middle
    return high, text[:at]


def first_tokens(result: GenerateResult, n: int) -> GenerateResult:
    """The response as if it had stopped after `n` tokens."""
    kept = None if result.kept is None else KeptSets(result.kept.ids[: sum(result.kept.counts[:n])], result.kept.counts[:n])
    return replace(result, ids=result.ids[:n], logprobs=result.logprobs[:n], versions=result.versions[:n], finish_reason="stop", kept=kept)
