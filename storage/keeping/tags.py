"""Names that people give to versions; owns their spelling and their objects, decides nothing about what is kept."""

from __future__ import annotations

import re

from storage.errors import BadReference, UnknownTag
from storage.format import layout, records
from storage.keeping.claims import claim
from storage.objects.store import ObjectStore
from storage.version import Version

NEWEST = "newest"
"""What stands for the newest version wherever one is named; no tag may be called so."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_LIKE_A_VERSION = re.compile(r"\d+-\d+")


def checked_tag(name: str) -> str:
    """`name` itself if a tag may have it: letters, digits and `_.-`, not spelled like a version, not `newest`; else BadReference."""
    if _NAME.fullmatch(name) is None or _LIKE_A_VERSION.fullmatch(name) is not None or name == NEWEST:
        raise BadReference(
            f"{name[:120]!r} can't be a tag: write up to 100 letters, digits, '_', '.' and '-', beginning with a letter or a digit, "
            f"not spelled like a version (0-42) and not {NEWEST!r}"
        )
    return name


class Tags:
    """The tags of `store`: one small object each, replaced whole, so that a tag names one version or the other at any time."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def all(self) -> dict[str, Version]:
        """Tag -> version, by name. Damaged names the object that is."""
        names = filter(None, map(layout.tag_name, self._store.list(layout.TAGS)))
        found = {name: self.find(name) for name in sorted(names)}
        return {name: version for name, version in found.items() if version is not None}

    def find(self, name: str) -> Version | None:
        """The version that tag `name` is on; None if there is no such tag. BadReference, Damaged."""
        path = layout.tag_path(checked_tag(name))
        record = records.read(self._store, path)
        return None if record is None else records.version_of(record, path, self._store)

    def put(self, name: str, version: Version) -> None:
        """Puts tag `name` on `version`, taking it off any other. VersionMissing, which leaves the tag as it was, or takes it away if
        the version is collected at this very moment."""
        claim(self._store, layout.tag_path(checked_tag(name)), version, {})

    def remove(self, name: str) -> None:
        """Takes tag `name` away; UnknownTag if there is none."""
        path = layout.tag_path(checked_tag(name))
        if path not in self._store.list(layout.TAGS):  # (a listing tells a tag that isn't there from a bucket that isn't)
            raise UnknownTag(f"{self._store.url} has no tag {name!r}; tags() lists those it has")
        self._store.delete(path)
