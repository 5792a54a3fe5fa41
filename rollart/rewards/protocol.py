"""What a verifier is; owns the protocol and the one error it may end in, knows no verifier."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from rollart.types import Trajectory


@dataclass(frozen=True, slots=True)
class Verdict:
    """A verifier's word on a trajectory: `value`, the `parts` it is made of, and a `reason` where one helps a reader."""

    value: float
    parts: dict[str, float] = field(default_factory=dict)
    reason: str = ""


class Verifier(Protocol):
    """A pure function of the trajectory: the same trajectory always gets the same verdict.

    What the policy did wrong is a low value with a reason; what the verifier itself cannot do is an exception.
    """

    def __call__(self, trajectory: Trajectory) -> Verdict: ...


class VerifierFailed(RuntimeError):
    """A verifier raised or returned no finite number: an error of the machinery, to be retried or dropped, never a score."""
