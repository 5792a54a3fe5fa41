"""Seeds as functions of what they are for; owns the derivation, draws nothing itself."""

from __future__ import annotations

import hashlib

from rollart.types import Attempt, Episode

_BITS = 31
"""SGLang's `sampling_seed` and gymnasium's seeds both take a non-negative 32-bit integer."""


def derive(run_seed: int, *parts: str | int) -> int:
    """A seed in [0, 2**31) that depends on `run_seed` and every part, by BLAKE2b over their unambiguous spelling."""
    text = "\x1f".join([str(run_seed), *map(str, parts)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> (64 - _BITS)


def environment_seed(run_seed: int, episode: Episode) -> int:
    """The seed that every member and attempt of the episode resets its environment with."""
    return derive(run_seed, "environment", episode.purpose, episode.task, episode.index)


def sampling_seed(run_seed: int, attempt: Attempt, turn: int) -> int:
    """The seed of one response; independent of the attempt's number, so a retry is not a second draw."""
    e = attempt.episode
    return derive(run_seed, "sampling", e.purpose, e.task, e.index, attempt.member, turn)


def request_seed(run_seed: int, attempt: Attempt, prompt: str, draw: int) -> int:
    """The seed of an agent's request: of the `draw`-th answer to the same `prompt` (a digest of its ids), in whatever order requests come."""
    e = attempt.episode
    return derive(run_seed, "request", e.purpose, e.task, e.index, attempt.member, prompt, draw)
