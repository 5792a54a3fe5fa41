"""Runs one publish after the other, behind the caller's back or before its eyes; owns the thread, and nothing of what is published."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from storage.errors import ForkedStore
from storage.format.commit import Commit
from storage.version import Version


class Publication:
    """A publish, under way or finished."""

    def __init__(self, version: Version, future: Future[Commit]) -> None:
        self.version = version
        self._future = future
        self._process = os.getpid()

    def done(self) -> bool:
        """Whether `result` would return or raise at once."""
        return self._future.done() or os.getpid() != self._process

    def result(self, timeout: float | None = None) -> Version:
        """The version, once it exists.

        VersionTaken if another publisher won, VersionPassed if the lineage has gone on past it, PublishTooLong, StoreUnreachable if
        the store failed, TimeoutError after `timeout` seconds (the publish goes on), ForkedStore in a process that was forked since.
        """
        if not self._future.done():
            _check_process(self._process, f"version {self.version} is being published")
        return self._future.result(timeout).version


class Publisher:
    """One thread for one store: versions are committed in the order in which they were published."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="publish")
        self._process = os.getpid()

    def behind(self, version: Version, write: Callable[[], Commit]) -> Publication:
        """Has `write` run in the thread, after those before it."""
        self.check_process()
        return Publication(version, self._pool.submit(write))

    def before(self, version: Version, write: Callable[[], Commit]) -> Publication:
        """Runs `write` here, once those in the thread have ended; raises what it raises. An interrupt stops it."""
        self.check_process()
        self._pool.submit(int).result()
        future: Future[Commit] = Future()
        future.set_result(write())
        return Publication(version, future)

    def check_process(self) -> None:
        """ForkedStore in a process that was forked since: the thread stayed behind."""
        _check_process(self._process, "this store publishes")


def _check_process(process: int, doing: str) -> None:
    if os.getpid() != process:
        raise ForkedStore(f"{doing} from the process that this one was forked from; open a new store here, or spawn instead of fork")
