"""The one address outside that a sandbox may be given: connections made inside are handed out and joined to it; nothing else gets out.

The network namespace stays empty. Process 1 listens on the sandbox's own loopback and passes each accepted connection over its channel.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from dataclasses import dataclass

from rollart.sandbox.descriptors import readable

CONNECTIONS = 64
"""Of one sandbox at the same time; further ones wait."""

_CHUNK = 1 << 16

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reach:
    """`port`: on 127.0.0.1 inside. It leads to `target`: a port of this host's 127.0.0.1, or the path of a unix socket."""

    port: int
    target: int | str


async def pass_on(channel: socket.socket, reach: Reach) -> None:
    """Joins what comes out of `channel`, which it closes, to the target, until it is cancelled or the other end is gone."""
    channel.setblocking(False)
    free, joined = asyncio.Semaphore(CONNECTIONS), set[asyncio.Task[None]]()
    try:
        while True:
            await free.acquire()
            await readable(channel.fileno())
            message, fds, _, _ = socket.recv_fds(channel, 16, 4)
            if not message:
                return
            for fd in fds:
                task = asyncio.create_task(_join(socket.socket(fileno=fd), reach))
                joined.add(task)
                task.add_done_callback(joined.discard)
                task.add_done_callback(lambda _: free.release())
    finally:
        for task in joined:
            task.cancel()
        await asyncio.gather(*joined, return_exceptions=True)
        channel.close()


async def _join(inside: socket.socket, reach: Reach) -> None:
    inside.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=inside)
    try:
        if isinstance(reach.target, str):
            there, to_there = await asyncio.open_unix_connection(reach.target)
        else:
            there, to_there = await asyncio.open_connection("127.0.0.1", reach.target)
    except OSError as error:
        log.warning("what a sandbox may reach, %s, does not answer: %s", reach.target, error)
        writer.close()
        return
    try:
        await asyncio.gather(_copy(reader, to_there), _copy(there, writer))
    finally:
        writer.close()
        to_there.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while chunk := await reader.read(_CHUNK):
            writer.write(chunk)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
