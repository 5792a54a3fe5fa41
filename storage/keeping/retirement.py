"""How one version goes: its commit first, kept in a record, its data after a grace period; owns the record and the order of writes.

`retired/<version>.json` holds the commit from before it is deleted until its data is. So a reader that had begun can still read all
that the commit names, a commit can be put back, and whoever finds the record can finish what a killed collector began. The time
since a version was retired is the record's age by the store's clock.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass

from storage.errors import Damaged, VersionMissing
from storage.format import layout, records
from storage.format.commit import JSON, Commit, decode
from storage.format.commits import read_stored
from storage.objects.store import ObjectStore
from storage.version import Version

STALL_S = 60.0
"""A collector that took longer than this from a record to the deletion that follows it leaves the version as it is, since another one
may have taken the record for an old one meanwhile."""


@dataclass(frozen=True, slots=True)
class Retired:
    """A version on its way out, as its record says: its commit, the commit's bytes, and whether its data is being deleted (`gone`).

    `token` differs between two records of one version; `since` is the record's time by the store's clock.
    """

    version: Version
    commit: Commit
    data: bytes
    token: str
    gone: bool
    since: float


class Retirements:
    """The records of versions of `store` that are on their way out."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def all(self) -> list[Retired]:
        """Every record, by version. Damaged or UnknownFormat names the object that is."""
        infos = {layout.retired_version(info.path): info.modified for info in self._store.infos(layout.RETIRED)}
        found = (self.find(version, since) for version, since in infos.items() if version is not None)
        return sorted((retired for retired in found if retired is not None), key=lambda retired: retired.version)

    def find(self, version: Version, since: float = 0.0) -> Retired | None:
        """The record of `version`, None if there is none; `since` is its time, which only a listing tells. Damaged, UnknownFormat."""
        path = layout.retired_path(version)
        record = records.read(self._store, path)
        if record is None:
            return None
        data, token, gone = record.get("commit"), record.get("token"), record.get("gone")
        if not (isinstance(data, str) and isinstance(token, str) and isinstance(gone, bool)):
            raise Damaged(what=path, reason="lacks what it should say of its version", url=self._store.url, version=version)
        return Retired(version, decode(data.encode(), version, path, self._store.url), data.encode(), token, gone, since)

    def commit(self, version: Version) -> Commit | None:
        """The commit of a version that was retired and whose data is still there, for a reader that had begun before; else None."""
        found = self.find(version)
        return None if found is None or found.gone else found.commit

    def retire(self, version: Version, attempt: str) -> bool:
        """Makes `version`, if its commit is still that of `attempt`, one that doesn't exist, with its data kept; whether it did."""
        try:
            commit, data = read_stored(self._store, version)
        except VersionMissing:
            return False
        if commit.attempt != attempt:
            return False
        begun = time.monotonic()
        self._write(version, data, gone=False)
        if time.monotonic() - begun > STALL_S:
            return False
        self._store.delete(layout.commit_path(version))
        return True

    def restore(self, retired: Retired) -> bool:
        """Makes a retired version exist again; False if its data is being deleted already, or if it was published anew. The record
        stays until it is old: another collector may be about to delete the commit on its strength."""
        path = layout.commit_path(retired.version)
        if not self._store.create(path, retired.data) and not self._is_there(retired):
            return False
        now = self.find(retired.version)
        if now is None or now.gone:
            if self._is_there(retired):
                self._store.delete(path)
            return False
        return True

    def _is_there(self, retired: Retired) -> bool:
        """Whether the commit that exists is that of `retired`, rather than none or another attempt's."""
        try:
            commit, _ = read_stored(self._store, retired.version)
        except VersionMissing:
            return False
        return commit.attempt == retired.commit.attempt

    def unchanged(self, retired: Retired) -> bool:
        """Whether the record is still the one that `retired` was read from."""
        now = self.find(retired.version)
        return now is not None and now.token == retired.token

    def finish(self, retired: Retired) -> None:
        """Deletes the version's data, then the record. Killed on the way, it is to be called again."""
        if not retired.gone:
            self._write(retired.version, retired.data, gone=True)
        self._store.delete(layout.data_prefix(retired.version, retired.commit.attempt), recursive=True)
        self.forget(retired)

    def forget(self, retired: Retired) -> None:
        """Deletes the record alone: of a version that exists again, or that has no data any more."""
        self._store.delete(layout.retired_path(retired.version))

    def _write(self, version: Version, data: bytes, *, gone: bool) -> None:
        fields: dict[str, JSON] = {"version": str(version), "token": uuid.uuid4().hex, "gone": gone, "commit": data.decode()}
        self._store.write(layout.retired_path(version), records.encoded(fields))
