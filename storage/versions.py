"""A store of immutable versions, each a set of tensors and documents under one commit; what weights and checkpoints have in common."""

from __future__ import annotations

import hashlib
import logging
import time
import uuid
from collections.abc import Iterable, Mapping

import torch

from storage import layout
from storage.chunks import write_chunk
from storage.commit import FORMAT, JSON, Commit, decode, encode
from storage.errors import Damaged, ObjectMissing, StoreError, VersionMissing, VersionTaken
from storage.index import ArrayEntry, ObjectEntry
from storage.lineages import Lineages
from storage.objects import ObjectStore
from storage.packing import Packed
from storage.parallel import side_by_side
from storage.unpacking import Unpacker
from storage.version import Version
from storage.zarr_metadata import metadata_objects

_log = logging.getLogger(__name__)


class VersionedStore:
    """Versions in `store`: data first, in a folder that only its attempt writes to, then the commit, which makes it exist.

    Holds no state of its own but the store, so any number of processes can use the same place.
    """

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self._lineages = Lineages(store)

    def versions(self) -> list[Version]:
        """All versions that exist, ascending, abandoned tails included."""
        found = (layout.commit_version(path) for path in self.store.list(layout.COMMITS))
        return sorted(version for version in found if version is not None)

    def newest(self, lineage: int | None = None) -> Version | None:
        """See `Lineages.newest`."""
        return self._lineages.newest(self.versions(), lineage)

    def open_lineage(self, parent: Version | None) -> int:
        """See `Lineages.open`."""
        return self._lineages.open(parent, self.versions())

    def commit(self, version: Version) -> Commit:
        """What `version` holds. VersionMissing, Damaged or UnknownFormat."""
        path = layout.commit_path(version)
        try:
            data = self.store.read(path)
        except ObjectMissing as error:
            raise VersionMissing(version, self.store.url) from error
        return decode(data, version, path, self.store.url)

    def resolve(self, version: Version | None) -> Version:
        """`version`, or the newest one for None; VersionMissing if there is none."""
        found = self.newest() if version is None else version
        if found is None:
            raise VersionMissing(None, self.store.url)
        return found

    def put(
        self, version: Version, packed: Packed, *, parent: Version | None, metadata: Mapping[str, JSON], documents: Mapping[str, bytes]
    ) -> Commit:
        """Writes the data, then the commit. VersionTaken if another one's commit is there: ours is then deleted."""
        if self.store.exists(layout.commit_path(version)):
            raise VersionTaken(version, self.store.url)
        attempt = uuid.uuid4().hex
        prefix = layout.data_prefix(version, attempt)
        folder = self.store.child(prefix)
        described = tuple((name, a.dtype, a.length, a.chunk) for name, a in packed.arrays.items())
        objects = tuple(_put_object(folder, key, data) for key, data in metadata_objects(described).items())
        jobs = [(name, number) for name, array in packed.arrays.items() for number in range(len(array.image))]
        entries = side_by_side(lambda job: write_chunk(folder, job[0], packed.arrays[job[0]], job[1]), jobs, self.store.parallel)
        chunks = dict(zip(jobs, entries, strict=True))
        commit = Commit(
            format=FORMAT,
            requires=(),
            version=version,
            parent=parent,
            base=None,
            attempt=attempt,
            created=time.time(),
            arrays={
                name: ArrayEntry(a.dtype, a.length, a.chunk, layout.BLOCK_BYTES, tuple(chunks[name, i] for i in range(len(a.image))))
                for name, a in packed.arrays.items()
            },
            tensors=packed.tensors,
            objects=objects,
            documents={name: _put_object(folder, f"documents/{name}.json", data) for name, data in documents.items()},
            metadata=dict(metadata),
        )
        if not self.store.create(layout.commit_path(version), encode(commit)) and self.commit(version).attempt != attempt:
            # (A client that repeated its request after a lost reply is refused by its own commit: then it is ours.)
            self._drop(prefix)
            raise VersionTaken(version, self.store.url)
        return commit

    def tensors(self, commit: Commit, names: Iterable[str] | None = None, out: Mapping[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        """See `Unpacker.read`."""
        folder = self.store.child(layout.data_prefix(commit.version, commit.attempt))
        return Unpacker(folder, commit).read(names, out)

    def document(self, commit: Commit, name: str) -> bytes:
        """The bytes of one of a commit's documents; Damaged if they aren't what was written."""
        entry = commit.documents[name]
        path = f"{layout.data_prefix(commit.version, commit.attempt)}/{entry.key}"
        try:
            data = self.store.read(path)
        except ObjectMissing as error:
            raise Damaged(what=path, reason="is missing", url=self.store.url, version=commit.version) from error
        if len(data) != entry.bytes or hashlib.sha256(data).hexdigest() != entry.sha256:
            raise Damaged(what=path, reason="is cut short or changed", url=self.store.url, version=commit.version)
        return data

    def _drop(self, prefix: str) -> None:
        try:
            self.store.delete(prefix, recursive=True)
        except StoreError as error:  # what stays belongs to no version and does no harm but to space
            _log.warning("data of a lost race stays in %s: %s", self.store.url, error)


def _put_object(folder: ObjectStore, key: str, data: bytes) -> ObjectEntry:
    folder.write(key, data)
    return ObjectEntry(key, len(data), hashlib.sha256(data).hexdigest())
