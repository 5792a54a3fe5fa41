"""A sandbox for one command, and the check that really makes and uses one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from rollart.sandbox.limits import Level, SandboxError, SandboxLimits, SandboxResult
from rollart.sandbox.machine import machine
from rollart.sandbox.session import Sandbox


async def run_once(
    argv: Sequence[str], files: Mapping[str, bytes] | None = None, *, stdin: bytes = b"", limits: SandboxLimits | None = None,
    environment: Mapping[str, str] | None = None, accept: Level | None = None, packages: bool = False,
) -> SandboxResult:  # fmt: skip
    """One command in a sandbox of its own, with `files` (path to content) in /workspace."""
    async with Sandbox(limits, accept=accept, packages=packages) as sandbox:
        for path, content in (files or {}).items():
            await sandbox.write(path, content)
        return await sandbox.run(argv, stdin=stdin, environment=environment)


async def check(accept: Level | None = None) -> Level:
    """The level of a sandbox that was made and used right now. SandboxMissing, SandboxFailed."""
    result = await run_once(["python3", "-I", "-c", "import os; os.listdir('/proc/self')"], accept=accept)
    if not result.ok:
        raise SandboxError(f"a sandbox was made, but nothing runs in it: {result}")
    return (await asyncio.to_thread(machine, accept)).level
