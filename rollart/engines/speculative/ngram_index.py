"""Which token followed which few tokens, and how often; owns the counts, knows nothing of requests."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["ORDERS", "NgramIndex"]

ORDERS = (6, 4, 3, 2)
"""How many tokens are looked up, longest first: what followed six equal ones is a better guess than what followed two."""


class NgramIndex:
    """Counts of continuations after the last `ORDERS` tokens. Keys are hashes: two that collide make a worse guess, nothing else."""

    def __init__(self) -> None:
        # Most n-grams are seen with one continuation only: then that token stands there itself, and a dict of counts otherwise.
        self._after: dict[int, int | dict[int, int]] = {}

    def __len__(self) -> int:
        return len(self._after)

    def extend(self, tokens: Sequence[int], start: int) -> None:
        """Counts `tokens[start:]` as continuations of what stands before each."""
        for key, token in _pairs(tokens, start):
            held = self._after.get(key)
            if held is None:
                self._after[key] = token
            elif isinstance(held, dict):
                # Taken out first: the continuation that was seen last stands last.
                held[token] = held.pop(token, 0) + 1
            else:
                self._after[key] = {held: 2} if held == token else {held: 1, token: 1}

    def remove(self, tokens: Sequence[int]) -> None:
        """Takes back what `extend(tokens, 0)` has counted."""
        for key, token in _pairs(tokens, 0):
            held = self._after.get(key)
            if isinstance(held, dict):
                left = held.pop(token) - 1
                if left:
                    held[token] = left
                elif not held:
                    del self._after[key]
            elif held is not None:
                del self._after[key]

    def continuation(self, tokens: Sequence[int], length: int) -> list[int]:
        """At most `length` tokens that are likely after `tokens`: each the one seen most often after the longest n-gram that is known,
        of several the one seen last. Ends where no n-gram is."""
        tail = list(tokens[-ORDERS[0] :])
        found: list[int] = []
        while len(found) < length:
            token = self._likeliest(tail)
            if token is None:
                break
            found.append(token)
            tail = [*tail[-ORDERS[0] + 1 :], token]
        return found

    def _likeliest(self, tail: list[int]) -> int | None:
        for order in ORDERS:
            held = self._after.get(hash(tuple(tail[-order:]))) if len(tail) >= order else None
            if isinstance(held, dict):
                return max(reversed(held), key=held.__getitem__)
            if held is not None:
                return held
        return None


def _pairs(tokens: Sequence[int], start: int) -> list[tuple[int, int]]:
    return [(hash(tuple(tokens[at - order : at])), tokens[at]) for order in ORDERS for at in range(max(start, order), len(tokens))]
