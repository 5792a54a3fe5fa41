"""Copies versions from one store into another, byte for byte; owns the order of it, which lets a copy go on where one broke off."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from storage.deltas.chains import chain
from storage.differences import differences
from storage.errors import Damaged, ObjectMissing, StoreError, VersionDiffers, VersionTaken
from storage.format import layout
from storage.format.checksums import crc32c
from storage.format.commit import Commit
from storage.format.commits import read_stored
from storage.format.index import ChunkEntry, ObjectEntry
from storage.format.whole_objects import read_object
from storage.keeping.lineages import Lineages
from storage.models.adapters import BASE, adapter_of, base_of
from storage.objects.clock import store_time
from storage.objects.parallel import side_by_side
from storage.objects.store import ObjectStore
from storage.progress import Progress, Tally
from storage.version import Version
from storage.weights import WeightStore

LONGEST_S = layout.LONGEST_PUBLISH_S / 2
"""What a copy may take, and how old what an earlier one left may be, so that no collector sweeps either before the commit."""


@dataclass(frozen=True, slots=True)
class _Stored:
    """An object of a version, by its path in the store."""

    path: str
    entry: ChunkEntry | ObjectEntry


def copy_version(source: WeightStore, version: Version, target: WeightStore, *, full: bool = False, progress: Progress | None = None) -> Version:
    """Copies `version`, and those that its data is changes of, into `target` under their own numbers; a second time does nothing.

    Each object is checked on its way and the commit comes last, so that the version is in `target` whole or not at all. A copy
    that broke off goes on with what is there, checked again. With `full` the values alone are copied, as a version that needs no
    other (all of them in memory). `progress` counts each version by itself.

    With an adapter goes its base. VersionDiffers if `target` has another version of that number; VersionMissing, Damaged, UnknownFormat.
    """
    adapter = adapter_of(source.commit(version), source.url)
    if adapter is not None:
        copy_version(base_of(source, adapter.base), BASE, base_of(target, adapter.base), full=full, progress=progress)
    if full and source.commit(version).base is not None:
        _copy_values(source, version, target)
        return version
    for commit, data in reversed(_chain(source, version)):
        if not _is_there(source, commit.version, target, data):
            _copy_bytes(source, commit, data, target, progress)
    return version


def copy_lineages(source: WeightStore, target: WeightStore) -> None:
    """Copies the records of where lineages branched off, which decide what is newest; after all versions. VersionDiffers names the
    first version of a lineage that branched off elsewhere in `target`."""
    ours, theirs = Lineages(source.objects), Lineages(target.objects)
    for number in ours.numbers():
        path = layout.lineage_path(number)
        if not target.objects.create(path, source.objects.read(path)) and theirs.parent(number) != ours.parent(number):
            raise VersionDiffers(Version(number, 0), source.url, target.url)


def copy_tags(source: WeightStore, target: WeightStore, versions: Iterable[Version]) -> dict[str, Version]:
    """Puts the tags that are on one of `versions` onto the same versions in `target`, where they are taken off others; which they are."""
    copied = set(versions)
    found = {name: version for name, version in source.tags().items() if version in copied}
    for name, version in found.items():
        target.tag(name, version)
    return found


def _chain(source: WeightStore, version: Version) -> list[tuple[Commit, bytes]]:
    """A version's commit as read and as stored, then that of what its data is changes of, to the full one."""
    stored: dict[Version, bytes] = {}

    def load(needed: Version) -> Commit:
        commit, stored[needed] = read_stored(source.objects, needed)
        return commit

    return [(commit, stored[commit.version]) for commit in chain(load(version), load, source.url)]


def _is_there(source: WeightStore, version: Version, target: WeightStore, data: bytes) -> bool:
    try:
        there = target.objects.read(layout.commit_path(version))
    except ObjectMissing:
        return False
    if there != data:
        raise VersionDiffers(version, source.url, target.url)
    return True


def _copy_bytes(source: WeightStore, commit: Commit, data: bytes, target: WeightStore, progress: Progress | None) -> None:
    began = time.monotonic()
    stored = list(_stored(commit))
    left = _left_of_another(target.objects, commit)
    tally = Tally(sum(one.entry.bytes for one in stored), progress)

    def copy(one: _Stored) -> None:
        if one.path not in left or not _is_whole(target.objects, one, commit):
            target.objects.write(one.path, _read(source.objects, one, commit))
        tally.add(one.entry.bytes)

    # A collector takes a file that no version needs for one that is about to be needed only if data was there before it.
    for together in (stored[: -len(commit.files) or None], stored[len(stored) - len(commit.files) :]):
        side_by_side(copy, together, max(source.objects.parallel, target.objects.parallel))
    if time.monotonic() - began > LONGEST_S:
        raise StoreError(
            f"copying version {commit.version} to {target.url} took more than {LONGEST_S / 3600:g} h, after which what was copied first may be "
            "swept away there: copy it over a faster connection"
        )
    if not target.objects.create(layout.commit_path(commit.version), data):
        _is_there(source, commit.version, target, data)


def _stored(commit: Commit) -> Iterator[_Stored]:
    """All objects of a version but its commit, chunks first."""
    prefix = layout.data_prefix(commit.version, commit.attempt)
    yield from (_Stored(f"{prefix}/{chunk.key}", chunk) for array in commit.arrays.values() for chunk in array.chunks)
    yield from (_Stored(f"{prefix}/{entry.key}", entry) for entry in (*commit.objects, *commit.documents.values()))
    yield from (_Stored(entry.key, entry) for entry in commit.files.values())


def _left_of_another(target: ObjectStore, commit: Commit) -> set[str]:
    """Paths of what an earlier copy of this very version left in `target`, not too long ago.

    Not its files: other versions share them, and one that is old may be about to go.
    """
    prefix = layout.data_prefix(commit.version, commit.attempt)
    found = target.infos(prefix)
    since = store_time(target) - LONGEST_S if found else 0.0
    return {info.path for info in found if info.modified >= since}


def _is_whole(target: ObjectStore, one: _Stored, commit: Commit) -> bool:
    try:
        _read(target, one, commit)
    except Damaged:
        return False
    return True


def _read(store: ObjectStore, one: _Stored, commit: Commit) -> bytes:
    """The object's bytes, checked against what the commit says of them."""
    if isinstance(one.entry, ObjectEntry):
        return read_object(store, one.path, one.entry, commit)

    def refuse(reason: str) -> NoReturn:
        raise Damaged(what=one.path, reason=reason, url=store.url, version=commit.version)

    try:
        data = store.read(one.path)
    except ObjectMissing:
        refuse("is missing")
    if len(data) != one.entry.bytes:
        refuse(f"has {len(data)} bytes instead of {one.entry.bytes}")
    values, kept = np.frombuffer(data[: -layout.CHECKSUM_BYTES], dtype=np.uint8), data[-layout.CHECKSUM_BYTES :]
    if not crc32c([values]) == int.from_bytes(kept, "little") == one.entry.crc32c:
        refuse("has changed bytes")
    return data


def _copy_values(source: WeightStore, version: Version, target: WeightStore) -> None:
    commit = source.commit(version)
    if version not in target.versions():
        files = {name: source.file(version, name) for name in commit.files}
        try:
            target.publish(source.pull(version), version=version, parent=commit.parent, metadata=commit.metadata, files=files).result()
        except VersionTaken:
            pass  # by another copy of it, or by another version: the comparison tells
        else:
            return
    there = target.commit(version)
    alike = (there.parent, there.metadata, there.files) == (commit.parent, commit.metadata, commit.files)
    if not alike or any(found.kind != "same" for found in differences((source, version), (target, version))):
        raise VersionDiffers(version, source.url, target.url)
