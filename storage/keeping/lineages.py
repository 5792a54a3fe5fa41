"""Which lineages a store has and where each one branched off; owns their records and the rule of what is newest."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

from storage.errors import Damaged, StoreError, VersionMissing
from storage.format import layout, records
from storage.objects.store import ObjectStore
from storage.version import Version

_OPEN_ATTEMPTS = 64
"""Each lost race means that another one opened a lineage; so many at once are a mistake, not contention."""


class Lineages:
    """The lineage records of `store`. A lineage without a record is a root: it branched off nothing."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def numbers(self) -> list[int]:
        """Recorded lineages, ascending."""
        found = (layout.lineage_number(path) for path in self._store.list(layout.LINEAGES))
        return sorted(number for number in found if number is not None)

    def open(self, parent: Version | None, versions: Sequence[Version]) -> int:
        """Records the next lineage, branching off `parent`; its number, which no other caller gets.

        `versions` are those that exist. VersionMissing if the parent isn't one of them.
        """
        if parent is not None and parent not in versions:
            raise VersionMissing(parent, self._store.url)
        number = max((*self.numbers(), *(version.lineage for version in versions)), default=-1) + 1
        for _ in range(_OPEN_ATTEMPTS):
            record = {"lineage": number, "parent": None if parent is None else str(parent), "created": time.time()}
            if self._store.create(layout.lineage_path(number), records.encoded(record)):
                # A collector deletes a commit first and looks at the lineages then; so one of the two sees what the other did.
                if parent is not None and not self._store.exists(layout.commit_path(parent)):
                    self._store.delete(layout.lineage_path(number))
                    raise VersionMissing(parent, self._store.url)
                return number
            number += 1
        raise StoreError(f"{self._store.url}: others took {_OPEN_ATTEMPTS} lineages meanwhile; is something opening them in a loop?")

    def parent(self, number: int) -> Version | None:
        """The version that a lineage branched off; None for a root. Damaged if its record is."""
        path = layout.lineage_path(number)
        record = records.read(self._store, path)
        spelled = None if record is None else record.get("parent")
        if spelled is None:
            return None
        try:
            parent = Version.parse(str(spelled))
        except ValueError as error:
            raise Damaged(what=path, reason=f"names no version as its parent: {str(spelled)[:40]!r}", url=self._store.url) from error
        if parent.lineage >= number:
            raise Damaged(what=path, reason=f"names a later parent, {parent}", url=self._store.url)
        return parent

    def parents(self) -> dict[int, Version | None]:
        """What each recorded lineage branched off, by number. Damaged if a record is."""
        return {number: self.parent(number) for number in self.numbers()}

    def last(self, versions: Iterable[Version]) -> int | None:
        """The newest lineage that is recorded or has one of `versions`; None if there is none."""
        return max((*self.numbers(), *(version.lineage for version in versions)), default=None)

    def newest(self, versions: Iterable[Version], lineage: int | None = None) -> Version | None:
        """The last of `versions` in `lineage` (default: the newest there is) or, while that has none, the version it branched off.

        What came after the branch point in the older lineage is an abandoned tail and isn't returned. VersionMissing if the
        branch point is gone from `versions`.
        """
        existing = set(versions)
        if lineage is None:
            lineage = self.last(existing)
            if lineage is None:
                return None
        own = [version for version in existing if version.lineage == lineage]
        if own:
            return max(own)
        parent = self.parent(lineage)
        if parent is not None and parent not in existing:
            raise VersionMissing(parent, self._store.url)
        return parent


def surviving(versions: Iterable[Version], parents: Mapping[int, Version | None], lineage: int) -> list[Version]:
    """Those of `versions` that lead up to the end of `lineage`, ascending: its own, then those of its parent's lineage up to where it
    branched off, and so on. What came after a branch point in the older lineage, the abandoned tail, isn't among them."""
    by_lineage: dict[int, list[Version]] = {}
    for version in versions:
        by_lineage.setdefault(version.lineage, []).append(version)
    found = list(by_lineage.get(lineage, ()))
    parent = parents.get(lineage)
    while parent is not None:
        found += [version for version in by_lineage.get(parent.lineage, ()) if version <= parent]
        parent = parents.get(parent.lineage)
    return sorted(found)
