"""Which versions a version's data is spread over, and readers that see it as one; owns the walk from changes to the full version below."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from storage.arrays.chunks import ArrayReader, ChunkReader, Folder
from storage.deltas.reader import Changes, DeltaReader
from storage.errors import Damaged, VersionMissing
from storage.format import layout
from storage.format.commit import Commit
from storage.format.index import DeltaEntry
from storage.objects.store import ObjectStore
from storage.version import Version

LONGEST_CHAIN = 256
"""Versions from a full one up to the last that needs it. Every one of them costs a pull of the whole two requests more."""


def chain(commit: Commit, load: Callable[[Version], Commit], url: str, held: Version | None = None) -> list[Commit]:
    """The commits whose data `commit` needs, itself first, then the one that it holds changes of, down to a full one.

    It ends before version `held` if that is among them. `load` gives a version's commit. Damaged, naming the version of
    `commit`, if one is gone, or if they are more than `LONGEST_CHAIN`; each is older than the one before, or is refused as damaged.
    """
    found = [commit]
    while found[-1].base is not None and found[-1].base != held:
        base = found[-1].base
        if len(found) == LONGEST_CHAIN:
            raise _damaged(commit, f"leads through {LONGEST_CHAIN} versions and on to {base}", url)
        try:
            found.append(load(base))
        except VersionMissing as error:
            raise _damaged(commit, f"leads to version {base}, which is gone", url) from error
    return found


def readers_of(store: ObjectStore, commits: Sequence[Commit]) -> dict[str, ArrayReader]:
    """Readers of the arrays and deltas of the first of `commits`, which are a whole chain. Damaged if they don't fit together."""
    below: dict[str, ArrayReader] = {}
    lower: Commit | None = None
    for commit in reversed(commits):
        arrays = _array_readers(store, commit)
        deltas = {}
        for name, entry in commit.deltas.items():
            base = below.get(name)
            if lower is None or base is None or _cut(lower, name) != (entry.dtype, entry.length, entry.chunk):
                raise _damaged(commit, f"has changes of array {name!r}, which version {commit.base} lacks, or has in another form", store.url)
            deltas[name] = _after(base, _changes(store, commit, name, entry, arrays))
        below = {**arrays, **deltas}
        lower = commit
    return below


def links_of(store: ObjectStore, commits: Sequence[Commit]) -> dict[str, list[Changes]]:
    """For each array of the first of `commits`, a chain that ends before a version at hand, what is to be applied to that: the
    oldest changes first. Empty if one of the versions has other arrays than the next."""
    names = set(commits[0].deltas)
    if any(set(commit.deltas) != names for commit in commits):
        return {}
    found: dict[str, list[Changes]] = {name: [] for name in names}
    for commit in reversed(commits):
        arrays = _array_readers(store, commit)
        for name, entry in commit.deltas.items():
            found[name].append(_changes(store, commit, name, entry, arrays))
    return found


def _array_readers(store: ObjectStore, commit: Commit) -> dict[str, ArrayReader]:
    folder = Folder(store.child(layout.data_prefix(commit.version, commit.attempt)), commit.version)
    return {name: ChunkReader(folder, array) for name, array in commit.arrays.items()}


def _changes(store: ObjectStore, commit: Commit, name: str, entry: DeltaEntry, arrays: Mapping[str, ArrayReader]) -> Changes:
    return Changes(name, entry, None if entry.stream is None else arrays[entry.stream], commit.version, store.url)


def _after(base: ArrayReader, changes: Changes) -> DeltaReader:
    """The array after some more changes: in one pass with those before, if they come in equal segments."""
    if isinstance(base, DeltaReader) and base.entry.segment == changes.entry.segment:
        return DeltaReader(base.base, [*base.links, changes])
    return DeltaReader(base, [changes])


def _cut(commit: Commit, name: str) -> tuple[str, int, int]:
    entry = commit.arrays.get(name) or commit.deltas[name]
    return entry.dtype, entry.length, entry.chunk


def _damaged(commit: Commit, reason: str, url: str) -> Damaged:
    return Damaged(what="its chain of changes", reason=reason, url=url, version=commit.version)
