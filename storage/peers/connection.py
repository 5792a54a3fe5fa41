"""HTTP connections to chunk servers, kept open between requests; owns their time limits, not which server is asked."""

from __future__ import annotations

import http.client
import re
import threading
import time
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from urllib.parse import urlsplit

from storage.objects.spans import Bytes, total

SLOWEST = 4 << 20
"""Bytes a second below which a peer counts as dead, beyond what it may take to begin: a store is faster than that."""

_SPARE = 8
_STALE = (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError)
_CONTENT_RANGE = re.compile(r"bytes (?:(\d{1,15})-(\d{1,15})|\*)/(\d{1,15})")


class PeerRefused(Exception):
    """A chunk server answered a request with an error."""

    def __init__(self, status: int) -> None:
        super().__init__(f"it answered with status {status}")
        self.status = status


class PeerConnections:
    """Connections to any number of servers, for any number of threads; each is used by one at a time."""

    def __init__(self, token: str, connect_s: float, answer_s: float) -> None:
        self._headers = {"Authorization": f"Bearer {token}"}
        self._connect_s, self._answer_s = connect_s, answer_s
        self._spare: dict[str, list[http.client.HTTPConnection]] = {}
        self._lock = threading.Lock()

    def read_into(self, url: str, path: str, buffers: Sequence[Bytes], start: int) -> int:
        """Fills `buffers` with the bytes of `path` from `start` on; the object's size. PeerRefused, OSError or HTTPException."""
        wanted = total(buffers)
        headers = {**self._headers, "Range": f"bytes={start}-{start + max(wanted, 1) - 1}"}
        connection, response = self._ask(url, path, headers)
        try:
            size = _size(response, start, wanted)
            deadline = time.monotonic() + self._answer_s + wanted / SLOWEST
            left = max(0, min(size - start, wanted))
            for buffer in buffers:
                view = buffer.data[:left]
                left -= len(view)
                while len(view):
                    count = response.readinto(view)
                    if not count:
                        raise ConnectionResetError(f"the answer ended {left + len(view)} bytes early")
                    view = view[count:]
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"{wanted} bytes took more than {self._answer_s + wanted / SLOWEST:.0f} s")
            response.read()  # the single byte of an empty read, so that the connection is at its next request
        except PeerRefused:
            self._put_back(url, connection, response)
            raise
        except BaseException:
            connection.close()
            raise
        self._put_back(url, connection, response)
        return size

    def keep(self, urls: Iterable[str]) -> None:
        """Ends the spare connections to all others."""
        for url in set(self._spare) - set(urls):
            self.drop(url)

    def drop(self, url: str) -> None:
        """Ends the spare connections to `url`."""
        with self._lock:
            spare = self._spare.pop(url, [])
        for connection in spare:
            connection.close()

    def _ask(self, url: str, path: str, headers: dict[str, str]) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        while True:
            with self._lock:
                spare = self._spare.get(url)
                connection = spare.pop() if spare else None
            fresh = connection is None
            if connection is None:
                connection = self._connect(url)
            try:
                connection.request("GET", f"/{path}", headers=headers)
                return connection, connection.getresponse()
            except BaseException as error:
                connection.close()
                # A server ends connections that said nothing for long; those are used up one by one, then a new one decides.
                if fresh or not isinstance(error, _STALE):
                    raise

    def _connect(self, url: str) -> http.client.HTTPConnection:
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None:
            raise OSError(f"{url} is no chunk server's address")
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=self._connect_s)
        try:
            connection.connect()
            connection.sock.settimeout(self._answer_s)
        except BaseException:
            connection.close()
            raise
        return connection

    def _put_back(self, url: str, connection: http.client.HTTPConnection, response: http.client.HTTPResponse) -> None:
        with self._lock:
            spare = self._spare.setdefault(url, [])
            if response.isclosed() and connection.sock is not None and len(spare) < _SPARE:
                spare.append(connection)
                return
        connection.close()


def _size(response: http.client.HTTPResponse, start: int, wanted: int) -> int:
    """The object's size, from the headers of an answer that fits the request. PeerRefused, HTTPException."""
    if response.status not in {HTTPStatus.PARTIAL_CONTENT, HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE}:
        if response.length != 0:  # nor is a body read whose length nobody gave
            raise http.client.HTTPException(f"it answered with status {response.status} and more than it should say")
        response.read()
        raise PeerRefused(response.status)
    said = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
    size = -1 if said is None else int(said[3])
    count = max(0, min(size - start, max(wanted, 1)))
    if said is None or response.length != count or (count and said.groups()[:2] != (str(start), str(start + count - 1))):
        raise http.client.HTTPException("its answer has another range or length than was asked for")
    return size
