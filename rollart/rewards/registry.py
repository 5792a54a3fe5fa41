"""Finds a verifier by name and runs it; owns that a verifier's failure is an error and never a score."""

from __future__ import annotations

import math
import pkgutil

from rollart.rewards.protocol import Verdict, Verifier, VerifierFailed
from rollart.types import Trajectory

NAMES: dict[str, str] = {
    "environment": "rollart.rewards.environment:environment",
    "reasoning": "rollart.rewards.reasoning:reasoning",
}
"""Short name to `module:function`. A verifier of the user's own needs no entry here: its import path is a name too."""


class UnknownVerifier(ValueError):
    """No verifier has that name."""


def resolve(name: str) -> Verifier:
    """The verifier that `name` (a short name, or an import path `module:function`) stands for; UnknownVerifier if there is none."""
    if name not in NAMES and ":" not in name:
        raise UnknownVerifier(f"unknown verifier {name!r}; known are {', '.join(sorted(NAMES))}, and any import path module:function")
    path = NAMES.get(name, name)
    try:
        found = pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise UnknownVerifier(f"verifier {name!r} cannot be imported from {path!r}: {error}") from error
    if not callable(found):
        raise UnknownVerifier(f"{path!r} is no verifier: it cannot be called")
    return found


def verify(name: str, trajectory: Trajectory) -> Verdict:
    """The verdict of verifier `name`; VerifierFailed if it raises or returns anything but a Verdict of a finite value."""
    verifier = resolve(name)
    try:
        verdict = verifier(trajectory)
    except Exception as error:
        raise VerifierFailed(f"verifier {name!r} failed on {trajectory.attempt}: {type(error).__name__}: {error}") from error
    if not isinstance(verdict, Verdict) or not math.isfinite(verdict.value):
        raise VerifierFailed(f"verifier {name!r} returned {verdict!r} for {trajectory.attempt}; a Verdict with a finite value is needed")
    return verdict
