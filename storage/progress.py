"""How long operations tell how far they are; owns the count, draws nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable

Progress = Callable[[int, int], None]
"""Hears the bytes that are done and those there are to do. It may be called from several threads, but by one at a time."""


class Tally:
    """Counts what is done of `total` bytes, in any thread, and tells `progress` each time."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.total = total
        self.done = 0
        self._progress = progress
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        """So many more bytes are done."""
        with self._lock:
            self.done += count
            if self._progress is not None:
                self._progress(self.done, self.total)
