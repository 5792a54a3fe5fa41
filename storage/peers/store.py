"""An object store whose chunks may come from other hosts; owns that detour only, so that every reader uses it unchanged."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from storage.format import layout
from storage.objects import paths
from storage.objects.spans import Bytes, Seen, total
from storage.objects.store import ObjectStore
from storage.peers.choice import Peers

__all__ = ["PeerStore"]

_PARALLEL = 4
"""Requests at once: a peer is a round trip away even where the store is a disk."""


class PeerStore(ObjectStore):
    """A store with `read_into` of what is under `data/`, which never changes, answered by `peers` first; all else is the store's own.

    A reader that finds wrong bytes calls `doubt` and reads again: that read goes to the store. What travels by pickle is the
    plain store, since peers are those of a process.
    """

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None = None, **how: bool) -> None:
        super().__init__(url, storage_options, **how)
        self._peers: Peers | None = None
        self._prefix = ""
        self._count = _Count()
        self._last = threading.local()

    @classmethod
    def over(cls, store: ObjectStore, peers: Peers) -> PeerStore:
        """The same store, read through `peers`."""
        rebuild, arguments = _recipe(store, cls)
        made: PeerStore = rebuild(*arguments)
        made._peers = peers
        return made

    def __reduce__(self) -> tuple[object, ...]:
        return _recipe(self, ObjectStore)

    @property
    def parallel(self) -> int:
        """How many requests at once pay off on this store."""
        shared = self._peers is not None and self._peers.urls
        return max(super().parallel, _PARALLEL) if shared else super().parallel

    @property
    def bytes_read(self) -> int:
        """Bytes of chunks read from the store itself, here and through all children."""
        return self._count.bytes

    def child(self, prefix: str) -> PeerStore:
        """The store of what is under `prefix`, read through the same peers."""
        child = super().child(prefix)
        if not isinstance(child, PeerStore):
            raise TypeError(f"the child of a {type(self).__name__} is a {type(child).__name__}")
        child._peers, child._prefix, child._count = self._peers, f"{self._prefix}{prefix}/", self._count
        return child

    def read_into(self, path: str, buffer: Bytes | Sequence[Bytes], start: int = 0, seen: Seen | None = None) -> int:
        """See `ObjectStore.read_into`."""
        whole = self._prefix + paths.checked(path)
        if self._peers is None or not whole.startswith(layout.DATA + "/"):
            return super().read_into(path, buffer, start, seen)
        buffers = [buffer] if isinstance(buffer, np.ndarray) else buffer
        last: _Read | None = getattr(self._last, "read", None)
        if last is not None and last.doubted and last.path == path:
            return self._settle(last, self._peers, buffers, start, seen)
        found = self._peers.read_into(whole, buffers, start)
        if found is None:
            return self._from_store(path, buffers, start, seen)
        self._last.read = _Read(path, *found)
        if seen is not None:
            seen(buffers)
        return found[1]

    def doubt(self, path: str) -> bool:
        """See `ObjectStore.doubt`: True if what this thread last read of `path` came from a peer."""
        last: _Read | None = getattr(self._last, "read", None)
        if last is None or last.path != path or last.doubted:
            return super().doubt(path)
        last.doubted = True
        return True

    def _settle(self, doubted: _Read, peers: Peers, buffers: Sequence[Bytes], start: int, seen: Seen | None) -> int:
        """Reads what a peer is doubted for from the store; it is to blame only if the store says something else."""
        said = [buffer.copy() for buffer in buffers]
        end = self._from_store(doubted.path, buffers, start, seen)
        most = start + total(buffers) + 1  # a store may say no more of a longer object than that it goes on
        if min(end, most) != min(doubted.size, most) or not all(map(np.array_equal, said, buffers)):
            peers.leave_out(doubted.peer, f"what it gives for {doubted.path} isn't what the store has")
        return end

    def _from_store(self, path: str, buffers: Sequence[Bytes], start: int, seen: Seen | None) -> int:
        self._last.read = None
        end = super().read_into(path, buffers, start, seen)
        self._count.add(max(0, min(end - start, total(buffers))))
        return end


def _recipe(store: ObjectStore, kind: type[ObjectStore]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """How `store` is opened anew, as pickle has it, as one of `kind`."""
    rebuild, arguments = cast(tuple[Callable[..., Any], tuple[Any, ...]], ObjectStore.__reduce__(store))
    return rebuild, (kind, *arguments[1:])


@dataclass(slots=True)
class _Read:
    """What a thread last read from a peer."""

    path: str
    peer: str
    size: int
    doubted: bool = False


class _Count:
    def __init__(self) -> None:
        self.bytes = 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self.bytes += count
