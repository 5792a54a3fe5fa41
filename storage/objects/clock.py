"""The time by a store's own clock, which is the one that all ages in it are counted by; owns no other clock."""

from __future__ import annotations

import uuid

from storage.errors import StoreUnreachable
from storage.objects import paths
from storage.objects.store import ObjectStore


def store_time(store: ObjectStore) -> float:
    """Seconds since 1970 by the clock that gives `store`'s objects their times: one is written, looked at and removed.

    Stores tell times in seconds or finer. StoreUnreachable if the store doesn't list what was just written.
    """
    path = f"{paths.CLOCK}/{uuid.uuid4().hex}"
    store.write(path, b"clock")
    try:
        for info in store.infos(paths.CLOCK):
            if info.path == path:
                return info.modified
    finally:
        store.delete(path)
    raise StoreUnreachable(f"{store.url} doesn't list {path}, which was just written there: use a store with consistent listings")
