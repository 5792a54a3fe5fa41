"""Which host to read an object from instead of the store, and reading it; owns no object, and trusts no peer for what it says.

Of the hosts that serve a store's chunks, one is the owner of each object: the first by the hash of path and host, so all agree
without a word. The owner reads it from the store once, for all. Whatever goes wrong with a peer, the answer is to read
elsewhere; whether the bytes are those that were written is checked by whoever reads them, peer or store.
"""

from __future__ import annotations

import hashlib
import http.client
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from http import HTTPStatus

from storage.objects.spans import Bytes, total
from storage.peers.connection import PeerConnections, PeerRefused

__all__ = ["Peers"]

log = logging.getLogger(__name__)

ASKED = 2
"""How many peers are asked for an object before the store: the owner, and the next one in case that it is out."""

LEFT_OUT_S = 60.0
"""How long a peer that failed isn't asked: its time-outs are paid once, and one that was restarted is soon of use again."""


class Peers:
    """The chunk servers that this process may read from, by URL; `token` is the run's. Safe to use from any thread.

    `connect_s` bounds a connection's start, `answer_s` each wait for bytes, `left_out_s` how long a failed peer isn't asked.
    """

    def __init__(self, token: str, *, connect_s: float = 2.0, answer_s: float = 15.0, left_out_s: float = LEFT_OUT_S) -> None:
        self._connections = PeerConnections(token, connect_s, answer_s)
        self._left_out_s = left_out_s
        self._urls: tuple[str, ...] = ()
        self._out: dict[str, float] = {}
        self._lock = threading.Lock()
        self._read: Counter[str] = Counter()

    @property
    def urls(self) -> tuple[str, ...]:
        """The servers in use, sorted."""
        return self._urls

    @property
    def read(self) -> dict[str, int]:
        """Bytes read so far from each peer, by URL."""
        with self._lock:
            return dict(self._read)

    @property
    def left_out(self) -> set[str]:
        """The peers that aren't asked just now."""
        with self._lock:
            return {url for url, until in self._out.items() if until > time.monotonic()}

    def use(self, urls: Iterable[str]) -> None:
        """From now on these are the servers, one a host, this host's own among them. One alone is none: the store is as near."""
        found = tuple(sorted(set(urls)))
        with self._lock:
            self._urls = found if len(found) > 1 else ()
            self._out = {url: until for url, until in self._out.items() if url in found}
        self._connections.keep(self._urls)

    def read_into(self, path: str, buffers: Sequence[Bytes], start: int) -> tuple[str, int] | None:
        """Fills `buffers` with the bytes of `path` from `start` on: the peer they came from and the object's size. None if no peer
        has them to give; `buffers` then hold anything."""
        for url in self._ranked(path)[:ASKED]:
            try:
                size = self._connections.read_into(url, path, buffers, start)
            except PeerRefused as refused:
                if refused.status in {HTTPStatus.NOT_FOUND, HTTPStatus.SERVICE_UNAVAILABLE}:
                    log.info("peer %s has no %s to give just now; the store is read", url, path)
                    return None  # the peer is well; what it can't get, another one would not get either
                self.leave_out(url, str(refused))
            except (OSError, http.client.HTTPException) as error:
                self.leave_out(url, f"{type(error).__name__}: {error}")
            else:
                with self._lock:
                    self._read[url] += max(0, min(size - start, total(buffers)))
                return url, size
        return None

    def leave_out(self, url: str, reason: str) -> None:
        """Asks `url` nothing for a while."""
        with self._lock:
            known = self._out.get(url, 0.0) > time.monotonic()
            self._out[url] = time.monotonic() + self._left_out_s
        if not known:
            log.warning("peer %s is left out for %.0f s, others and the store are read instead: %s", url, self._left_out_s, reason)
        self._connections.drop(url)

    def close(self) -> None:
        """Ends all connections."""
        self.use(())

    def _ranked(self, path: str) -> list[str]:
        out = self.left_out
        ranks = {url: hashlib.sha256(f"{path} {url}".encode()).digest() for url in self._urls if url not in out}
        return sorted(ranks, key=ranks.__getitem__)
