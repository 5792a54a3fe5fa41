"""Puts arrays into an attempt's folder; owns their order, and makes no version exist."""

from __future__ import annotations

import uuid
from collections.abc import Mapping

from storage.arrays.chunks import write_chunk
from storage.arrays.packing import ArrayValues, chunk_count
from storage.format import layout
from storage.format.dtypes import ITEMSIZE
from storage.format.index import ArrayEntry, ObjectEntry
from storage.format.whole_objects import put_object
from storage.format.zarr_metadata import metadata_objects
from storage.objects.parallel import in_flight, side_by_side
from storage.objects.store import ObjectStore


def new_attempt() -> str:
    """A name that no other attempt at any version has."""
    return uuid.uuid4().hex


def write_arrays(folder: ObjectStore, arrays: Mapping[str, ArrayValues]) -> tuple[dict[str, ArrayEntry], tuple[ObjectEntry, ...]]:
    """Writes all chunks of the arrays and the Zarr metadata of their group; what a commit says of both."""
    described = tuple((name, array.dtype, array.length, array.chunk) for name, array in arrays.items())
    objects = tuple(put_object(folder, key, data) for key, data in metadata_objects(described).items())
    jobs = [(name, number) for name, array in arrays.items() for number in range(chunk_count(array))]
    parallel = in_flight(folder, max((array.chunk * ITEMSIZE[array.dtype] for array in arrays.values()), default=0), writing=True)
    chunks = dict(zip(jobs, side_by_side(lambda job: write_chunk(folder, job[0], arrays[job[0]], job[1]), jobs, parallel), strict=True))
    entries = {
        name: ArrayEntry(array.dtype, array.length, array.chunk, layout.BLOCK_BYTES, tuple(chunks[name, i] for i in range(chunk_count(array))))
        for name, array in arrays.items()
    }
    return entries, objects
