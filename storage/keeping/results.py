"""Checks that versions which are stored as changes come to the values that were written; owns that walk, mends nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from storage.arrays.extents import tensors_within
from storage.deltas.chains import chain, readers_of
from storage.deltas.reader import DeltaReader
from storage.errors import Damaged, StoreError, VersionMissing
from storage.format.commit import Commit
from storage.format.dtypes import ITEMSIZE
from storage.objects.parallel import side_by_side
from storage.objects.store import ObjectStore
from storage.version import Version

_PIECE = 4 << 20
"""How many bytes of values are made at once: whole segments, one at least."""


@dataclass(frozen=True, slots=True)
class WrongResult:
    """Changes of `version` that don't give what was written, as `reason` says, and the tensors that have values there."""

    version: Version
    reason: str
    tensors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Failure:
    """What went wrong with `segment`, counted through the array, when the changes of `version` were applied to it."""

    version: Version
    segment: int
    error: Damaged


def wrong_results(store: ObjectStore, commits: Mapping[Version, Commit], spoilt: Collection[Version]) -> list[WrongResult]:
    """Applies all changes of `commits`, those below first: where one is wrong, those after it aren't looked at.

    Of `spoilt` versions it is known already that some of their bytes can't be read. StoreUnreachable for others of which that is so.
    """
    found: list[WrongResult] = []
    done: set[tuple[Version, str]] = set()
    for version in sorted(commits, reverse=True):  # the last of a chain first: the way to its values shows those below
        names = [name for name in commits[version].deltas if (version, name) not in done]
        if not names:
            continue
        try:
            below = chain(commits[version], lambda base: _known(commits, base, store), store.url)
            readers = readers_of(store, below)
        except Damaged as error:
            if not isinstance(error.__cause__, VersionMissing):  # (a commit that isn't there is told of elsewhere)
                found.append(WrongResult(version, f"{error.what} {error.reason}", tuple(sorted(commits[version].tensors))))
            continue
        for name in names:
            done |= {(commit.version, name) for commit in below[: _links(below, name)]}
            for reader in _levels(readers[name]):
                bad = {*spoilt, *(wrong.version for wrong in found)} & {commit.version for commit in below}
                failures = _check(reader, name, tolerant=bool(bad), parallel=store.parallel)
                found += _told(failures, name, commits)
    return list(dict.fromkeys(found))


def _known(commits: Mapping[Version, Commit], version: Version, store: ObjectStore) -> Commit:
    if version not in commits:
        raise VersionMissing(version, store.url)
    return commits[version]


def _links(below: list[Commit], name: str) -> int:
    """How many of a chain's commits, from the last version down, have an array as changes."""
    return next((i for i, commit in enumerate(below) if name not in commit.deltas), len(below))


def _levels(reader: object) -> Iterator[DeltaReader]:
    """What a reader is stacked of, where its changes come in unlike segments: the lowest first."""
    if isinstance(reader, DeltaReader):
        yield from _levels(reader.base)
        yield reader


def _check(reader: DeltaReader, name: str, *, tolerant: bool, parallel: int) -> list[_Failure]:
    chunks = range(-(-reader.entry.length // reader.entry.chunk))
    found = side_by_side(lambda number: list(_check_chunk(reader, name, number, tolerant)), chunks, parallel)
    return [failure for failures in found for failure in failures]


def _check_chunk(reader: DeltaReader, name: str, number: int, tolerant: bool) -> Iterator[_Failure]:
    entry = reader.entry
    segment = entry.segment
    size = min(entry.chunk, entry.length - number * entry.chunk) * ITEMSIZE[entry.dtype]
    step = max(1, _PIECE // segment) * segment
    for start in range(0, size, step):
        values = np.empty(min(step, size - start), dtype=np.uint8)
        count, at = -(-len(values) // segment), number * reader.links[0].segments + start // segment
        left = set(range(count))
        try:
            reader.base.read(number, start, [values], name)
            for link in reader.links:
                changes = link.read(at, at + count, name)
                for i in sorted(left):
                    try:
                        link.apply(at + i, values[i * segment : (i + 1) * segment], changes[i], name)
                    except Damaged as error:
                        left.discard(i)
                        yield _Failure(link.version, at + i, error)
        except StoreError as error:
            if tolerant:  # what can't be read is told of as an object
                continue
            if not isinstance(error, Damaged) or error.version is None:
                raise
            yield _Failure(error.version, at, error)


def _told(failures: list[_Failure], name: str, commits: Mapping[Version, Commit]) -> Iterator[WrongResult]:
    """One account for each version, of its first segment that is wrong and the tensors of all."""
    for version in sorted({failure.version for failure in failures}):
        wrong = [failure for failure in failures if failure.version == version]
        commit, more = commits[version], len(wrong) - 1
        tensors: set[str] = set()
        for failure in wrong:
            tensors |= set(tensors_within(commit, name, *_values(commit, name, failure.segment)))
        first = wrong[0].error
        reason = f"{first.what} {first.reason}" + (f" ({more} more such segment{'' if more == 1 else 's'})" if more else "")
        yield WrongResult(version, reason, tuple(sorted(tensors)))


def _values(commit: Commit, name: str, segment: int) -> tuple[int, int]:
    """[start, end) of a segment's values in its array; of all where the version has no changes of it."""
    entry = commit.deltas.get(name)
    if entry is None:
        return 0, commit.arrays[name].length
    chunk, inside = divmod(segment, -(-entry.chunk_bytes // entry.segment))
    itemsize = ITEMSIZE[entry.dtype]
    start = chunk * entry.chunk + inside * entry.segment // itemsize
    return start, min(start + entry.segment // itemsize, (chunk + 1) * entry.chunk, entry.length)
