"""Publishes and pulls versions of a model's weights; owns the background publish, not what a version is trained on."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import MappingProxyType
from typing import Any

import torch

from storage.commit import JSON, Commit
from storage.objects import ObjectStore
from storage.packing import pack
from storage.version import Version
from storage.versions import VersionedStore

__all__ = ["Commit", "JSON", "Publication", "WeightStore"]

_NOTHING: Mapping[str, JSON] = MappingProxyType({})


class Publication:
    """A publish under way."""

    def __init__(self, version: Version, future: Future[Commit]) -> None:
        self.version = version
        self._future = future

    def done(self) -> bool:
        """Whether `result` would return or raise at once."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> Version:
        """The version, once it exists. VersionTaken if another publisher won, StoreUnreachable if the store failed,
        TimeoutError after `timeout` seconds (the publish goes on)."""
        return self._future.result(timeout).version


class WeightStore:
    """Versions of a model's weights at `url`: a local path, or any URL that fsspec opens with `storage_options`.

    A version exists from one moment on, whole, or not at all, whatever dies meanwhile; it never changes. Travels by pickle
    (without publishes under way), and can be used from threads and in spawned processes; after a fork, make a new one.
    """

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None = None) -> None:
        self._open(ObjectStore(url, storage_options))

    @classmethod
    def over(cls, objects: ObjectStore) -> WeightStore:
        """The weights in an object store that is open already."""
        weights = cls.__new__(cls)
        weights._open(objects)
        return weights

    def _open(self, objects: ObjectStore) -> None:
        self._versioned = VersionedStore(objects)
        # One thread: versions are committed in the order in which they were published.
        self._publisher = ThreadPoolExecutor(1, thread_name_prefix="publish")

    def __repr__(self) -> str:
        return f"WeightStore({self.url!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return WeightStore.over, (self._versioned.store,)

    @property
    def url(self) -> str:
        return self._versioned.store.url

    @property
    def objects(self) -> ObjectStore:
        """The objects that the versions are made of."""
        return self._versioned.store

    def publish(
        self, state: Mapping[str, torch.Tensor], *, version: Version, parent: Version | None = None, metadata: Mapping[str, JSON] = _NOTHING
    ) -> Publication:
        """Copies the tensors and returns; the copy is then written, and committed as `version`, in the background.

        `parent` is the version that training started from, `metadata` anything that JSON can say of this one. The caller may
        change the tensors as soon as this returns. UnsupportedTensor or, for metadata that isn't JSON, TypeError or ValueError.
        """
        said = json.loads(json.dumps(dict(metadata), allow_nan=False))
        packed = pack(state)
        future = self._publisher.submit(self._versioned.put, version, packed, parent=parent, metadata=said, documents={})
        return Publication(version, future)

    def pull(
        self, version: Version | None = None, *, names: Iterable[str] | None = None, out: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        """The tensors of `version` (default: `newest()`), or the named ones, every byte checked.

        Those in `out` are read into the tensors given there, of the same shape and type, on any device; the others are new, on
        the CPU. Tied tensors come back as one. VersionMissing, Damaged, UnknownFormat, UnknownTensor or TensorMismatch; after
        an error the content of `out` is undefined.
        """
        return self._versioned.tensors(self.commit(self._versioned.resolve(version)), names, out=dict(out or {}))

    def newest(self, lineage: int | None = None) -> Version | None:
        """The last version of `lineage` (default: the newest lineage) or, while it has none, the one it branched off; None in an
        empty store. Never a version of an abandoned tail."""
        return self._versioned.newest(lineage)

    def versions(self) -> list[Version]:
        """All versions that exist, ascending, abandoned tails included."""
        return self._versioned.versions()

    def commit(self, version: Version) -> Commit:
        """What a version holds and where it came from, without its tensors. VersionMissing, Damaged or UnknownFormat."""
        return self._versioned.commit(version)

    def open_lineage(self, parent: Version | None) -> int:
        """The number of a new lineage that goes on from `parent` (None: from nothing), which no other caller gets.

        From now on `newest()` is of this lineage. VersionMissing if there is no such parent.
        """
        return self._versioned.open_lineage(parent)

    def check_writable(self) -> None:
        """Raises one StoreUnreachable that says what to do unless versions can be published here."""
        self._versioned.store.check_writable()
