"""The small files of a model's folder (config, tokenizer), one object for all versions whose file is equal; owns their keys and checks."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping

from storage.errors import UnknownFile, UnsafePath
from storage.format import layout
from storage.format.commit import Commit
from storage.format.index import ObjectEntry
from storage.format.whole_objects import read_object
from storage.objects import paths
from storage.objects.store import ObjectStore

_FRESH_S = 3600.0
"""A file that was put longer ago is put again, so that none that a publish under way relies on is old enough to be swept."""


def put_files(store: ObjectStore, files: Mapping[str, bytes]) -> dict[str, ObjectEntry]:
    """Puts those of `files` (name -> content) that the store lacks; what a commit says of them. UnsafePath for a name that isn't plain."""
    entries = {name: _entry(data) for name, data in files.items()}
    if entries:
        there = {info.path: info.modified for info in store.infos(layout.FILES)}
        fresh = time.time() - _FRESH_S
        contents = {entries[name].key: data for name, data in files.items()}
        for key, data in contents.items():
            if there.get(key, 0.0) < fresh:
                store.write(key, data)
    return entries


def check_file_names(files: Mapping[str, bytes]) -> None:
    """UnsafePath unless every name is one plain name, as a folder on any disk can have it."""
    for name in files:
        if "/" in paths.checked(name):
            raise UnsafePath(f"{name!r} doesn't name a file of a model's folder: it has no folders in it")


def read_file(store: ObjectStore, commit: Commit, name: str) -> bytes:
    """The bytes of one of a commit's files. UnknownFile, or Damaged if they aren't what was written."""
    entry = commit.files.get(name)
    if entry is None:
        held = ", ".join(sorted(commit.files)[:20]) or "none"
        raise UnknownFile(f"version {commit.version} has no file {name!r}; it has {held}")
    return read_object(store, entry.key, entry, commit)


def _entry(data: bytes) -> ObjectEntry:
    digest = hashlib.sha256(data).hexdigest()
    return ObjectEntry(layout.file_key(digest), len(data), digest)
