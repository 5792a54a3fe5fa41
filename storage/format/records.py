"""Small sealed JSON objects beside the versions (tags, leases, lineages, retirements); owns their envelope, not their fields."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from storage.errors import Damaged, ObjectMissing
from storage.format.commit import FORMAT, JSON, sealed, unsealed
from storage.objects.store import ObjectStore
from storage.version import Version


def encoded(fields: Mapping[str, JSON]) -> bytes:
    """The record as the bytes of its object: the format's number, `fields`, and a checksum over both."""
    return sealed(json.dumps({"format": FORMAT, **fields}, separators=(",", ":")).encode())


def read(store: ObjectStore, path: str) -> dict[str, Any] | None:
    """The fields of the record at `path`, None if it isn't there; Damaged or UnknownFormat."""
    try:
        data = store.read(path)
    except ObjectMissing:
        return None
    return unsealed(data, path, store.url)


def version_of(record: Mapping[str, Any], path: str, store: ObjectStore) -> Version:
    """The version that a record names in its field `version`; Damaged if that isn't one."""
    try:
        return Version.parse(str(record.get("version")))
    except ValueError as error:
        raise Damaged(what=path, reason=f"names no version: {str(record.get('version'))[:40]!r}", url=store.url) from error
