"""Judges the code in a response by tests that it can't touch; owns which text is code and what the score is, runs nothing itself."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence

from rollart.rewards.protocol import Verdict
from rollart.sandbox.limits import MIB, SandboxLimits
from rollart.sandbox.pool import WAIT_S, waited
from rollart.sandbox.unit_tests import Outcome, Test, run_tests
from rollart.types import Trajectory

LIMITS = SandboxLimits(memory=256 * MIB, disk=16 * MIB, processes=16, wall_s=20.0, cpu_s=5.0)
"""Of each test."""

MOST = 4
"""Responses whose tests run at the same time, in two sandboxes each; further ones wait. With more, what ends a test's clock would be the others."""

_free = asyncio.Semaphore(MOST)
"""Of the event loop that sandboxes live in, which is the only one that waits for it."""

_BLOCK = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)


def code_of(response: str, which: str = "first") -> str:
    """The `first` fenced block of a response, or `all` of them one after the other; without a fence the whole response."""
    blocks = _BLOCK.findall(response)
    if not blocks:
        return response
    return blocks[0] if which == "first" else "\n".join(blocks)


def unit_tests(trajectory: Trajectory) -> Verdict:
    """The share of `info["tests"]` (see `rollart.sandbox.unit_tests.Test`) that the code in `info["action"]` passes; parts `passed` and `tests`.

    `info["blocks"]`: "first" (default) or "all" fenced blocks. KeyError or ValueError if something lacks, SandboxMissing, SandboxError.
    """
    info = trajectory.info
    tests, which = info["tests"], info.get("blocks", "first")
    if not tests or which not in ("first", "all"):
        raise ValueError(f"info['tests'] has to name a test, and info['blocks'] is 'first' or 'all', not {which!r}")
    code = code_of(str(info["action"]), which)
    outcomes = waited(_outcomes(code, tests), WAIT_S + len(tests) * 2 * LIMITS.wall_s)
    passed = sum(outcome.passed for outcome in outcomes)
    failed = [f"test {number}: {outcome.reason}" for number, outcome in enumerate(outcomes) if not outcome.passed]
    return Verdict(passed / len(outcomes), {"passed": passed, "tests": len(outcomes)}, "; ".join(failed[:3]))


async def _outcomes(code: str, tests: Sequence[Test]) -> list[Outcome]:
    async with _free:
        return await run_tests(code, tests, LIMITS)
