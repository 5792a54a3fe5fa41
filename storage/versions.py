"""A store of immutable versions, each a set of tensors and documents under one commit; what weights and checkpoints have in common."""

from __future__ import annotations

import hashlib
import logging
import time
import uuid
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import torch

from storage import layout
from storage.chunks import ArrayReader, ChunkReader, Folder
from storage.commit import FORMAT, JSON, Commit, decode, encode
from storage.errors import Damaged, ObjectMissing, StoreError, VersionMissing, VersionTaken
from storage.lineages import Lineages
from storage.objects import ObjectStore
from storage.packing import Packed
from storage.selection import Slices
from storage.unpacking import NO_SLICES, NO_TENSORS, Unpacker
from storage.version import Version
from storage.writing import put_object, write_arrays

_NOTHING: Mapping[str, JSON] = MappingProxyType({})
_NO_BYTES: Mapping[str, bytes] = MappingProxyType({})

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
        self,
        version: Version,
        packed: Packed,
        *,
        parent: Version | None = None,
        metadata: Mapping[str, JSON] = _NOTHING,
        documents: Mapping[str, bytes] = _NO_BYTES,
    ) -> Commit:
        """Writes the data, then the commit. VersionTaken if another one's commit is there: ours is then deleted."""
        if self.store.exists(layout.commit_path(version)):
            raise VersionTaken(version, self.store.url)
        attempt = uuid.uuid4().hex
        prefix = layout.data_prefix(version, attempt)
        folder = self.store.child(prefix)
        arrays, objects = write_arrays(folder, packed.arrays)
        commit = Commit(
            format=FORMAT,
            requires=_requires(packed),
            version=version,
            parent=parent,
            base=packed.base,
            attempt=attempt,
            created=time.time(),
            arrays=arrays,
            deltas=packed.deltas,
            tensors=packed.tensors,
            objects=objects,
            documents={name: put_object(folder, f"documents/{name}.json", data) for name, data in documents.items()},
            metadata=dict(metadata),
        )
        if not self.store.create(layout.commit_path(version), encode(commit)) and self.commit(version).attempt != attempt:
            # (A client that repeated its request after a lost reply is refused by its own commit: then it is ours.)
            self._drop(prefix)
            raise VersionTaken(version, self.store.url)
        return commit

    def readers(self, commit: Commit) -> dict[str, ArrayReader]:
        """What gives the values of each of a version's arrays and deltas, by name."""
        folder = Folder(self.store.child(layout.data_prefix(commit.version, commit.attempt)), commit.version)
        return {name: ChunkReader(folder, array) for name, array in commit.arrays.items()}

    def tensors(
        self,
        commit: Commit,
        names: Iterable[str] | None = None,
        *,
        slices: Mapping[str, Slices] = NO_SLICES,
        device: torch.device | str | None = None,
        out: Mapping[str, torch.Tensor] = NO_TENSORS,
    ) -> dict[str, torch.Tensor]:
        """See `Unpacker.read`."""
        return Unpacker(commit, self.readers(commit), self.store.parallel).read(names, slices, device, out)

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


def _requires(packed: Packed) -> tuple[str, ...]:
    """Features that a reader of this version has to have; none for a full one of one writer, which every release reads."""
    shards = any(tensor.shards for tensor in packed.tensors.values())
    return tuple(name for name, used in (("deltas", packed.deltas), ("shards", shards)) if used)
