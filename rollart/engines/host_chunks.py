"""One chunk server a host: the first process of the host to ask runs it, the others find it. Chooses no peer and downloads nothing."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterable
from pathlib import Path

from rollart.engines.locks import exclusive, try_exclusive, unlock
from storage.objects.store import ObjectStore
from storage.peers.cache import ChunkCache
from storage.peers.server import ChunkServer

__all__ = ["HostChunks"]


class HostChunks:
    """The server of `store`'s chunks among the processes that share `folder`, for those who know the run's `token`.

    It listens on `address`, this host's own as the other hosts know it. Methods block, and are safe to call from any thread.
    """

    def __init__(self, store: ObjectStore, folder: Path, token: str, address: str) -> None:
        self._store = store
        self._token = token
        self._address = address
        run = hashlib.sha256(token.encode()).hexdigest()[:12]  # another run over the same store has hosts of its own
        self._deciding = folder / f"chunks-{run}.deciding"
        self._serving = folder / f"chunks-{run}.serving"
        self._said = folder / f"chunks-{run}.url"
        self._server: ChunkServer | None = None
        self._lock: int | None = None
        self._one = threading.Lock()

    @property
    def runs_here(self) -> bool:
        """Whether this process runs the host's server."""
        return self._server is not None

    @property
    def downloaded(self) -> int:
        """Bytes that the server has read from the store for all hosts; 0 where another process of the host runs it."""
        server = self._server
        return 0 if server is None else server.cache.downloaded

    @property
    def served(self) -> int:
        """Bytes that the server has sent; 0 where another process of the host runs it."""
        server = self._server
        return 0 if server is None else server.served

    def url(self) -> str:
        """Where this host's server listens; it is started here if none runs, because none did or its process has died."""
        with self._one:
            if self._server is not None:
                return self._server.url
            deciding = exclusive(self._deciding)
            try:
                serving = try_exclusive(self._serving)
                if serving is None:
                    return self._said.read_text()  # written before its writer let go of the decision
                try:
                    self._server = self._start()
                except BaseException:
                    unlock(serving)
                    raise
                self._lock = serving
                return self._server.url
            finally:
                unlock(deciding)

    def retain(self, prefixes: Iterable[str]) -> None:
        """Has the server, if it runs here, drop all objects but those whose path begins with one of `prefixes`."""
        server = self._server
        if server is not None:
            server.cache.retain(prefixes)

    def close(self) -> None:
        """Ends the server if it runs here; the next process of the host that asks starts another."""
        with self._one:
            if self._server is not None:
                self._server.close()
            self._server = None
            if self._lock is not None:
                unlock(self._lock)
            self._lock = None

    def _start(self) -> ChunkServer:
        server = ChunkServer(ChunkCache(self._store), self._token, self._address)
        aside = self._said.with_suffix(f".aside-{os.getpid()}")
        try:
            aside.write_text(server.url)
            aside.replace(self._said)
        except OSError:
            server.close()
            raise
        return server
