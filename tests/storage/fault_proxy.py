"""A proxy in front of a store's server that does to single requests what networks and servers do to them, by count and never by time."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

from benchmarks.slow_proxy import Head, SlowProxy, Stream

Fault = Literal[
    "slow down", "server error", "bad gateway", "forbidden", "full",  # answered here, and never passed on
    "reset",  # the connection breaks before the request arrives
    "lost reply",  # the request is carried out, then the connection breaks
    "reset in body", "cut body",  # the reply breaks off in the middle: with an error, or as if it had ended
    "silence",  # no answer, for as long as the client waits
    "stalled upload",  # the request's body isn't even read
]  # fmt: skip

_ANSWERS: dict[str, tuple[int, str, str]] = {
    "slow down": (503, "SlowDown", "Please reduce your request rate."),
    "server error": (500, "InternalError", "We encountered an internal error. Please try again."),
    "bad gateway": (502, "BadGateway", "no server behind"),
    "forbidden": (403, "AccessDenied", "Access Denied"),
    "full": (507, "InsufficientStorage", "no room left"),
}


@dataclass
class Rule:
    """`fault` for the next `left` requests of these methods to paths that hold `part`; `hit` counts them."""

    fault: Fault
    left: float
    methods: tuple[str, ...]
    part: str
    hit: int = field(default=0)


class FaultProxy(SlowProxy):
    """`faults(...)` says what happens to which requests; `requests` lists all that came, as `GET /bucket/key`."""

    def __init__(self, server_url: str) -> None:
        super().__init__(server_url)
        self._lock = threading.Lock()
        self._rules: list[Rule] = []
        self.requests: list[str] = []

    def __enter__(self) -> FaultProxy:
        super().__enter__()
        return self

    def faults(self, fault: Fault, times: float = 1, methods: tuple[str, ...] = (), part: str = "") -> Rule:
        """From now on; `times` may be infinite. Of several rules that match a request the first one counts."""
        rule = Rule(fault, times, methods, part)
        with self._lock:
            self._rules.append(rule)
        return rule

    def heal(self) -> None:
        """No more faults."""
        with self._lock:
            self._rules.clear()

    async def exchange(self, client: Stream, server: Stream) -> bool:
        request = await self.request_head(client)
        if request is None:
            return False
        fault = self._fault(request)
        if fault is None:
            await self.send_request(request, client, server)
            return await self.send_reply(request, client, server)
        if fault == "reset":
            _break(client)
            return False
        if fault == "stalled upload":
            client[1].write(b"HTTP/1.1 100 Continue\r\n\r\n" if request.has(b"expect: 100-continue") else b"")
            await self._forever()
        if fault in _ANSWERS:
            async with _nowhere() as nowhere:
                await self.send_request(request, client, nowhere)
            client[1].write(_answer(*_ANSWERS[fault], head_only=request.first.startswith("HEAD "), xml=not request.has(b"user-agent: python-gcsfs")))
            await client[1].drain()
            return True
        await self.send_request(request, client, server)
        reply = Head.of(await server[0].readuntil(b"\r\n\r\n"))
        if fault == "silence":
            await self._forever()
        if fault == "lost reply":
            _break(client)
            return False
        body = await server[0].read(max(1, (reply.length or 2) // 2))
        client[1].write(reply.raw + body[: max(1, (reply.length or 2) // 2)])
        await client[1].drain()
        if fault == "reset in body":
            _break(client)
        return False

    def _fault(self, request: Head) -> Fault | None:
        method, target, _ = request.first.split(" ", 2)
        with self._lock:
            self.requests.append(f"{method} {target}")
            for rule in self._rules:
                if rule.left > 0 and (not rule.methods or method in rule.methods) and rule.part in target:
                    rule.left -= 1
                    rule.hit += 1
                    return rule.fault
        return None

    @staticmethod
    async def _forever() -> None:
        await asyncio.Event().wait()


@asynccontextmanager
async def _nowhere() -> AsyncIterator[Stream]:
    """A server that takes everything and does nothing."""
    ours, theirs = socket.socketpair()
    with ours:
        stream = await asyncio.open_connection(sock=theirs)
        swallow = asyncio.create_task(_swallow(ours))
        try:
            yield stream
        finally:
            swallow.cancel()
            stream[1].close()


async def _swallow(sock: socket.socket) -> None:
    sock.setblocking(False)
    while await asyncio.get_running_loop().sock_recv(sock, 1 << 18):
        pass


def _break(client: Stream) -> None:
    """Ends a connection with a reset instead of an orderly end."""
    sock = client[1].get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client[1].transport.abort()


def _answer(status: int, code: str, text: str, *, head_only: bool, xml: bool) -> bytes:
    if xml:
        body = f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code><Message>{text}</Message></Error>'.encode()
    else:
        body = json.dumps({"error": {"code": status, "message": text}}).encode()
    kind = "application/xml" if xml else "application/json"
    head = f"HTTP/1.1 {status} {code}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    return head if head_only else head + body
