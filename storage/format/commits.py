"""Lists and reads the commits of a store; owns no rule of which version counts for what."""

from __future__ import annotations

from storage.errors import ObjectMissing, VersionMissing
from storage.format import layout
from storage.format.commit import Commit, decode
from storage.objects.store import ObjectStore
from storage.version import Version


def versions_in(store: ObjectStore) -> list[Version]:
    """All versions that exist, ascending, abandoned tails included."""
    found = map(layout.commit_version, store.list(layout.COMMITS))
    return sorted(version for version in found if version is not None)


def read_commit(store: ObjectStore, version: Version) -> Commit:
    """What `version` holds. VersionMissing, Damaged or UnknownFormat."""
    return read_stored(store, version)[0]


def read_stored(store: ObjectStore, version: Version) -> tuple[Commit, bytes]:
    """The commit of `version` and the bytes of its object. VersionMissing, Damaged or UnknownFormat."""
    path = layout.commit_path(version)
    try:
        data = store.read(path)
    except ObjectMissing as error:
        raise VersionMissing(version, store.url) from error
    return decode(data, version, path, store.url), data
