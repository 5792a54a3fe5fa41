"""The Zarr v3 metadata objects of a version's group; zarr-python itself writes them, so that any Zarr reader opens the arrays."""

from __future__ import annotations

from functools import lru_cache

import zarr
from zarr.codecs import BytesCodec, Crc32cCodec
from zarr.core.buffer import Buffer
from zarr.storage import MemoryStore

from storage.format.dtypes import ZARR_OF


@lru_cache(maxsize=32)
def metadata_objects(arrays: tuple[tuple[str, str, int, int], ...]) -> dict[str, bytes]:
    """Key -> bytes of the `zarr.json` objects of a group with these 1-D arrays: (name, torch type, length, chunk).

    Kept for equal shapes, since a run publishes the same ones at every step. Chunks are little-endian values and Zarr's
    crc32c; all of them are written, also those of zeros, since a reader takes an absent chunk for zeros.
    """
    kept: dict[str, Buffer] = {}
    group = zarr.create_group(MemoryStore(kept))
    for name, dtype, length, chunk in arrays:
        group.create_array(
            name, shape=(length,), chunks=(chunk,), dtype=ZARR_OF[dtype], serializer=BytesCodec(endian="little"),
            compressors=Crc32cCodec(), filters=(), fill_value=0, attributes={"dtype": dtype}, config={"write_empty_chunks": True},
        )  # fmt: skip
    return {key: value.to_bytes() for key, value in kept.items()}
