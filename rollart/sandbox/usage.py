"""What all processes of a sandbox use together, watched from outside for the limits that no kernel counter ends by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import psutil

from rollart.sandbox.cgroups import Group
from rollart.sandbox.limits import Ended, SandboxLimits

EVERY_S = 0.1


def spent(group: Group | None, pid: int) -> float:
    """Seconds of processor time so far; `pid`: process 1."""
    counted = group.cpu_s() if group is not None else None
    return counted if counted is not None else _sum(pid)[0]


async def watch(group: Group | None, pid: int, before: float, limits: SandboxLimits, stop: Callable[[Ended], None]) -> None:
    """Calls `stop` once the sandbox has spent `limits.cpu_s` more than `before`, or, where no group does so, holds over `limits.memory` bytes."""
    while True:
        await asyncio.sleep(EVERY_S)
        counted = group.cpu_s() if group is not None else None
        cpu_s, memory = (counted, 0) if counted is not None else await asyncio.to_thread(_sum, pid)
        if group is None and memory > limits.memory:
            return stop("memory")
        if cpu_s - before > limits.cpu_s:
            return stop("cpu")


def _sum(pid: int) -> tuple[float, int]:
    """Seconds and resident bytes of the children of process 1, those that it has waited for included: everything inside descends from it."""
    cpu_s, memory = 0.0, 0
    try:
        first = psutil.Process(pid)
        times = first.cpu_times()
        cpu_s = times.children_user + times.children_system
        for process in first.children(recursive=True):
            try:
                own = process.cpu_times()
                cpu_s += own.user + own.system
                memory += process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
    except psutil.NoSuchProcess:
        return 0.0, 0
    return cpu_s, memory
