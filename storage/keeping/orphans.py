"""Finds what no version needs and nobody can still be writing; owns that rule, reads listings only and removes nothing."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from storage.format import layout
from storage.objects import paths
from storage.objects.info import ObjectInfo

_MARKER = re.compile(rf"({paths.PROBE}|{paths.CLOCK}/)[0-9a-f]{{32}}")
_TEMPORARY = re.compile(rf"(({'|'.join(layout.FOLDERS)}|{paths.CLOCK})/(.+/)?)?{re.escape(paths.TEMPORARY)}[0-9a-f]{{32}}")


@dataclass(frozen=True, order=True, slots=True)
class Orphan:
    """A folder of data or a single object that belongs to nothing: its `bytes`, and when it was last written to by the store's clock."""

    path: str
    bytes: int
    modified: float

    @property
    def is_folder(self) -> bool:
        """Whether `path` is the folder of an attempt rather than one object."""
        return self.path.startswith(layout.DATA + "/") and self.path.count("/") == 1

    @property
    def is_file(self) -> bool:
        """Whether this is a file of a model's folder, which a publisher may just have taken for its own."""
        return self.path.startswith(layout.FILES + "/")

    def old(self, now: float) -> bool:
        """Whether the longest publish has passed since it was written to, so that nobody can be at it."""
        return self.modified + layout.LONGEST_PUBLISH_S <= now


def is_temporary(path: str) -> bool:
    """Whether a local file is one that this package's writers fill, and no other program's that begins its name in the same way."""
    return _TEMPORARY.fullmatch(path) is not None


def unclaimed(infos: Iterable[ObjectInfo], prefixes: Collection[str], files: Collection[str], now: float) -> list[Orphan]:
    """What is in none of the folders `prefixes` and none of the `files`, by path, of any age: the orphans and what is being written.

    Objects of kinds that this package doesn't write aren't looked at. Markers of dead processes count only once they are old,
    since a living one removes its own.
    """
    folders: dict[str, Orphan] = {}
    found = []
    for info in infos:
        prefix = layout.attempt_prefix(info.path)
        orphan = Orphan(info.path, info.bytes, info.modified)
        if prefix is not None:
            if prefix not in prefixes:
                before = folders.get(prefix, Orphan(prefix, 0, info.modified))
                folders[prefix] = Orphan(prefix, before.bytes + info.bytes, max(before.modified, info.modified))
        elif layout.is_file(info.path):
            if info.path not in files:
                found.append(orphan)
        elif _MARKER.fullmatch(info.path) is not None and orphan.old(now):
            found.append(orphan)
    return sorted([*found, *folders.values()])
