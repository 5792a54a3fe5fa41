"""Scores an answer inside a sandbox, for reasoning-gym families whose scorer evaluates it or was not read; owns what an answer may be there.

A loop, or more memory than there is, is the policy's doing: 0 with a reason. A scorer that raises by itself, or a sandbox that breaks, is an error.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from typing import Any

from rollart.rewards.protocol import Verdict
from rollart.sandbox.limits import MIB, SandboxError, SandboxLimits
from rollart.sandbox.pool import run_warm

LIMITS = SandboxLimits(memory=1024 * MIB, disk=16 * MIB, processes=4, wall_s=60.0, cpu_s=5.0, output=64 * 1024)

EVALUATED = frozenset({"countdown", "puzzle24", "simple_integration", "intermediate_integration", "polynomial_multiplication"})
"""Families whose scorer runs the answer as Python through sympy's parser. In its process it could put any score in place of the scorer's, so what
is no plain expression never gets there."""

_FUNCTIONS = frozenset({
    "sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan", "acot", "asec", "acsc", "sinh", "cosh", "tanh", "coth", "asinh", "acosh",
    "atanh", "exp", "log", "ln", "sqrt", "cbrt", "Abs", "sign", "erf", "erfi", "Si", "Ci", "Ei", "li", "pi", "oo", "Rational", "Integer",
})  # fmt: skip
_CHARACTERS = re.compile(r"[A-Za-z0-9+\-*/^(), .\n]*")
_ATTRIBUTE = re.compile(r"\.\s*[A-Za-z]|[A-Za-z)]\s*\.")
_WORD = re.compile(r"[A-Za-z][A-Za-z0-9]*")

_CODE = """
import json, sys
import reasoning_gym
asked = json.load(sys.stdin)
scorer = reasoning_gym.create_dataset(asked["family"], **asked["config"])
out, sys.stdout = sys.stdout, sys.stderr
score = float(scorer.score_answer(asked["answer"], asked["entry"]))
out.write(json.dumps({"nonce": asked["nonce"], "score": score}))
out.flush()
"""


def why_no_expression(answer: str) -> str | None:
    """What keeps `answer` from being a plain expression of numbers, one-letter symbols and functions known; None if it is one."""
    if not _CHARACTERS.fullmatch(answer) or _ATTRIBUTE.search(answer):
        return "it has characters that no expression needs"
    words = _WORD.findall(re.sub(r"\d+(\.\d*)?([eE][+-]?\d+)?", " ", answer))
    unknown = sorted({word for word in words if len(word) > 1 and word not in _FUNCTIONS})
    return f"it has unknown words: {', '.join(unknown[:4])}" if unknown else None


def score_in_sandbox(family: str, config: dict[str, Any], entry: dict[str, Any], answer: str) -> Verdict:
    """The library's score of `answer` for `entry`, in [0, 1]; blocks. SandboxMissing where there is no sandbox, SandboxError if it breaks."""
    if family in EVALUATED and (why := why_no_expression(answer)) is not None:
        return Verdict(0.0, reason=f"answered {answer[:200]!r}, which is no expression: {why}")
    nonce = secrets.token_hex(16)
    asked = {"family": family, "config": config, "entry": entry, "answer": answer, "nonce": nonce}
    result = run_warm(_CODE, json.dumps(asked).encode(), limits=LIMITS, preload=("reasoning_gym", "json"), wall_s=LIMITS.wall_s)
    if result.ended == "wall" and result.cpu_s < LIMITS.cpu_s / 2:  # what a text can do to a scorer takes processor time: this machine gave none
        raise SandboxError(f"the scorer of {family!r} was given {result.cpu_s:.1f} s of processor time in {result.seconds:.0f} s")
    if result.ended not in ("exited", "signalled"):
        return Verdict(0.0, reason=f"answered {answer[:200]!r}, whose scoring was ended by its limit on {result.ended}")
    score = _score(result.stdout, nonce) if result.ok else None
    if score is None:
        last = result.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        if last.startswith(("MemoryError", "RecursionError")):
            return Verdict(0.0, reason=f"answered {answer[:200]!r}, whose scoring ended in {last[:200]}")
        raise SandboxError(f"the scorer of {family!r} ended {result.ended} with status {result.status}: {last[:500]}")
    return Verdict(score, reason="" if score >= 1.0 else f"answered {answer[:200]!r}, expected {entry.get('answer')!r}")


def _score(said: bytes, nonce: str) -> float | None:
    """The score that the scorer said; None if that is nothing of the kind."""
    try:
        found = json.loads(said)
        score = float(found["score"]) if found["nonce"] == nonce else math.nan
    except (ValueError, TypeError, KeyError):
        return None
    return score if 0.0 <= score <= 1.0 else None
