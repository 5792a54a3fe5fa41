"""Puts records that keep a version (tags, leases) so that no collector misses them; owns that order, not what the records say."""

from __future__ import annotations

from collections.abc import Mapping

from storage.errors import VersionMissing
from storage.format import layout, records
from storage.format.commit import JSON
from storage.objects.store import ObjectStore
from storage.version import Version


def claim(store: ObjectStore, path: str, version: Version, fields: Mapping[str, JSON]) -> None:
    """Puts the record of a claim on `version` at `path`, in place of any that was there.

    VersionMissing, and nothing is written, if there is no such version; if it is collected at this very moment, no record is left.
    StoreUnreachable.
    """
    commit = layout.commit_path(version)
    if store.exists(commit):
        store.write(path, records.encoded({"version": str(version), **fields}))
        # A collector deletes a commit first and looks at the claims then; so one of the two sees what the other did.
        if store.exists(commit):
            return
        store.delete(path)
    store.list(layout.COMMITS)  # (raises where there is no bucket, which looks the same to one who asks for an object)
    raise VersionMissing(version, store.url)
