"""Which token followed which few tokens, and how often; owns the counts, knows nothing of requests."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["DOUBT", "LEAST", "ORDERS", "NgramIndex"]

ORDERS = (6, 4, 3, 2)
"""How many tokens are looked up, longest first: what followed six equal ones is a better guess than what followed two."""

DOUBT = {6: 0.1, 4: 1.0, 3: 1.0, 2: 1.0}
"""Times that anything else is taken to have been seen as well, by order: what was seen once after two tokens comes again a third of the time, and
after six, more than half of the time; after many more, as in a text that is heard again, nearly always."""

LEAST = 0.3
"""A draft goes on for as long as all of it is so likely to stand, after the scores of SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975). So it is
the longer, the longer a match and the more often seen, and drafts that would be of no use cost nothing. Measured on SmolLM2-135M, sums asked in words
at temperatures of 0.7 and 1, four tokens at most: half as many are drafted or fewer, and four fifths of those that stood still do."""


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

    def continuation(self, tokens: Sequence[int], length: int, least: float = LEAST) -> list[int]:
        """At most `length` tokens that are likely after `tokens`: each the one seen most often after the longest n-gram that is known,
        of several the one seen last. Ends where no n-gram is, and before the token that makes all of them together unlikelier than `least`."""
        tail = list(tokens[-ORDERS[0] :])
        found: list[int] = []
        likely = 1.0
        while len(found) < length:
            token, share = self._likeliest(tail)
            likely *= share
            if share == 0.0 or likely < least:
                break
            found.append(token)
            tail = [*tail[-ORDERS[0] + 1 :], token]
        return found

    def _likeliest(self, tail: list[int]) -> tuple[int, float]:
        """The token, and how likely it is: not at all where no n-gram is known."""
        for order in ORDERS:
            held = self._after.get(hash(tuple(tail[-order:]))) if len(tail) >= order else None
            if isinstance(held, dict):
                token = max(reversed(held), key=held.__getitem__)
                return token, held[token] / (sum(held.values()) + DOUBT[order])
            if held is not None:
                return held, 1 / (1 + DOUBT[order])
        return 0, 0.0


def _pairs(tokens: Sequence[int], start: int) -> list[tuple[int, int]]:
    return [(hash(tuple(tokens[at - order : at])), tokens[at]) for order in ORDERS for at in range(max(start, order), len(tokens))]
