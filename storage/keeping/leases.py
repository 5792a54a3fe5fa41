"""Claims on versions that are in use; owns their objects and when they end, by the store's own clock, and deletes no version.

A lease ends `seconds` after its object was last written, as the store's clock tells in listings. No other clock counts for what
is kept; a holder counts only how long it has been since its own last renewal.
"""

from __future__ import annotations

import logging
import math
import time
import uuid
from dataclasses import dataclass
from types import TracebackType

from storage.errors import Damaged, LeaseExpired, StoreError, VersionMissing
from storage.format import layout, records
from storage.keeping.claims import claim
from storage.objects.store import ObjectStore
from storage.version import Version

_log = logging.getLogger(__name__)

SWEPT_AFTER_S = 60.0
"""An ended lease's object stays this much longer, so that a renewal on its way at the very end isn't swept."""

_LONGEST_HOLDER = 200


@dataclass(frozen=True, slots=True)
class Held:
    """A lease as the store shows it; `expires` in seconds since 1970 by the store's clock."""

    path: str
    version: Version
    holder: str
    expires: float


class Lease:
    """`version` stays, with all that its data needs, while this is held: until `release`, the end of the `with`, or `seconds` after the
    last `renew`. A `with` at whose end the store can't be reached ends as it would have, with a line in the log."""

    def __init__(self, store: ObjectStore, version: Version, seconds: float, holder: str) -> None:
        self.version = version
        self.seconds = seconds
        self.holder = holder
        self._store = store
        self._path = layout.lease_path(version, uuid.uuid4().hex)
        self._until = math.inf
        self._claim()

    def renew(self) -> None:
        """Starts the `seconds` anew. LeaseExpired if they had passed; VersionMissing if the version has gone."""
        if time.monotonic() >= self._until:
            self.release()
            raise LeaseExpired(
                f"the lease on version {self.version} of {self._store.url} ended {self.seconds:g} s after it was last renewed; "
                "take a new one, and renew it more often or for longer"
            )
        self._claim()

    def release(self) -> None:
        """Ends the lease now; no error if it has ended."""
        self._store.delete(self._path)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.release()
        except StoreError as failure:  # what the block did is as it is
            _log.warning("the lease on version %s of %s ends by itself after %g s: %s", self.version, self._store.url, self.seconds, failure)

    def _claim(self) -> None:
        until = time.monotonic() + self.seconds
        try:
            claim(self._store, self._path, self.version, {"seconds": self.seconds, "holder": self.holder})
        except VersionMissing:
            self.release()
            raise
        self._until = until


class Leases:
    """The leases on versions of `store`."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def take(self, version: Version, seconds: float, holder: str = "") -> Lease:
        """A lease on `version`, held from now on. VersionMissing if it isn't there; ValueError for a time that isn't above 0."""
        if not (math.isfinite(seconds) and seconds > 0):
            raise ValueError(f"a lease lasts some seconds, got {seconds!r}")
        return Lease(self._store, version, float(seconds), _plain(holder[:_LONGEST_HOLDER]))

    def all(self) -> list[Held]:
        """Every lease with an object in the store, ended ones included. Damaged names the object that is."""
        found = (self._held(info.path, info.modified) for info in self._store.infos(layout.LEASES))
        return [held for held in found if held is not None]

    def sweep(self, now: float) -> list[str]:
        """Removes the objects of leases that ended long before `now`; their paths."""
        ended = [held.path for held in self.all() if held.expires + SWEPT_AFTER_S <= now]
        for path in ended:
            self._store.delete(path)
        return ended

    def _held(self, path: str, modified: float) -> Held | None:
        record = records.read(self._store, path)
        if record is None:  # released between the two looks
            return None
        seconds = record.get("seconds")
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not math.isfinite(seconds):
            raise Damaged(what=path, reason="doesn't say for how long it lasts", url=self._store.url)
        return Held(path, records.version_of(record, path, self._store), str(record.get("holder", ""))[:_LONGEST_HOLDER], modified + seconds)


def _plain(holder: str) -> str:
    """`holder` without what UTF-8 can't spell, as a name from the system may have it: the record couldn't be read back."""
    return holder.encode(errors="backslashreplace").decode()
