"""Finds a verifier by name and runs it; owns that a verifier's failure is an error and never a score."""

from __future__ import annotations

import inspect
import math
import pkgutil

from rollart.environments.reasoning import SAFE_FAMILIES
from rollart.import_paths import why_not_imported
from rollart.rewards.protocol import Verdict, Verifier, VerifierFailed
from rollart.types import Trajectory

NAMES: dict[str, str] = {
    "environment": "rollart.rewards.environment:environment",
    "math": "rollart.rewards.mathematics:mathematics",
    "reasoning": "rollart.rewards.reasoning:reasoning",
    "unit_tests": "rollart.rewards.unit_tests:unit_tests",
}
"""Short name to `module:function`. A verifier of the user's own needs no entry here: its import path is a name too."""

LIGHT = frozenset({"environment", "reasoning"})
"""Verifiers known to take well under a millisecond and to evaluate nothing of what a model wrote: a worker's event loop may call them.
`reasoning` only for a family whose scorer is one of these (`is_light`)."""


class UnknownVerifier(ValueError):
    """No verifier has that name."""


def why_unknown(name: str) -> str | None:
    """Why `name` can't be a verifier's, in words; None if it may be. Imports nothing."""
    if name in NAMES or ":" in name:
        return None
    return f"unknown verifier {name!r}; known are {', '.join(sorted(NAMES))}, and any import path module:function"


def is_light(name: str, trajectory: Trajectory) -> bool:
    """Whether a worker's event loop may call the verifier for this trajectory: a family that is scored in a sandbox needs a thread to wait in."""
    return name in LIGHT and (name != "reasoning" or trajectory.info.get("family", "") in SAFE_FAMILIES)


def resolve(name: str) -> Verifier:
    """The verifier that `name` (a short name, or an import path `module:function`) stands for; UnknownVerifier if there is none."""
    if (unknown := why_unknown(name)) is not None:
        raise UnknownVerifier(unknown)
    path = NAMES.get(name, name)
    try:
        found = pkgutil.resolve_name(path)
    except (Exception, SystemExit) as error:  # importing runs a user's module, which may end in anything
        raise UnknownVerifier(f"verifier {name!r} cannot be imported from {path!r}: {why_not_imported(path, error)}") from error
    if not callable(found):
        raise UnknownVerifier(f"{path!r} is no verifier: it cannot be called")
    if inspect.iscoroutinefunction(found):
        raise UnknownVerifier(f"{path!r} is no verifier: it is a coroutine function; make it a plain one, which has a thread of its own to wait in")
    return found


def verify(name: str, trajectory: Trajectory) -> Verdict:
    """The verdict of verifier `name`, of plain numbers and text; VerifierFailed if it raises or returns anything but a Verdict of finite ones."""
    verifier = resolve(name)
    try:
        verdict = verifier(trajectory)
    except BaseException as error:  # code of others, which may exit, or panic in Rust: that would end the worker
        raise VerifierFailed(f"verifier {name!r} failed on {trajectory.attempt}: {type(error).__name__}: {error}") from error
    plain = _plain(verdict) if isinstance(verdict, Verdict) else None
    if plain is None:
        raise VerifierFailed(
            f"verifier {name!r} returned {verdict!r} for {trajectory.attempt}; a Verdict with a finite value, finite parts and a text is needed"
        )
    return plain


def _plain(verdict: Verdict) -> Verdict | None:
    """The verdict in Python's own numbers and text that has an encoding, since it goes into JSON and Parquet; None if it has no such form."""
    try:
        value, parts = float(verdict.value), {str(name): float(part) for name, part in verdict.parts.items()}
    except (TypeError, ValueError, OverflowError, AttributeError, RuntimeError):  # RuntimeError: a tensor of several values
        return None
    if isinstance(verdict.value, str) or not isinstance(verdict.reason, str) or not all(map(math.isfinite, (value, *parts.values()))):
        return None
    return Verdict(value, parts, verdict.reason.encode(errors="backslashreplace").decode())
