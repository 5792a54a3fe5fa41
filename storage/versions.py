"""A store of immutable versions, each a set of tensors and documents under one commit; what weights and checkpoints have in common."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType

import torch

from storage.arrays.chunks import ArrayReader
from storage.arrays.packing import Packed
from storage.arrays.selection import Slices
from storage.arrays.unpacking import NO_SLICES, NO_TENSORS, Unpacker
from storage.arrays.writing import new_attempt, write_arrays
from storage.deltas.chains import chain, links_of, readers_of
from storage.deltas.updating import can_update, update
from storage.errors import PublishTooLong, StoreError, VersionMissing, VersionPassed, VersionTaken
from storage.format import layout
from storage.format.commit import FORMAT, JSON, Commit, encode
from storage.format.commits import read_commit, versions_in
from storage.format.index import DeltaEntry, TensorEntry
from storage.format.whole_objects import put_object, read_object
from storage.keeping.leases import Leases
from storage.keeping.lineages import Lineages
from storage.keeping.retirement import Retirements
from storage.keeping.verification import Verification, verify
from storage.model_files import check_file_names, put_files
from storage.objects.parallel import in_flight
from storage.objects.store import ObjectStore
from storage.progress import Progress
from storage.refs import Reference, resolve
from storage.version import Version

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
        return versions_in(self.store)

    def newest(self, lineage: int | None = None) -> Version | None:
        """See `Lineages.newest`."""
        return self._lineages.newest(self.versions(), lineage)

    def open_lineage(self, parent: Version | None) -> int:
        """See `Lineages.open`."""
        return self._lineages.open(parent, self.versions())

    def commit(self, version: Version) -> Commit:
        """What `version` holds. VersionMissing, Damaged or UnknownFormat."""
        return read_commit(self.store, version)

    def needed_commit(self, version: Version) -> Commit:
        """The commit of a version that another one's data needs: also of one that was retired since its reader began, while its data
        is there. VersionMissing, Damaged or UnknownFormat."""
        try:
            return self.commit(version)
        except VersionMissing:
            retired = Retirements(self.store).commit(version)
            if retired is None:
                raise
            return retired

    def resolve(self, ref: Reference | None) -> Version:
        """The version that `ref` (a version, `0-42`, a tag, `newest`, or None for the newest) names.

        VersionMissing if it is the newest and there is none, UnknownTag, BadReference.
        """
        return resolve(ref, self.store, self.newest)

    def next_lineage(self) -> int:
        """The lineage that the next version is of unless its publisher says otherwise: the newest; 0 in an empty store."""
        return self._lineages.last(self.versions()) or 0

    def check_free(self, version: Version) -> None:
        """VersionTaken if there is such a version, VersionPassed if its lineage has gone on past it."""
        later = [found for found in self.versions() if found.lineage == version.lineage and found >= version]
        if version in later:
            raise VersionTaken(version, self.store.url)
        if later:
            raise VersionPassed(version, max(later), self.store.url)

    def put(
        self,
        version: Version,
        packed: Packed,
        *,
        parent: Version | None = None,
        metadata: Mapping[str, JSON] = _NOTHING,
        documents: Mapping[str, bytes] = _NO_BYTES,
        files: Mapping[str, bytes] = _NO_BYTES,
    ) -> Commit:
        """Writes the data, then the commit.

        VersionTaken if another one's commit is there, VersionPassed if one of a later version of the lineage is, PublishTooLong:
        what of ours was written is then deleted. VersionMissing, before anything is written, if the version that `packed` is changes
        of isn't there.
        """
        check_file_names(files)
        self.check_free(version)
        with self._held(packed.base, f"publish of {version}"):
            return self._put(version, packed, parent, metadata, documents, files)

    def _put(
        self,
        version: Version,
        packed: Packed,
        parent: Version | None,
        metadata: Mapping[str, JSON],
        documents: Mapping[str, bytes],
        files: Mapping[str, bytes],
    ) -> Commit:
        started = time.time()
        attempt = new_attempt()
        prefix = layout.data_prefix(version, attempt)
        folder = self.store.child(prefix)
        try:
            with folder.together():
                arrays, objects = write_arrays(folder, packed.arrays)
                said = {name: put_object(folder, f"documents/{name}.json", data) for name, data in documents.items()}
            kept = put_files(self.store, files)
        except StoreError:
            self._drop(prefix)
            raise
        commit = Commit(
            format=FORMAT,
            requires=requires(packed.tensors, packed.deltas),
            version=version,
            parent=parent,
            base=packed.base,
            attempt=attempt,
            created=time.time(),
            arrays=arrays,
            tensors=packed.tensors,
            objects=objects,
            documents=said,
            files=kept,
            deltas=packed.deltas,
            metadata=dict(metadata),
        )
        return self.make(commit, started)

    def make(self, commit: Commit, started: float) -> Commit:
        """Makes a version exist whose data is there; `started`: when the first of it was written, in seconds since 1970.

        VersionTaken, PublishTooLong, or ValueError for a commit that is too large to be read: the data is then deleted.
        """
        version, prefix = commit.version, layout.data_prefix(commit.version, commit.attempt)
        # (By the clock on the wall, since a machine that slept has left data behind that others may think dead.)
        took = time.time() - started
        if took > layout.LONGEST_PUBLISH_S:
            self._drop(prefix)
            raise PublishTooLong(version, took, layout.LONGEST_PUBLISH_S, self.store.url)
        try:
            data = encode(commit)
        except ValueError:
            self._drop(prefix)
            raise
        if not self.store.create(layout.commit_path(version), data) and self.commit(version).attempt != commit.attempt:
            # (A client that repeated its request after a lost reply is refused by its own commit: then it is ours.)
            self._drop(prefix)
            raise VersionTaken(version, self.store.url)
        return commit

    def chain(self, commit: Commit, held: Version | None = None) -> list[Commit]:
        """See `chains.chain`."""
        return chain(commit, self.needed_commit, self.store.url, held)

    def readers(self, commit: Commit) -> dict[str, ArrayReader]:
        """What gives the values of each of a version's arrays and deltas, by name."""
        return readers_of(self.store, self.chain(commit))

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
        return Unpacker(commit, self.readers(commit), self._in_flight(commit)).read(names, slices, device, out)

    def updated(self, commit: Commit, held: Version, out: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """All tensors of a version: those in `out`, which hold all of version `held`, by its changes where that can be, or else read
        anew. See `updating.update`."""
        commits = self.chain(commit, held)
        links = links_of(self.store, commits) if commits[-1].base == held else {}
        if can_update(commit, links, out):
            return update(commit, links, out, self._in_flight(commit))
        return self.tensors(commit, out=out)

    def verify(self, ref: Reference | None, progress: Progress | None) -> Verification:
        """See `verification.verify`; VersionMissing for a version that isn't there. Its commit may be damaged: that is in the result."""
        if ref is None:
            return verify(self.store, None, progress)
        version = self.resolve(ref)
        if version not in self.versions():
            raise VersionMissing(version, self.store.url)
        return verify(self.store, [version], progress)

    def document(self, commit: Commit, name: str) -> bytes:
        """The bytes of one of a commit's documents; Damaged if they aren't what was written."""
        entry = commit.documents[name]
        return read_object(self.store, f"{layout.data_prefix(commit.version, commit.attempt)}/{entry.key}", entry, commit)

    def _in_flight(self, commit: Commit) -> int:
        sizes = [*(array.chunk_bytes for array in commit.arrays.values()), *(delta.chunk_bytes for delta in commit.deltas.values())]
        return in_flight(self.store, max(sizes, default=0))

    def _held(self, base: Version | None, holder: str) -> AbstractContextManager[object]:
        """Keeps a version that another one's data needs from being collected before that one's commit says so."""
        return nullcontext() if base is None else Leases(self.store).take(base, layout.LONGEST_PUBLISH_S, holder)

    def _drop(self, prefix: str) -> None:
        try:
            self.store.delete(prefix, recursive=True)
        except StoreError as error:  # what stays belongs to no version and does no harm but to space
            _log.warning("data of an attempt that came to nothing stays in %s: %s", self.store.url, error)


def requires(tensors: Mapping[str, TensorEntry], deltas: Mapping[str, DeltaEntry]) -> tuple[str, ...]:
    """Features that a reader of a version has to have; none for a full one of one writer, which every release reads."""
    shards = any(tensor.shards for tensor in tensors.values())
    return tuple(name for name, used in (("deltas", deltas), ("shards", shards)) if used)
