"""Versions that several ranks write together, each its own arrays; owns the order of it, not what makes a version exist."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import MappingProxyType

from storage.arrays.packing import Packed
from storage.arrays.parts import Part, Shard, decode_part, encode_part, held_tensors, merged, part_key
from storage.arrays.writing import write_arrays
from storage.errors import ObjectMissing, PartRefused, PartsMissing, ShardsRefused
from storage.format import layout
from storage.format.commit import FORMAT, JSON, Commit
from storage.format.index import IndexRefused, check_attempt
from storage.format.whole_objects import put_object
from storage.model_files import check_file_names, put_files
from storage.objects.parallel import side_by_side
from storage.version import Version
from storage.versions import VersionedStore, requires

_NOTHING: Mapping[str, JSON] = MappingProxyType({})
_NO_BYTES: Mapping[str, bytes] = MappingProxyType({})


class PartedVersions:
    """Parts of versions in `versioned`. A rank's record comes after its data; the commit, after all records, makes the version exist."""

    def __init__(self, versioned: VersionedStore) -> None:
        self._versioned = versioned

    def write(self, packed: Packed, version: Version, attempt: str, rank: int, ranks: int, shards: Mapping[str, Shard]) -> None:
        """Writes a rank's arrays, whose names end in `array_suffix(rank)`, then its record. See `WeightStore.publish_part`."""
        _check(attempt, ranks)
        if type(rank) is not int or not 0 <= rank < ranks:
            raise PartRefused(f"there is no rank {rank!r} among {ranks} ranks: they are numbers that count from 0")
        held = held_tensors(packed, shards)
        self._versioned.check_free(version)
        started = time.time()
        folder = self._versioned.store.child(layout.data_prefix(version, attempt))
        with folder.together():
            arrays, objects = write_arrays(folder, packed.arrays)
        folder.write(part_key(rank), encode_part(Part(FORMAT, version, attempt, rank, ranks, started, arrays, held, objects)))

    def commit(
        self,
        version: Version,
        attempt: str,
        ranks: int,
        *,
        parent: Version | None = None,
        metadata: Mapping[str, JSON] = _NOTHING,
        files: Mapping[str, bytes] = _NO_BYTES,
        documents: Mapping[str, bytes] = _NO_BYTES,
    ) -> Commit:
        """Makes one commit of the ranks' records. See `WeightStore.commit_parts`."""
        _check(attempt, ranks)
        check_file_names(files)
        self._versioned.check_free(version)
        parts = self._read(version, attempt, ranks)
        tensors = merged(parts)
        # (The group's own metadata is equal on all ranks, and in all their records.)
        objects = {entry.key: entry for part in parts for entry in part.objects}
        folder = self._versioned.store.child(layout.data_prefix(version, attempt))
        commit = Commit(
            format=FORMAT,
            requires=requires(tensors, {}),
            version=version,
            parent=parent,
            base=None,
            attempt=attempt,
            created=time.time(),
            arrays={name: array for part in parts for name, array in part.arrays.items()},
            tensors=tensors,
            objects=tuple(objects.values()),
            files=put_files(self._versioned.store, files),
            documents={name: put_object(folder, f"documents/{name}.json", data) for name, data in documents.items()},
            metadata=dict(metadata),
        )
        return self._versioned.make(commit, min(part.started for part in parts))

    def _read(self, version: Version, attempt: str, ranks: int) -> list[Part]:
        store = self._versioned.store
        prefix = layout.data_prefix(version, attempt)

        def part(rank: int) -> Part | None:
            path = f"{prefix}/{part_key(rank)}"
            try:
                data = store.read(path)
            except ObjectMissing:
                return None
            return decode_part(data, version, attempt, rank, path, store.url)

        found = side_by_side(part, range(ranks), store.parallel)
        missing = tuple(rank for rank, one in enumerate(found) if one is None)
        if missing:
            raise PartsMissing(version, missing, store.url)
        parts = [one for one in found if one is not None]
        for one in parts:
            if one.ranks != ranks:
                raise ShardsRefused(f"rank {one.rank} wrote its part of version {version} as one of {one.ranks} ranks, and {ranks} are committed")
        return parts


def _check(attempt: str, ranks: int) -> None:
    """PartRefused unless so many ranks can write parts of such an attempt."""
    if type(ranks) is not int or ranks < 1:
        raise PartRefused(f"a version can't be made of the parts of {ranks!r} ranks: give their number")
    try:
        check_attempt(attempt)
    except (IndexRefused, TypeError) as error:
        raise PartRefused(f"{attempt!r:.60} can't be an attempt, which new_attempt() makes once for all ranks: {error}") from error
