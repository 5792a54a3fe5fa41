"""A host in a process of its own, which serves chunks, and pulls when it is told its peers."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from storage.arrays.packing import byte_view
from storage.objects.store import ObjectStore
from storage.peers.cache import ChunkCache
from storage.peers.choice import Peers
from storage.peers.server import ChunkServer
from storage.peers.store import PeerStore
from storage.weights import WeightStore

PATIENCE_S = 60.0


class Host:
    """The other end of a host's process; `url` is its chunk server's. A `stuck` one names each object it is asked for, and never gives it."""

    def __init__(self, store: str, token: str, stuck: bool = False) -> None:
        # A server that has torch and forks costs a tenth of an interpreter that imports it anew.
        context = get_context("forkserver")
        context.set_forkserver_preload(["storage.weights"])
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, store, token, stuck), daemon=True)
        self.process.start()
        theirs.close()

    @property
    def url(self) -> str:
        if not hasattr(self, "_url"):
            self._url = self.answer()
        return self._url

    def pull(self, peers: list[str]) -> None:
        """Has it pull the newest version; `answer` then gives what it read."""
        self._pipe.send(peers)

    def answer(self) -> Any:
        if not self._pipe.poll(PATIENCE_S):
            raise TimeoutError("the host says nothing")
        return self._pipe.recv()

    def end(self) -> int | None:
        """Ends it in order; its exit code."""
        self._pipe.send(None)
        self.process.join(PATIENCE_S)
        return self.process.exitcode


@contextmanager
def hosts(count: int, store: str, token: str, stuck: bool = False) -> Iterator[list[Host]]:
    """Some hosts, which are killed at the end unless they have ended."""
    started = [Host(store, token, stuck) for _ in range(count)]
    try:
        yield started
    finally:
        for host in started:
            host.process.kill()
            host.process.join(PATIENCE_S)


def serve(pipe: Connection, url: str, token: str, stuck: bool) -> None:
    """The host: says its URL; for each list of peers, the bytes it had from the store as a reader and as a server, and what it pulled."""

    class StuckStore(ObjectStore):
        def read(self, path: str) -> bytes:
            pipe.send(path)
            threading.Event().wait()
            raise AssertionError("nobody sets this event")

    cache = ChunkCache(StuckStore(url) if stuck else ObjectStore(url))
    server = ChunkServer(cache, token, "127.0.0.1")
    peers = Peers(token)
    store = PeerStore.over(ObjectStore(url), peers)
    pipe.send(server.url)
    while (urls := pipe.recv()) is not None:
        peers.use(urls)
        state = WeightStore.over(store).pull()
        digest = hashlib.sha256(b"".join(bytes(byte_view(state[name])) for name in sorted(state))).hexdigest()
        pipe.send({"read": store.bytes_read, "served": cache.downloaded, "peers": sum(peers.read.values()), "sha256": digest})
    server.close()
