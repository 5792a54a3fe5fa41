"""Saves and loads what a run needs to go on: tensors and JSON documents in one commit; owns no training state itself."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from storage.arrays.packing import pack
from storage.arrays.parts import Shard, array_suffix
from storage.arrays.selection import Slices
from storage.arrays.unpacking import NO_SLICES
from storage.errors import Damaged
from storage.format.commit import JSON, Commit
from storage.keeping.collection import Collection, collect
from storage.keeping.retention import Retention
from storage.keeping.verification import Verification
from storage.objects.store import ObjectStore
from storage.parted import PartedVersions
from storage.progress import Progress
from storage.refs import Reference
from storage.version import Version
from storage.versions import VersionedStore

__all__ = ["Checkpoint", "CheckpointStore"]

_NO_SHARDS: Mapping[str, Shard] = MappingProxyType({})

_DOCUMENT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A run's state after `version.step` steps of lineage `version.lineage`."""

    version: Version
    arrays: dict[str, torch.Tensor]
    documents: dict[str, JSON]


class CheckpointStore:
    """Checkpoints at `url`: a local path, or any URL that fsspec opens with `storage_options`.

    A checkpoint exists whole or not at all, and saving one leaves the earlier ones as they are. On a local disk it has
    reached the disk when `save` returns. Travels by pickle.
    """

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None = None) -> None:
        self._versioned = VersionedStore(ObjectStore(url, storage_options, durable=True))

    @classmethod
    def over(cls, objects: ObjectStore) -> CheckpointStore:
        """The checkpoints in an object store that is open already."""
        checkpoints = cls.__new__(cls)
        checkpoints._versioned = VersionedStore(objects)
        return checkpoints

    def __repr__(self) -> str:
        return f"CheckpointStore({self.url!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return CheckpointStore.over, (self._versioned.store,)

    @property
    def url(self) -> str:
        return self._versioned.store.url

    def save(self, step: int, lineage: int, *, arrays: Mapping[str, torch.Tensor], documents: Mapping[str, JSON]) -> Version:
        """Writes tensors (weights, optimizer and random state) and documents by name, all in one commit; the version it has.

        VersionTaken if there is such a checkpoint. UnsupportedTensor; TypeError or ValueError for what isn't JSON, and for a
        document's name that isn't letters, digits and `_.-`.
        """
        version = Version(lineage, step)
        self._versioned.put(version, pack(arrays, copy=False), documents=_texts(documents))
        return version

    def save_part(
        self,
        arrays: Mapping[str, torch.Tensor],
        *,
        version: Version,
        attempt: str,
        rank: int,
        ranks: int,
        shards: Mapping[str, Shard] = _NO_SHARDS,
    ) -> None:
        """Writes what this one of `ranks` ranks holds of a checkpoint; `commit_parts` then makes it exist. See `WeightStore.publish_part`."""
        PartedVersions(self._versioned).write(pack(arrays, copy=False, suffix=array_suffix(rank)), version, attempt, rank, ranks, shards)

    def commit_parts(self, version: Version, attempt: str, ranks: int, *, documents: Mapping[str, JSON]) -> Version:
        """Makes a checkpoint exist, of the parts that `ranks` ranks have written as `attempt` and of `documents`.

        One process calls this, once. See `save` and `WeightStore.commit_parts`.
        """
        return PartedVersions(self._versioned).commit(version, attempt, ranks, documents=_texts(documents)).version

    def load(self, version: Reference | None = None, *, slices: Mapping[str, Slices] = NO_SLICES) -> Checkpoint:
        """The checkpoint of `version`, which may be spelled (`0-42`, `newest`; default: `newest()`), every byte that is read checked.

        `slices` cuts tensors by name, as in `WeightStore.pull`. VersionMissing, UnknownFormat, UnknownTensor, SliceRefused, or Damaged,
        which names the object that is cut short, changed or missing.
        """
        commit = self.commit(self._versioned.resolve(version))
        documents = {name: self._document(commit, name) for name in commit.documents}
        return Checkpoint(commit.version, self._versioned.tensors(commit, slices=slices), documents)

    def resolve(self, ref: Reference | None = None) -> Version:
        """The checkpoint that `ref` names; None means the newest. See `WeightStore.resolve`."""
        return self._versioned.resolve(ref)

    def newest(self, lineage: int | None = None) -> Version | None:
        """The last checkpoint of `lineage` (default: the newest lineage) or, while it has none, the one it branched off."""
        return self._versioned.newest(lineage)

    def versions(self) -> list[Version]:
        """All checkpoints that exist, ascending, abandoned tails included."""
        return self._versioned.versions()

    def commit(self, version: Version) -> Commit:
        """What a checkpoint holds, without its content. VersionMissing, Damaged or UnknownFormat."""
        return self._versioned.commit(version)

    def open_lineage(self, parent: Version | None) -> int:
        """The number of a new lineage that goes on from checkpoint `parent`; from now on `newest()` is of it."""
        return self._versioned.open_lineage(parent)

    def check_writable(self) -> None:
        """Raises one StoreUnreachable that says what to do unless checkpoints can be saved here."""
        self._versioned.store.check_writable()

    def gc(self, retention: Retention, *, grace_s: float, now: float | None = None, dry_run: bool = False) -> Collection:
        """Removes the checkpoints that `retention` doesn't keep; see `WeightStore.gc`."""
        return collect(self._versioned.store, retention, grace_s=grace_s, now=now, dry_run=dry_run)

    def verify(self, version: Reference | None = None, *, progress: Progress | None = None) -> Verification:
        """Reads all that one checkpoint (default: every one) consists of and checks every byte; see `WeightStore.verify`."""
        return self._versioned.verify(version, progress)

    def _document(self, commit: Commit, name: str) -> JSON:
        data = self._versioned.document(commit, name)
        try:
            found: JSON = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise Damaged(what=commit.documents[name].key, reason="isn't JSON", url=self.url, version=commit.version) from error
        return found


def _texts(documents: Mapping[str, JSON]) -> dict[str, bytes]:
    """The documents as they are stored; TypeError or ValueError for what isn't JSON, and for a name that can't be an object's."""
    for name in documents:
        if _DOCUMENT_NAME.fullmatch(name) is None:
            raise ValueError(f"document name {name!r} isn't letters, digits, '_', '.' and '-'")
    return {name: json.dumps(document, allow_nan=False, separators=(",", ":")).encode() for name, document in documents.items()}
