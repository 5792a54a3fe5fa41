"""Decides which paths name an object inside a store; touches no file."""

from __future__ import annotations

import re

from storage.errors import UnsafePath

_PART = re.compile(r"[A-Za-z0-9._+=@,-]+")
_LONGEST = 900
"""S3 takes keys of up to 1024 bytes; the rest is for the store's own prefix."""

CLOCK = "clock"
"""Folder of objects that are written only to see what time the store says it is."""

TEMPORARY = ".tmp-"
"""How the names of files begin that a local store is still filling."""

PROBE = "probe-"
"""How the names of objects begin that only try what a store does."""


def checked(path: str) -> str:
    """`path` itself if it is a relative, `/`-separated path of plain names; UnsafePath for everything else.

    Names are ASCII letters, digits and `._+=@,-`, never `.` or `..`, so that a path means the same object on every store.
    """
    if len(path) > _LONGEST:
        raise UnsafePath(f"a path of {len(path)} characters is too long for a store ({_LONGEST} at most): {path[:60]!r}...")
    for part in path.split("/"):
        if part in {".", ".."} or _PART.fullmatch(part) is None:
            raise UnsafePath(f"{path!r} doesn't name an object of a store: {part!r} isn't allowed in it")
    return path
