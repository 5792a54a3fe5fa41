"""Publishes versions as changes of the last one; owns the copy of it that this takes, and when a full one is due."""

from __future__ import annotations

import threading
from typing import Any

from storage.arrays.packing import Packed
from storage.deltas.chains import LONGEST_CHAIN
from storage.deltas.changes import Base, as_changes
from storage.errors import VersionMissing
from storage.format.commit import Commit
from storage.format.layout import commit_path
from storage.version import Version
from storage.versions import VersionedStore


class DeltaWriter:
    """Puts versions into `versioned`, at least every `full_every`-th one in full.

    With more than 1, it keeps the values of the last version it put: one state's memory. A full one is also written first of all,
    after a put that failed or was lost to another publisher, for a version that isn't newer or is laid out otherwise (names, types,
    shapes, ties, order), where the last one is gone, and where changes would take more than `changes.WORTH` of the full size.
    """

    def __init__(self, versioned: VersionedStore, full_every: int) -> None:
        if not 1 <= full_every <= LONGEST_CHAIN:
            raise ValueError(f"full_every has to be from 1 to {LONGEST_CHAIN}, got {full_every}")
        self.full_every = full_every
        self._versioned = versioned
        self._base: Base | None = None
        self._lock = threading.Lock()

    @property
    def keeps(self) -> bool:
        """Whether values that are put are kept, so that they have to be in memory of their own."""
        return self.full_every > 1

    def put(self, version: Version, packed: Packed, **described: Any) -> Commit:
        """See `VersionedStore.put`, which gets `described`. One at a time."""
        with self._lock:
            base, self._base = self._base, None  # what is put next may only be changes of what has been committed
            changes = None if base is None else self._changes(version, packed, base)
            try:
                commit = self._versioned.put(version, packed if changes is None else changes, **described)
            except VersionMissing:
                if changes is None:
                    raise
                changes = None  # the base was collected since it was looked for
                commit = self._versioned.put(version, packed, **described)
            if self.keeps:
                self._base = Base(version, packed, 1 if base is None or changes is None else base.depth + 1)
            return commit

    def _changes(self, version: Version, packed: Packed, base: Base) -> Packed | None:
        due = base.depth >= self.full_every
        if due or base.version >= version or not self._versioned.store.exists(commit_path(base.version)):
            return None
        return as_changes(packed, base)
