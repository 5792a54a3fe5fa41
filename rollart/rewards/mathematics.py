"""Whether a response ends in the right mathematical answer; owns the cheap comparisons and the processes that make the dear ones."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from fractions import Fraction
from pathlib import Path

from rollart.rewards.protocol import Verdict
from rollart.sandbox.pool import waited
from rollart.types import Trajectory

LIMIT_S = 30.0
"""How long a comparison may take, its process's start aside; math-verify gives itself 5 s for each of its steps."""

START_S = 120.0

MOST = 2
"""Processes at the same time."""

_CHILD = Path(__file__).with_name("math_child.py")
_NUMBER = re.compile(r"[+-]?\d{1,200}(?:\.\d{1,200})?(?:/\d{1,200})?")


class MathProcessFailed(RuntimeError):
    """The process that compares could not be started, or broke: the machine's doing."""


def mathematics(trajectory: Trajectory) -> Verdict:
    """1 if the answer equals `info["expected"]`, as text, as a number, or as math-verify sees it; else 0. Blocks.

    The answer is `info["answer"]` if it is there, else what math-verify finds in `info["action"]` (a boxed one, or the last). KeyError if one
    lacks, MathProcessFailed if no comparison can be made. What takes over `LIMIT_S` seconds to compare is a wrong answer.
    """
    info = trajectory.info
    expected, given = str(info["expected"]).strip(), str(info["answer"] if "answer" in info else info["action"]).strip()
    if cheap := _cheap(expected, given):
        return cheap
    equal = waited(_compared(expected, given), 2 * START_S + LIMIT_S)
    if equal is None:
        return Verdict(0.0, reason=f"answered {given[-200:]!r}, whose comparison was ended after {LIMIT_S:g} s")
    return Verdict(float(equal), reason="" if equal else f"answered {given[-200:]!r}, expected {expected!r}")


def _cheap(expected: str, given: str) -> Verdict | None:
    """What needs no library; None if it does."""
    if expected == given:
        return Verdict(1.0)
    values = [_number(text) for text in (expected, given)]
    if None in values:
        return None
    equal = values[0] == values[1]
    return Verdict(float(equal), reason="" if equal else f"answered {given!r}, expected {expected!r}")


def _number(text: str) -> Fraction | None:
    plain = text.replace(",", "").replace("$", "").strip()
    if not _NUMBER.fullmatch(plain):
        return None
    numerator, _, denominator = plain.partition("/")
    divisor = int(denominator or 1)
    return Fraction(numerator) / divisor if divisor else None


class _Children:
    """The processes, each for one comparison at a time; they live in the event loop of `waited`."""

    def __init__(self) -> None:
        self.idle: list[asyncio.subprocess.Process] = []
        self.free = asyncio.Semaphore(MOST)

    async def started(self) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        child = await asyncio.create_subprocess_exec(sys.executable, "-I", str(_CHILD), stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.DEVNULL)
        try:
            if await self.ask(child, "1", "1", START_S) is not True:
                raise MathProcessFailed("math-verify does not find 1 equal to 1: `pip install 'rollart[math]'`")
        except BaseException:
            await _ended(child)
            raise
        return child

    async def ask(self, child: asyncio.subprocess.Process, expected: str, given: str, within_s: float) -> bool | None:
        """Whether they are equal; None if that took too long, and the process is ended then."""
        if child.stdin is None or child.stdout is None:
            raise MathProcessFailed("a process without pipes")
        child.stdin.write(json.dumps({"expected": expected, "given": given}).encode() + b"\n")
        try:
            async with asyncio.timeout(within_s):
                said = await child.stdout.readline()
        except TimeoutError:
            await _ended(child)
            return None
        if not said:
            raise MathProcessFailed("the process that compares ended: is math-verify installed? (`pip install 'rollart[math]'`)")
        return bool(json.loads(said)["equal"])


_children: list[_Children] = []
"""At most one: it is made in the event loop that it lives in."""


async def _compared(expected: str, given: str) -> bool | None:
    if not _children:
        _children.append(_Children())
    children = _children[0]
    async with children.free:
        child = children.idle.pop() if children.idle else await children.started()
        try:
            equal = await children.ask(child, expected, given, LIMIT_S)
        except BaseException:
            await _ended(child)
            raise
        if child.returncode is None and equal is not None:
            children.idle.append(child)
        return equal


async def _ended(child: asyncio.subprocess.Process) -> None:
    if child.returncode is None:
        child.kill()
        await child.wait()
