"""Whether a server keeps the condition of a creation (only if absent); owns that it is asked once a process, and what then holds."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

_log = logging.getLogger(__name__)


class Condition:
    """What is known of one place (server, bucket and options) in this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: bool | None = None

    def kept(self, url: str, overwrites: Callable[[], bool]) -> bool:
        """Whether the place keeps conditions. The first caller finds out with `overwrites`; others wait for its answer."""
        with self._lock:
            if self._kept is None:
                self._kept = not overwrites()
                if not self._kept:
                    _log.warning("%s overwrites objects that it was asked only to create: %s", url, RULE)
            return self._kept


RULE = "only one process may ever publish there, since of two neither would learn of the other"

_places: dict[str, Condition] = {}
os.register_at_fork(after_in_child=_places.clear)  # a lock may have been held by a thread that is not in the child


def condition_of(place: str) -> Condition:
    """What is known of `place`."""
    return _places.setdefault(place, Condition())
