"""A TCP proxy in front of an HTTP server that delays each reply, as a store far away does; owns the passing on, no measurement."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from types import TracebackType
from urllib.parse import urlsplit

_HEAD_BYTES = 1 << 20
_PIECE_BYTES = 1 << 18


@dataclass(frozen=True)
class Head:
    """The first line and the headers of a request or a reply, as they came, and how long the body is (None: in chunks)."""

    raw: bytes
    first: str
    length: int | None

    @classmethod
    def of(cls, raw: bytes) -> Head:
        first, *lines = raw.decode("latin-1").rstrip("\r\n").split("\r\n")
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        chunked = "chunked" in headers.get("transfer-encoding", "").lower()
        return cls(raw, first, None if chunked else int(headers.get("content-length", "0")))

    def has(self, header: bytes) -> bool:
        return b"\r\n" + header.lower() in self.raw.lower()


class SlowProxy:
    """`with SlowProxy("http://127.0.0.1:8333", delay=0.025) as proxy:` and then `proxy.url` instead of the server's.

    Each reply is delayed by `delay` seconds after the server gave it; connections are kept and any number go side by side.
    """

    def __init__(self, server_url: str, delay: float = 0.0) -> None:
        parts = urlsplit(server_url)
        if parts.hostname is None or parts.port is None:
            raise ValueError(f"{server_url!r} names no host and port")
        self._server = (parts.hostname, parts.port)
        self.delay = delay
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._tasks: set[asyncio.Task[None]] = set()

    def __enter__(self) -> SlowProxy:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _listen(self) -> None:
        self._listener = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=_HEAD_BYTES)
        self.url = f"http://127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"

    async def _close(self) -> None:
        self._listener.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        client, server = (reader, writer), None
        try:
            server = await asyncio.open_connection(*self._server, limit=_HEAD_BYTES)
            while await self.exchange(client, server):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # either side went away, or the proxy ends: so does this connection
        finally:
            self._tasks.discard(task)
            writer.close()
            if server is not None:
                server[1].close()

    async def exchange(self, client: Stream, server: Stream) -> bool:
        """Passes on one request and its reply; whether the connection can be used again."""
        request = await self.request_head(client)
        if request is None:
            return False
        await self.send_request(request, client, server)
        return await self.send_reply(request, client, server)

    async def request_head(self, client: Stream) -> Head | None:
        """The next request of a client that expects no word before it sends the body; None when it is done."""
        try:
            raw = await client[0].readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return None
        return Head.of(raw)

    async def send_request(self, request: Head, client: Stream, server: Stream) -> None:
        if request.has(b"expect: 100-continue"):
            client[1].write(b"HTTP/1.1 100 Continue\r\n\r\n")
            lines = [line for line in request.raw.split(b"\r\n") if not line.lower().startswith(b"expect:")]
            server[1].write(b"\r\n".join(lines))
        else:
            server[1].write(request.raw)
        await _pass_body(request, client[0], server[1])

    async def send_reply(self, request: Head, client: Stream, server: Stream) -> bool:
        reply = Head.of(await server[0].readuntil(b"\r\n\r\n"))
        await asyncio.sleep(self.delay)
        client[1].write(reply.raw)
        status = reply.first.split()[1]
        if not request.first.startswith("HEAD ") and status not in {"204", "304"}:
            await _pass_body(reply, server[0], client[1])
        await client[1].drain()
        return not reply.has(b"connection: close") and not request.has(b"connection: close")


Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _pass_body(head: Head, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    if head.length is not None:
        left = head.length
        while left:
            piece = await source.read(min(left, _PIECE_BYTES))
            if not piece:
                raise ConnectionResetError("the body ended early")
            target.write(piece)
            await target.drain()
            left -= len(piece)
        return
    while True:
        size = await source.readuntil(b"\r\n")
        count = int(size.split(b";")[0], 16)
        target.write(size + await source.readexactly(count + 2))
        await target.drain()
        if count == 0:
            return
