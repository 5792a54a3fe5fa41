"""Runs tests against untrusted Python code; owns that code and tests never share a sandbox. What a verdict is worth is the verifier's matter.

The code runs in one sandbox and the test in another. All that passes between them are calls of what the code defines and what these return, as
literals: numbers, text, and lists, tuples, dicts and sets of them. So the code can neither read a test, nor change one, nor end it early, nor
return an object that is equal to everything: what it prints is not read, and what it does to its own process fails the call.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollart.sandbox.limits import SandboxLimits, SandboxResult
from rollart.sandbox.session import Sandbox

Test = str | Mapping[str, str]
"""Python text, which fails by raising, and finds what the code defines under its names; or `{"stdin": ..., "stdout": ...}`: the code is run as a
program, and what it prints has to be that, blanks at line ends and at the end aside."""

_CODE_SIDE = Path(__file__).with_name("code_side.py")
_TEST_SIDE = Path(__file__).with_name("test_side.py")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one test: whether it passed, and why not."""

    passed: bool
    reason: str = ""


async def run_tests(code: str, tests: Sequence[Test], limits: SandboxLimits) -> list[Outcome]:
    """The outcome of each test, every one in processes of its own and within `limits`. SandboxMissing, SandboxError."""
    async with Sandbox(limits) as for_code, Sandbox(limits) as for_tests:
        outcomes = []
        for test in tests:
            if isinstance(test, str):
                outcomes.append(await _called(for_code, for_tests, code, test))
            else:
                outcomes.append(await _printed(for_code, code, test))
            if for_code.closed:
                await for_code.open()
            if for_tests.closed:
                await for_tests.open()
            await for_code.clear()
        return outcomes


async def _called(for_code: Sandbox, for_tests: Sandbox, code: str, test: str) -> Outcome:
    nonce = secrets.token_hex(16)
    asked = json.dumps({"test": test, "nonce": nonce}).encode()
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    both = [
        asyncio.create_task(sandbox.run([], code=side.read_text(encoding="utf-8"), stdin=stdin, passed=[end.detach()]))
        for sandbox, side, stdin, end in zip(
            (for_code, for_tests), (_CODE_SIDE, _TEST_SIDE), (code.encode(errors="replace"), asked), ends, strict=True
        )
    ]
    try:
        served, judged = await asyncio.gather(*both)
    finally:
        for task in both:
            task.cancel()
        await asyncio.gather(*both, return_exceptions=True)
    return _outcome(served, judged, nonce)


def _outcome(served: SandboxResult, judged: SandboxResult, nonce: str) -> Outcome:
    """What the test's side said, which the code can't speak for; without a word from it the test has failed."""
    try:
        said = json.loads(judged.stdout.rpartition(b"\n")[2])
        if judged.ok and said["nonce"] == nonce:
            if said["passed"]:
                return Outcome(True)
            if served.ended in ("exited", "signalled"):
                return Outcome(False, str(said["reason"])[:500])
    except (ValueError, TypeError, KeyError):
        pass
    if served.ended not in ("exited", "signalled"):
        return Outcome(False, f"the code was ended by its limit on {served.ended}")
    return Outcome(False, f"the test was ended ({judged.ended}, status {judged.status})")


async def _printed(sandbox: Sandbox, code: str, test: Mapping[str, str]) -> Outcome:
    await sandbox.write("solution.py", code.encode(errors="replace"))
    result = await sandbox.run(["python3", "-I", "solution.py"], stdin=test["stdin"].encode())
    if not result.ok:
        last = result.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        return Outcome(False, f"the program ended {result.ended} with status {result.status}: {last[:300]}")
    printed = result.stdout.decode(errors="replace")
    same = _lines(printed) == _lines(test["stdout"])
    return Outcome(same, "" if same else f"the program printed {printed[:200]!r}, expected {test['stdout'][:200]!r}")


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]
