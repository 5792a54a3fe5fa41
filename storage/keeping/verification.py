"""Reads all that versions consist of and checks it against their commits; owns the account of what is damaged, mends nothing."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np

from storage.arrays.extents import tensors_in
from storage.errors import Damaged, ObjectMissing, StoreError, StoreUnreachable, UnknownFormat, UnsafePath, VersionMissing
from storage.format import layout, records
from storage.format.checksums import block_sums, combined
from storage.format.commit import Commit
from storage.format.commits import read_commit, versions_in
from storage.format.index import ArrayEntry, ChunkEntry, ObjectEntry
from storage.format.numbers import spelled
from storage.keeping.lineages import Lineages
from storage.keeping.orphans import Orphan, unclaimed
from storage.keeping.results import wrong_results
from storage.keeping.retirement import Retired, Retirements
from storage.keeping.tags import Tags
from storage.objects.info import ObjectInfo
from storage.objects.parallel import side_by_side
from storage.objects.spans import Bytes
from storage.objects.store import ObjectStore
from storage.progress import Progress, Tally
from storage.version import Version

T = TypeVar("T")

_PIECE = 4 << 20
"""Objects that aren't chunks are hashed in pieces of so many bytes."""


@dataclass(frozen=True, order=True, slots=True)
class Damage:
    """An object, by its path in the store, that isn't what it should be: why, and which tensors of which version it takes along.

    `version` is None for what belongs to none (a tag, a lease, a lineage's record).
    """

    path: str
    reason: str
    version: Version | None = None
    tensors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Verification:
    """What was found: `damages` is empty if all of `versions`, and all that their data needs, is as it was written.

    `bytes` is how much was read. `orphans`, of any age, belong to no version: some may be of a publish that is under way. `retired`
    no longer exist and still have data, which collections remove.
    """

    versions: tuple[Version, ...]
    bytes: int
    damages: tuple[Damage, ...] = ()
    orphans: tuple[Orphan, ...] = ()
    retired: tuple[Version, ...] = ()

    @property
    def sound(self) -> bool:
        """Whether nothing is damaged."""
        return not self.damages


@dataclass(frozen=True, slots=True)
class _Job:
    """One object to check: a chunk of `array`, or one that has a SHA-256."""

    path: str
    bytes: int
    commit: Commit
    array: str | None = None
    number: int = 0
    entry: ObjectEntry | None = None
    users: list[Version] = field(default_factory=list)


def verify(store: ObjectStore, wanted: Iterable[Version] | None, progress: Progress | None = None) -> Verification:
    """Checks `wanted` versions and those that their data needs (None: all there are, and the records beside them)."""
    return _Verifier(store, progress).run(None if wanted is None else list(wanted))


class _Verifier:
    def __init__(self, store: ObjectStore, progress: Progress | None) -> None:
        self._store = store
        self._damages: list[Damage] = []
        self._commits: dict[Version, Commit] = {}
        self._unread: list[tuple[Version, StoreError]] = []
        self._tagged: dict[str, Version | None] = {}
        self._buffers = threading.local()
        self._tally = Tally(0, progress)

    def run(self, wanted: list[Version] | None) -> Verification:
        listed = self._store.infos()
        versions = versions_in(self._store) if wanted is None else wanted
        for version in versions:
            self._read_chain(version)
        for version, error in self._unread:
            self._damages.append(Damage(layout.commit_path(version), self._unreadable(error), version))
        jobs = list(self._jobs())
        self._tally.total = sum(job.bytes for job in jobs)
        for damages in side_by_side(self._check, jobs, self._store.parallel):
            self._damages += damages
        spoilt = {damage.version for damage in self._damages if damage.version is not None}
        wrong = wrong_results(self._store, self._commits, spoilt)
        self._damages += [Damage(layout.commit_path(one.version), one.reason, one.version, one.tensors) for one in wrong]
        retired = self._records() if wanted is None else []
        still = set(versions_in(self._store))
        lost = ((path, version) for path, version in self._tagged.items() if version is not None and version not in still)
        self._damages += [Damage(path, f"is on version {version}, which isn't there") for path, version in lost]
        # A version that a collection retired meanwhile may have lost data, which is no damage: it isn't there any more.
        gone = set(self._commits) - still
        damages = [d for d in self._damages if d.version not in gone]
        return Verification(
            versions=tuple(sorted({*versions, *self._commits} & still)),
            bytes=self._tally.done,
            damages=tuple(sorted(damages, key=lambda damage: (damage.path, str(damage.version), damage.reason))),
            orphans=tuple(self._orphans(listed, retired)) if wanted is None else (),
            retired=tuple(one.version for one in retired),
        )

    def _read_chain(self, version: Version) -> None:
        """Reads the commits of a version and of all that its data needs."""
        asked_by: Version | None = None
        current: Version | None = version
        while current is not None:
            if current not in self._commits:
                commit = self._read_commit(current, asked_by)
                if commit is None:
                    return
                self._commits[current] = commit
            asked_by, current = current, self._commits[current].base  # (older, or the commit would have been refused)

    def _read_commit(self, version: Version, asked_by: Version | None) -> Commit | None:
        path = layout.commit_path(version)
        try:
            return read_commit(self._store, version)
        except VersionMissing:
            needed = "is missing" if asked_by is None else f"is missing, and {asked_by} is stored as changes of it"
            lost = () if asked_by is None else tuple(self._commits[asked_by].tensors)
            self._damages.append(Damage(path, needed, asked_by or version, lost))
        except (Damaged, UnknownFormat) as error:
            self._damages.append(Damage(path, _reason(error), version))
        except (StoreUnreachable, UnsafePath) as error:
            self._unread.append((version, error))
        return None

    def _unreadable(self, error: StoreError) -> str:
        """Why one object can't be read, a folder in its place for example; raises `error` if a commit can't be read any more either."""
        known = next(iter(self._commits), None)
        if not isinstance(error, UnsafePath):
            if known is None:
                raise error
            try:
                self._store.read(layout.commit_path(known))
            except ObjectMissing:  # collected meanwhile, says a store that answers
                pass
            except StoreError:
                raise error from error.__cause__
        return f"can't be read: {error}"

    def _jobs(self) -> Iterator[_Job]:
        shared: dict[str, _Job] = {}
        for version, commit in self._commits.items():
            prefix = layout.data_prefix(version, commit.attempt)
            for entry in (*commit.objects, *commit.documents.values()):
                yield _Job(f"{prefix}/{entry.key}", entry.bytes, commit, entry=entry, users=[version])
            for name, array in commit.arrays.items():
                for number, chunk in enumerate(array.chunks):
                    yield _Job(f"{prefix}/{chunk.key}", chunk.bytes, commit, array=name, number=number, users=[version])
            for entry in commit.files.values():
                shared.setdefault(entry.key, _Job(entry.key, entry.bytes, commit, entry=entry)).users.append(version)
        yield from shared.values()

    def _check(self, job: _Job) -> list[Damage]:
        try:
            reason = self._chunk_reason(job) if job.array is not None else self._object_reason(job)
        except ObjectMissing:
            reason = "is missing"
        except (StoreUnreachable, UnsafePath) as error:
            reason = self._unreadable(error)
        self._tally.add(job.bytes)
        if reason is None:
            return []
        tensors = () if job.array is None else tensors_in(job.commit, job.array, job.number)
        return [Damage(job.path, reason, version, tensors) for version in sorted(set(job.users))]

    def _chunk_reason(self, job: _Job) -> str | None:
        array: ArrayEntry = job.commit.arrays[str(job.array)]
        chunk: ChunkEntry = array.chunks[job.number]
        buffer = self._buffer(chunk.bytes)
        end = self._store.read_into(job.path, buffer, 0)
        if end != chunk.bytes:
            return f"has another size than the {chunk.bytes} bytes that were written"
        values, seal = buffer[: array.chunk_bytes], buffer[array.chunk_bytes :]
        sums = block_sums([values], array.block_bytes)
        found = combined(sums, array.block_bytes, array.chunk_bytes)
        if not found == chunk.crc32c == int.from_bytes(seal.tobytes(), "little"):
            return "has changed bytes"
        if chunk.blocks and chunk.blocks != spelled(sums):
            return "doesn't match the list of its blocks' checksums"
        return None

    def _object_reason(self, job: _Job) -> str | None:
        if job.entry is None:
            raise ValueError(f"nothing says what {job.path} should be")
        digest, at = hashlib.sha256(), 0
        while at < job.bytes:
            piece = self._buffer(min(_PIECE, job.bytes - at))
            end = self._store.read_into(job.path, piece, at)
            if end < at + len(piece) or (at + len(piece) == job.bytes and end != job.bytes):
                return f"has another size than the {job.bytes} bytes that were written"
            digest.update(piece.data)
            at += len(piece)
        if not job.bytes and self._store.read_into(job.path, self._buffer(1), 0):
            return "has another size than the 0 bytes that were written"
        return None if digest.hexdigest() == job.entry.sha256 else "has changed bytes"

    def _buffer(self, size: int) -> Bytes:
        kept: Bytes | None = getattr(self._buffers, "bytes", None)
        if kept is None or len(kept) < size:
            kept = self._buffers.bytes = np.empty(size, dtype=np.uint8)
        return kept[:size]

    def _records(self) -> list[Retired]:
        """Checks the small records beside the versions; those of versions that were retired."""
        tags, lineages, retirements = Tags(self._store), Lineages(self._store), Retirements(self._store)
        for path in self._store.list(layout.TAGS):
            name = layout.tag_name(path)
            if name is not None:
                self._tagged[path] = self._guarded(path, partial(tags.find, name))
        for path in self._store.list(layout.LEASES):
            self._guarded(path, partial(records.read, self._store, path))
        for number in lineages.numbers():
            self._guarded(layout.lineage_path(number), partial(lineages.parent, number))
        found = []
        for path in self._store.list(layout.RETIRED):
            version = layout.retired_version(path)
            if version is not None:
                found.append(self._guarded(path, partial(retirements.find, version)))
        return [retired for retired in found if retired is not None]

    def _guarded(self, path: str, look: Callable[[], T]) -> T | None:
        try:
            return look()
        except (Damaged, UnknownFormat) as error:
            self._damages.append(Damage(path, _reason(error)))
        except (StoreUnreachable, UnsafePath) as error:
            self._damages.append(Damage(path, self._unreadable(error)))
        return None

    def _orphans(self, listed: list[ObjectInfo], retired: list[Retired]) -> list[Orphan]:
        """What belongs to no version; of one whose commit can't be read, nothing is called an orphan."""
        commits = [*self._commits.values(), *(one.commit for one in retired)]
        prefixes = {layout.data_prefix(commit.version, commit.attempt) for commit in commits}
        files = {entry.key for commit in commits for entry in commit.files.values()}
        unread = {damage.version for damage in self._damages if damage.version is not None} - set(self._commits)
        found = unclaimed([*listed, *self._store.temporaries()], prefixes, files, time.time())
        return [o for o in found if not (o.is_file and unread) and not (o.is_folder and layout.prefix_version(o.path) in unread)]


def _reason(error: StoreError) -> str:
    return error.reason if isinstance(error, Damaged) else str(error)
