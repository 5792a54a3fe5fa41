"""What of a run's versions and checkpoints stays; plain data that crosses processes, without torch."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Keeping"]


@dataclass(frozen=True, slots=True)
class Keeping:
    """`checkpoints`: how many of the newest stay, with the versions at their steps; `last`: how many of the newest versions; 0 is all of them.

    `every`: versions whose step is a multiple of it stay too, 0 is none; `window`: so do those at most so many steps older than the
    newest. `grace`: seconds that data stays after its version went.
    """

    checkpoints: int
    last: int
    every: int
    window: int
    grace: float
