"""What a listing says of an object; plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True, slots=True)
class ObjectInfo:
    """An object's path, size in bytes, and when it was last written, in seconds since 1970 by the store's own clock."""

    path: str
    bytes: int
    modified: float
