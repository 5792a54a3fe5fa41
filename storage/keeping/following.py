"""Follows the newest versions of a store as they appear; owns when to look again and when to give up, pulls nothing."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Iterable, Iterator

from storage.errors import StoreUnreachable
from storage.format.commits import versions_in
from storage.keeping.lineages import Lineages, surviving
from storage.objects.store import ObjectStore
from storage.version import Version

_log = logging.getLogger(__name__)

LOOKS = 6
"""So often a store that can't be reached is asked, at most, before the follower gives up."""
LONGEST_PAUSE_S = 30.0


class Follower:
    """What to give next to one that follows `store`; see `WeightStore.follow` for the arguments."""

    def __init__(self, store: ObjectStore, after: Version | None, window: int | None, poll_s: float, timeout: float | None) -> None:
        if window is not None and window < 0:
            raise ValueError(f"window is {window}: write how many steps older than the newest a version may be, or None")
        if not poll_s > 0:
            raise ValueError(f"poll_s is {poll_s}: write how many seconds lie between two looks")
        self._store = store
        self._lineages = Lineages(store)
        self._parents: dict[int, Version | None] = {}
        self._last = after
        self._window = window
        self._poll_s = poll_s
        self._timeout = timeout
        self._failures = 0
        self._since = time.monotonic()

    def look(self) -> Version | None:
        """The next version to give, None if there is nothing new yet. StoreUnreachable once the store was asked LOOKS times in vain."""
        try:
            found = next_version(self._versions(), self._parents, self._last, self._window)
        except StoreUnreachable as error:
            self._failures += 1
            if self._failures >= LOOKS:
                raise
            _log.warning(
                "following %s: look %d of %d failed (%s); looking again in %.3g s", self._store.url, self._failures, LOOKS, error, self.pause
            )
            return None
        self._failures = 0
        if found is not None:
            self._last = found
        return found

    def given(self) -> None:
        """The last version was taken and its user asks for another: the time without a new one counts from here."""
        self._since = time.monotonic()

    @property
    def pause(self) -> float:
        """Seconds until the next look, longer after each failure, and never beyond the end."""
        longer = min(self._poll_s * 2**self._failures, max(LONGEST_PAUSE_S, self._poll_s))
        return longer if self._timeout is None else max(0.0, min(longer, self._since + self._timeout - time.monotonic()))

    @property
    def over(self) -> bool:
        """Whether `timeout` seconds have passed without a new version."""
        return self._timeout is not None and time.monotonic() - self._since >= self._timeout

    def _versions(self) -> list[Version]:
        for number in self._lineages.numbers():
            if number not in self._parents:  # a lineage's record never changes
                self._parents[number] = self._lineages.parent(number)
        return versions_in(self._store)


def next_version(versions: Iterable[Version], parents: dict[int, Version | None], last: Version | None, window: int | None) -> Version | None:
    """The first version after `last` that leads up to the end of the newest lineage and is at most `window` steps older than it."""
    existing = list(versions)
    lineage = max((*parents, *(version.lineage for version in existing)), default=0)
    path = surviving(existing, parents, lineage)
    for version in path:
        if (last is None or version > last) and (window is None or path[-1].step - version.step <= window):
            return version
    return None


def follow(follower: Follower, stop: threading.Event | None) -> Iterator[Version]:
    """Versions as they appear, until `stop` is set or the follower's timeout is over; waits in this thread."""
    stop = threading.Event() if stop is None else stop
    while not stop.is_set():
        found = follower.look()
        if found is not None:
            yield found
            follower.given()
        elif follower.over:
            return
        else:
            stop.wait(follower.pause)


async def follow_async(follower: Follower) -> AsyncIterator[Version]:
    """As `follow`, inside of a running loop, which stays free: looks are made in a thread. Ends by its timeout or by cancellation."""
    while True:
        found = await asyncio.to_thread(follower.look)
        if found is not None:
            yield found
            follower.given()
        elif follower.over:
            return
        else:
            await asyncio.sleep(follower.pause)
