"""Removes what a retention doesn't keep and what dead processes left; owns the order of looks, writes and deletions that makes it safe.

Any number of collectors may run at once, beside publishers and readers, and be killed anywhere. The rules:

- Claims (tags, leases, lineages) are looked at before commits, and both again after commits were deleted: who claims a version
  looks for its commit after writing the claim, so one of the two sees the other, and the commit is put back.
- Data goes only in a later collection, once the version's record is older than the grace period and nothing claims it.
- What no commit and no record names is listed before the commits are, and goes only when it is older than the longest publish.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from storage.errors import Damaged, ObjectMissing, VersionMissing
from storage.format import layout
from storage.format.commit import Commit
from storage.format.commits import read_commit, versions_in
from storage.keeping.leases import Leases
from storage.keeping.lineages import Lineages
from storage.keeping.orphans import Orphan, is_temporary, unclaimed
from storage.keeping.retention import Claims, Retention, kept
from storage.keeping.retirement import STALL_S, Retired, Retirements
from storage.keeping.tags import Tags
from storage.objects.clock import store_time
from storage.objects.info import ObjectInfo
from storage.objects.parallel import side_by_side
from storage.objects.store import ObjectStore
from storage.version import Version

_log = logging.getLogger(__name__)

DAMAGED = "its commit is damaged, so that what it needs is unknown: verify, then delete it by hand"


@dataclass(frozen=True, slots=True)
class Collection:
    """What a collection did, or would do if it was a dry run.

    `kept`: version -> why it stays. `retired`: no longer exist, data still there. `restored`: claimed again in time. `waiting`:
    were retired before, within their grace period. `deleted`: retired before, data now gone. `orphans`: what dead processes had
    left, now gone. `leases`: how many ended leases went. `bytes_freed` counts the data of `deleted` and `orphans`.
    """

    kept: dict[Version, tuple[str, ...]] = field(default_factory=dict)
    retired: tuple[Version, ...] = ()
    restored: tuple[Version, ...] = ()
    waiting: tuple[Version, ...] = ()
    deleted: tuple[Version, ...] = ()
    orphans: tuple[Orphan, ...] = ()
    leases: int = 0
    bytes_freed: int = 0
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class _Known:
    """What of a commit a collection needs: whose data, what that needs, which shared files."""

    attempt: str
    base: Version | None
    files: frozenset[str]

    @classmethod
    def of(cls, commit: Commit) -> _Known:
        return cls(commit.attempt, commit.base, frozenset(entry.key for entry in commit.files.values()))


def collect(store: ObjectStore, retention: Retention, *, grace_s: float, now: float | None = None, dry_run: bool = False) -> Collection:
    """One collection in `store`; see `Collection`, and `WeightStore.gc` for the arguments and errors."""
    if not grace_s >= 0:
        raise ValueError(f"grace_s is {grace_s}: write how many seconds a version's data stays after its commit is gone, 0 or more")
    if not any(store.list(folder) for folder in layout.FOLDERS):
        return Collection(dry_run=dry_run)  # no store of versions, or an empty one: not even the clock is asked, which writes
    if now is None:
        now = time.time() if dry_run else store_time(store)
    return _Collector(store, retention, grace_s, now, dry_run).run()


class _Collector:
    def __init__(self, store: ObjectStore, retention: Retention, grace_s: float, now: float, dry_run: bool) -> None:
        self._store = store
        self._retention = retention
        self._grace_s = grace_s
        self._now = now
        self._dry_run = dry_run
        self._retirements = Retirements(store)
        self._known: dict[Version, _Known] = {}
        self._recorded: set[Version] = set()  # those of `_known` that a record told of, and no commit that exists
        self._unreadable: set[Version] = set()

    def run(self) -> Collection:
        listed = [*self._store.infos(), *(info for info in self._store.temporaries() if info.modified + layout.LONGEST_PUBLISH_S <= self._now)]
        before = self._retirements.all()
        existing, keep = self._look(before)
        going = [version for version in existing if version not in keep]
        going.sort(key=self._depth, reverse=True)  # what is stored as changes goes before what they are changes of
        if self._dry_run:
            retired = tuple(going)
            restored = tuple(r.version for r in before if self._restorable(r, existing, keep))
        else:
            retired = tuple(version for version in going if self._retirements.retire(version, self._known[version].attempt))
            if retired or before:
                existing, keep = self._look(before)
            restored = self._restore(existing, keep)
        waiting, deleted, freed = self._finish(before, existing, keep, set(restored), listed)
        orphans = self._orphans(listed, before)
        leases = 0 if self._dry_run else len(Leases(self._store).sweep(self._now))
        return Collection(
            kept={version: reasons for version, reasons in keep.items() if version in existing or version in restored},
            retired=tuple(sorted(set(retired) - set(restored))),
            restored=tuple(sorted(restored)),
            waiting=waiting,
            deleted=deleted,
            orphans=orphans,
            leases=leases,
            bytes_freed=freed + sum(orphan.bytes for orphan in orphans),
            dry_run=self._dry_run,
        )

    def _look(self, retired: Iterable[Retired]) -> tuple[set[Version], dict[Version, tuple[str, ...]]]:
        """The versions that exist now, and which are to stay."""
        tags = Tags(self._store).all()
        leases: dict[Version, tuple[str, ...]] = {}
        for held in Leases(self._store).all():
            if held.expires > self._now:
                leases[held.version] = (*leases.get(held.version, ()), held.holder)
        parents = Lineages(self._store).parents()
        versions = versions_in(self._store)
        unread = [version for version in versions if version not in self._known or version in self._recorded]
        gone = {version for version, there in zip(unread, side_by_side(self._learn, unread, self._store.parallel), strict=True) if not there}
        for record in retired:
            if record.version not in self._known:
                self._known[record.version] = _Known.of(record.commit)
                self._recorded.add(record.version)
        existing = set(versions) - gone
        keep = kept(self._retention, existing, Claims(tags, leases, parents), self._base)
        for version in self._unreadable & existing:
            keep[version] = (*keep.get(version, ()), DAMAGED)
        return existing, keep

    def _learn(self, version: Version) -> bool:
        """Reads a commit; False if it has gone meanwhile. UnknownFormat stops the collection: what such a version needs is unknown."""
        try:
            self._known[version] = _Known.of(read_commit(self._store, version))
            self._recorded.discard(version)
        except VersionMissing:
            return False
        except Damaged as error:
            _log.warning("%s; it stays as it is", error)
            self._unreadable.add(version)
        return True

    def _base(self, version: Version) -> Version | None:
        known = self._known.get(version)
        return None if known is None else known.base

    def _depth(self, version: Version) -> tuple[int, Version]:
        depth, base = 1, self._base(version)
        while base is not None:  # (older each time, or its commit would have been refused)
            depth, base = depth + 1, self._base(base)
        return depth, version

    def _restorable(self, retired: Retired, existing: set[Version], keep: dict[Version, tuple[str, ...]]) -> bool:
        return not retired.gone and retired.version not in existing and retired.version in keep

    def _restore(self, existing: set[Version], keep: dict[Version, tuple[str, ...]]) -> tuple[Version, ...]:
        """Puts back what is claimed after all, by someone since the first look or because a collector was killed before its second."""
        missing = [version for version in keep if version not in existing]
        if not missing:
            return ()
        found = [retired for retired in self._retirements.all() if self._restorable(retired, existing, keep)]
        found.sort(key=lambda retired: self._depth(retired.version))
        return tuple(retired.version for retired in found if self._retirements.restore(retired))

    def _finish(
        self, before: list[Retired], existing: set[Version], keep: dict[Version, tuple[str, ...]], restored: set[Version], listed: list[ObjectInfo]
    ) -> tuple[tuple[Version, ...], tuple[Version, ...], int]:
        """Deletes the data of what was retired long enough ago."""
        waiting, deleted, freed = [], [], 0
        for retired in before:
            old = retired.since + self._grace_s <= self._now
            exists = retired.version in restored or (retired.version in existing and self._known[retired.version].attempt == retired.commit.attempt)
            if retired.version in self._unreadable:
                waiting.append(retired.version)
            elif exists and not retired.gone:
                stale = retired.since + max(self._grace_s, STALL_S) <= self._now
                if stale and not self._dry_run and self._retirements.unchanged(retired):
                    self._retirements.forget(retired)
            elif not retired.gone and (not old or (retired.version in keep and retired.version not in existing)):
                waiting.append(retired.version)  # (one that exists as another attempt published it needs nothing of this one)
            elif self._dry_run or self._retirements.unchanged(retired):
                deleted.append(retired.version)
                prefix = layout.data_prefix(retired.version, retired.commit.attempt) + "/"
                freed += sum(info.bytes for info in listed if info.path.startswith(prefix))
                if not self._dry_run:
                    if exists:  # put back by a collector that was killed before it saw that the data was going
                        self._store.delete(layout.commit_path(retired.version))
                    self._retirements.finish(retired)
        return tuple(waiting), tuple(deleted), freed

    def _orphans(self, listed: list[ObjectInfo], before: list[Retired]) -> tuple[Orphan, ...]:
        prefixes = {layout.data_prefix(version, known.attempt) for version, known in self._known.items()}
        prefixes |= {layout.data_prefix(retired.version, retired.commit.attempt) for retired in before}
        files = {key for known in self._known.values() for key in known.files}
        files |= {entry.key for retired in before for entry in retired.commit.files.values()}
        found = unclaimed(listed, prefixes, files, self._now)
        old = [orphan for orphan in found if orphan.old(self._now) and not self._of_unreadable(orphan)]
        gone = [orphan for orphan in old if not orphan.is_file]
        temporaries = [info for info in listed if is_temporary(info.path)]
        inside = tuple(orphan.path + "/" for orphan in gone if orphan.is_folder)
        gone += [Orphan(info.path, info.bytes, info.modified) for info in temporaries if not info.path.startswith(inside)]
        if not self._dry_run:
            for orphan in gone:
                self._store.delete(orphan.path, recursive=orphan.is_folder)
        # Only when nobody publishes and all that versions refer to is known; else in a later collection.
        if not self._unreadable and not any(orphan.is_folder and not orphan.old(self._now) for orphan in found):
            seen = prefixes | {orphan.path for orphan in found if orphan.is_folder}
            gone += [orphan for orphan in old if orphan.is_file and self._drop_file(orphan, seen)]
        return tuple(sorted(gone))

    def _of_unreadable(self, orphan: Orphan) -> bool:
        return orphan.is_folder and layout.prefix_version(orphan.path) in self._unreadable

    def _drop_file(self, orphan: Orphan, seen: set[str]) -> bool:
        """Deletes a file of a model's folder, unless a publisher that may have put the same one shows up meanwhile.

        A publisher puts its files, also those that are there, after the first of its data: so if it put this one before the
        deletion, its data is in a listing after that.
        """
        if self._dry_run:
            return True
        try:
            data = self._store.read(orphan.path)
        except ObjectMissing:
            return False
        self._store.delete(orphan.path)
        now = {layout.attempt_prefix(path) for path in self._store.list(layout.DATA)} - {None}
        if now <= seen:
            return True
        self._store.write(orphan.path, data)
        return False
