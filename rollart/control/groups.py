"""Groups that were admitted and are in no batch yet: their members, the tries at each, and how far they are. State only; the ledger moves it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rollart.control.failures import Cause
from rollart.types import Attempt, Episode, Group, Member, Receipt, Score

MemberState = Literal["running", "scored", "dropped"]


@dataclass(slots=True)
class Try:
    """An attempt that is out: dispatched at `since`, silent until `deadline` at the latest, its first token asked for at `begun`."""

    attempt: Attempt
    since: float
    deadline: float
    begun: float | None = None


@dataclass(slots=True)
class OpenMember:
    """A member of an admitted group. While it runs it has one try out, more with a spare beside it, or none while it rests after a failure.

    `tried`: attempts so far, and the number of the next one; `failures`: how many of them failed, by cause.
    """

    index: int
    tries: list[Try] = field(default_factory=list)
    tried: int = 0
    failures: dict[Cause, int] = field(default_factory=dict)
    state: MemberState = "running"
    receipt: Receipt | None = None
    score: Score | None = None

    def find(self, attempt: Attempt) -> Try | None:
        """The try of that attempt, if it is out."""
        return next((t for t in self.tries if t.attempt == attempt), None)


@dataclass(slots=True)
class OpenGroup:
    """An admitted group. `admitted_at`: the version served then, a lower bound for the version of its first token."""

    episode: Episode
    admitted_at: int
    members: list[OpenMember]

    @property
    def complete(self) -> bool:
        """Whether nothing more is awaited of it."""
        for member in self.members:  # noqa: SIM110 - it is asked of every group at every event, and a generator takes three times as long
            if member.state == "running":
                return False
        return True

    @property
    def survivors(self) -> list[Member]:
        """Its scored members."""
        return [Member(m.receipt, m.score) for m in self.members if m.receipt is not None and m.score is not None]

    @property
    def scored(self) -> Group:
        """What a batch would take of it."""
        return Group(self.episode, tuple(self.survivors))

    @property
    def oldest(self) -> int:
        """The first version of its oldest scored member, or the bound while one is still running."""
        if not self.complete:
            return self.admitted_at
        return min(m.receipt.first_version for m in self.survivors)

    @property
    def spares(self) -> int:
        """Tries that are out beside another one of the same member."""
        return sum(len(m.tries) - 1 for m in self.members if m.tries)
