"""Whole objects of a store in this process's memory, each downloaded once however many ask at once; talks to no peer."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

from storage.errors import StoreError
from storage.objects.store import ObjectStore

CACHE_BYTES = 8 << 30
"""How much a host keeps for the others at most: its share of the last two versions, unless that is more."""


class CacheClosed(StoreError):
    """The cache was closed while, or before, an object was asked for."""


class ChunkCache:
    """Objects of `store` by their path, `limit` bytes at most, the longest unused going first. Safe to use from any thread.

    What is kept is memory of this process alone, so it is gone with the process however that ends.
    """

    def __init__(self, store: ObjectStore, limit: int = CACHE_BYTES) -> None:
        self._store = store
        self._limit = limit
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._coming: dict[str, Future[bytes]] = {}
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(max(store.parallel, 2), thread_name_prefix="chunk-download")
        self._closed = False
        self._bytes = 0
        self._downloaded = 0

    @property
    def kept_bytes(self) -> int:
        """Bytes kept now."""
        return self._bytes

    @property
    def downloaded(self) -> int:
        """Bytes read from the store so far."""
        return self._downloaded

    def get(self, path: str, seconds: float) -> bytes:
        """The whole object; whoever asks while it is on its way waits for that one download, `seconds` at most, then TimeoutError.

        Raises what the store raises, to all who waited; the next one to ask starts again. CacheClosed once this is closed.
        """
        with self._lock:
            if self._closed:
                raise self._gone()
            if path in self._kept:
                self._kept.move_to_end(path)
                return self._kept[path]
            coming = self._coming.get(path)
            if coming is None:
                coming = self._coming[path] = self._pool.submit(self._download, path)
        try:
            return coming.result(seconds)
        except CancelledError as error:
            raise self._gone() from error

    def retain(self, prefixes: Iterable[str]) -> None:
        """Drops objects whose path begins with none of `prefixes`, such as the data of versions that nobody reads any longer."""
        kept = tuple(prefixes)
        with self._lock:
            for path in [p for p in self._kept if not p.startswith(kept)]:
                self._drop(path)

    def close(self) -> None:
        """Drops everything; whoever waits gets CacheClosed, or the object if it is on its way. Returns once no thread is left."""
        with self._lock:
            self._closed = True
        self._pool.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            self._kept.clear()
            self._coming.clear()
            self._bytes = 0

    def _download(self, path: str) -> bytes:
        try:
            data = self._store.read(path)
        except BaseException:
            with self._lock:
                del self._coming[path]
            raise
        with self._lock:
            del self._coming[path]
            self._downloaded += len(data)
            if len(data) <= self._limit:
                while self._bytes + len(data) > self._limit:
                    self._drop(next(iter(self._kept)))
                self._kept[path] = data
                self._bytes += len(data)
        return data

    def _drop(self, path: str) -> None:
        self._bytes -= len(self._kept.pop(path))

    def _gone(self) -> CacheClosed:
        return CacheClosed(f"{self._store.url} is no longer read for other hosts")
