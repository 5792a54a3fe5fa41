"""Serves the immutable objects of a store to the other hosts of a run; owns the port and who may ask, not what is kept."""

from __future__ import annotations

import hmac
import logging
import re
import socket
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from storage.errors import ObjectMissing, StoreError, UnsafePath
from storage.format import layout
from storage.objects import paths
from storage.peers.cache import ChunkCache

__all__ = ["ChunkServer"]

log = logging.getLogger(__name__)

CONNECTIONS = 256
"""Connections at once, each a thread that mostly waits; a host has as many as its readers send requests at once, a handful."""

IDLE_S = 20.0
"""How long a connection may say nothing, or take nothing of what it asked for."""

WAIT_S = 10.0
"""How long a download from the store may take until the reader is told to see to it itself; less than readers wait for an answer."""

_CLOSE_S = 10.0
_RANGE = re.compile(r"bytes=(\d{1,15})-(\d{1,15})")


class ChunkServer:
    """Answers `GET /data/...` with ranges on a free port of `host`, from construction until `close`.

    Only to those that send `token`, only for plain paths under the data of versions, which never change, and `connections` at most
    at once. The bytes come from `cache`, which this closes too. All threads are daemons: the server ends with its process.
    """

    def __init__(self, cache: ChunkCache, token: str, host: str, *, connections: int = CONNECTIONS) -> None:
        if not token:
            raise ValueError("a chunk server needs a token: without one anybody in reach could read the store through it")
        self.cache = cache
        self._server = _Server((host, 0), cache, token, connections)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, name="chunk-server", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Where it listens, `http://HOST:PORT`."""
        host, port = self._server.server_address[:2]
        return f"http://[{host!s}]:{port}" if ":" in str(host) else f"http://{host!s}:{port}"

    @property
    def served(self) -> int:
        """Bytes of objects sent so far."""
        return self._server.served

    def close(self) -> None:
        """Frees the port, ends all connections, and drops what was kept."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self._server.end_connections()
        self.cache.close()
        if not self._server.wait_until_idle(_CLOSE_S):
            log.warning("a connection of chunk server %s has not ended after %.0f s; it ends with this process", self.url, _CLOSE_S)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], cache: ChunkCache, token: str, connections: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.cache = cache
        self.served = 0
        self._token = token.encode()
        self._most = connections
        self._open: set[socket.socket] = set()
        self._changed = threading.Condition()
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        # (HTTPServer's own asks the DNS for this host's name, which nobody needs and which may take long.)
        socket.socket.bind(self.socket, self.server_address)
        self.server_address = self.socket.getsockname()

    def knows(self, token: str) -> bool:
        return hmac.compare_digest(token.encode(), self._token)

    def count(self, sent: int) -> None:
        with self._changed:
            self.served += sent

    def verify_request(self, request: Any, client_address: Any) -> bool:
        with self._changed:
            if len(self._open) >= self._most:
                log.warning("a chunk server has %d connections, as many as it may; %s is turned away", self._most, client_address)
                return False
            self._open.add(request)
            return True

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        with self._changed:
            self._open.discard(request)
            self._changed.notify_all()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("the connection of %s broke", client_address, exc_info=True)

    def end_connections(self) -> None:
        with self._changed:
            for connection in self._open:
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:  # the other end was faster
                    continue

    def wait_until_idle(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._open, seconds)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    server_version = "rollart-chunks"
    sys_version = ""
    timeout = IDLE_S
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        if scheme != "Bearer" or not self.server.knows(token):
            return self._refuse(HTTPStatus.UNAUTHORIZED)
        try:
            path = paths.checked(self.path.removeprefix("/"))
        except UnsafePath:
            return self._refuse(HTTPStatus.BAD_REQUEST)
        if not path.startswith(layout.DATA + "/"):
            return self._refuse(HTTPStatus.FORBIDDEN)
        wanted = _RANGE.fullmatch(self.headers.get("Range", ""))
        if wanted is None or int(wanted[2]) < int(wanted[1]):
            return self._refuse(HTTPStatus.BAD_REQUEST)
        try:
            data = self.server.cache.get(path, WAIT_S)
        except ObjectMissing:
            return self._answer(HTTPStatus.NOT_FOUND)
        except (StoreError, TimeoutError) as error:
            log.warning("%s can't be read for another host: %s", path, error or f"the store took more than {WAIT_S:.0f} s")
            return self._answer(HTTPStatus.SERVICE_UNAVAILABLE)
        start, end = int(wanted[1]), min(int(wanted[2]) + 1, len(data))
        if start >= len(data):
            return self._answer(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, f"bytes */{len(data)}")
        self._answer(HTTPStatus.PARTIAL_CONTENT, f"bytes {start}-{end - 1}/{len(data)}", memoryview(data)[start:end])

    def _answer(self, status: HTTPStatus, content_range: str = "", body: memoryview | bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if content_range:
            self.send_header("Content-Range", content_range)
        self.end_headers()
        self.server.count(len(body))
        self.wfile.write(body)

    def _refuse(self, status: HTTPStatus) -> None:
        """An answer to somebody who isn't a reader of this run, or is broken: the connection ends with it."""
        log.warning("a chunk server refuses a request of %s: %s", self.client_address[0], status.phrase)
        self.close_connection = True
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.send_header("Connection", "close")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        log.debug("%s: " + format, self.client_address[0], *args)
