"""Objects that a commit names with their size and SHA-256 (documents, files, Zarr's metadata); owns putting and checking them whole."""

from __future__ import annotations

import hashlib

from storage.errors import Damaged, ObjectMissing
from storage.format.commit import Commit
from storage.format.index import ObjectEntry
from storage.objects.store import ObjectStore


def put_object(folder: ObjectStore, key: str, data: bytes) -> ObjectEntry:
    """Puts one object; what a commit says of it."""
    folder.write(key, data)
    return ObjectEntry(key, len(data), hashlib.sha256(data).hexdigest())


def read_object(store: ObjectStore, path: str, entry: ObjectEntry, commit: Commit) -> bytes:
    """The bytes of an object of a version; Damaged if they aren't what was written."""
    try:
        data = store.read(path)
    except ObjectMissing as error:
        raise Damaged(what=path, reason="is missing", url=store.url, version=commit.version) from error
    if len(data) != entry.bytes or hashlib.sha256(data).hexdigest() != entry.sha256:
        raise Damaged(what=path, reason="is cut short or changed", url=store.url, version=commit.version)
    return data
