"""Descriptors that are handed into a sandbox, and what comes out of one, read within bounds; starts nothing."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Callable

_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


def sealed(content: bytes) -> int:
    """A descriptor of memory that holds `content` and that nobody can change."""
    fd = os.memfd_create("rollart", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


async def readable(fd: int) -> None:
    """Returns once there is something to read, or the end."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_reader(fd, lambda: None if ready.done() else ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_reader(fd)


async def drain(fd: int, into: bytearray, most: int, over: Callable[[], None]) -> None:
    """Reads a pipe to its end into `into`, at most `most` bytes; if there are more it calls `over`, and throws them away."""
    os.set_blocking(fd, False)
    while True:
        await readable(fd)
        try:
            chunk = os.read(fd, 1 << 16)
        except BlockingIOError:
            continue
        if not chunk:
            return
        if len(chunk) > most - len(into):
            over()
        into += chunk[: most - len(into)]
