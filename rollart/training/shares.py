"""Which rank trains on which trajectories of a batch: the same answer on every rank, from the receipts alone. Reads nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rollart.types import Member, Receipt, Trajectory

__all__ = ["TrajectoryReader", "dealt", "minibatch_of", "shares", "spread"]

TrajectoryReader = Callable[[Sequence[Receipt]], list[Trajectory]]
"""The trajectories that receipts name, in their order; travels by pickle."""


def dealt(numbers: Sequence[int], parts: int) -> dict[int, int]:
    """Number -> which of `parts` minibatches it is in: dealt out in turn, so that each holds a like share of every task."""
    return {number: place % parts for place, number in enumerate(numbers)}


def minibatch_of(members: Sequence[Member], minibatches: int) -> dict[int, int]:
    """Number in the batch's canonical order -> minibatch, of the trajectories that have something to train on."""
    ordered = sorted(members, key=lambda m: m.receipt.attempt)
    return dealt([i for i, m in enumerate(ordered) if m.receipt.sampled], minibatches)


def shares(members: Sequence[Member], ranks: int, minibatches: int) -> list[list[tuple[int, Member]]]:
    """What each of `ranks` ranks trains on: members with their numbers in the batch's canonical order, ascending.

    Each minibatch is spread over all ranks by tokens: the ranks wait for each other at the end of every one.
    """
    ordered = sorted(members, key=lambda m: m.receipt.attempt)
    in_part = minibatch_of(members, minibatches)
    found: list[list[tuple[int, Member]]] = [[] for _ in range(ranks)]
    for part in range(minibatches):
        chosen = [i for i, its in in_part.items() if its == part]
        for rank, places in enumerate(spread([ordered[i].receipt for i in chosen], ranks)):
            found[rank] += [(chosen[p], ordered[chosen[p]]) for p in places]
    found[0] += [(i, m) for i, m in enumerate(ordered) if not m.receipt.sampled]  # nothing to compute, but they count
    return [sorted(share, key=lambda pair: pair[0]) for share in found]


def spread(receipts: Sequence[Receipt], ranks: int) -> list[list[int]]:
    """Places in `receipts` by rank, ascending: the longest first, each to the rank that has the fewest tokens so far, the lowest of equals.

    Graham 1969, Bounds on Multiprocessing Timing Anomalies: at most 4/3 of the best possible. How many trajectories a rank holds is free.
    """
    found: list[list[int]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for place in sorted(range(len(receipts)), key=lambda i: (-receipts[i].tokens, i)):
        rank = min(range(ranks), key=lambda r: (tokens[r], r))
        found[rank].append(place)
        tokens[rank] += receipts[place].tokens
    return [sorted(places) for places in found]
