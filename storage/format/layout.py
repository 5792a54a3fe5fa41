"""Where the objects of a store of versions are; owns the spelling of paths and the sizes, reads and writes nothing."""

from __future__ import annotations

import re
from collections.abc import Callable

from storage.version import Version

COMMITS = "commits"
DATA = "data"
FILES = "files"
LEASES = "leases"
LINEAGES = "lineages"
RETIRED = "retired"
TAGS = "tags"
FOLDERS = (COMMITS, RETIRED, LINEAGES, TAGS, LEASES, FILES, DATA)
"""All of them, those first whose listing is short."""

CHUNK_BYTES = 16 << 20
"""About how large a chunk is: large enough for a disk's or a bucket's full speed, small enough to hold a few in memory."""

BLOCK_BYTES = 64 << 10
"""What a chunk is checked in when only a part of it is read: one checksum each, in the commit."""

SEGMENT_BYTES = 1 << 20
"""What a change is encoded and checked in; a whole number of blocks, so that applying a part reads no more of the base than that."""

LONGEST_PUBLISH_S = 6 * 3600.0
"""A publish that has taken longer gives up before its commit, so that data without a commit which is older belongs to nobody."""

CHECKSUM_BYTES = 4
"""Zarr's crc32c codec appends this much to every chunk."""


_IN_ATTEMPT = re.compile(rf"({DATA}/v(\d{{1,6}})-(\d{{8,10}})-[0-9a-f]{{32}})/.+")
_FILE = re.compile(rf"{FILES}/[0-9a-f]{{64}}")


def commit_path(version: Version) -> str:
    return f"{COMMITS}/{version.lineage}-{version.step:08d}.json"


def commit_version(path: str) -> Version | None:
    """The version whose commit `path` is; None for any other object."""
    return _version_at(path, COMMITS, commit_path)


def data_prefix(version: Version, attempt: str) -> str:
    """The folder, and Zarr group, of one attempt's arrays; another attempt at the same version has another one."""
    return f"{DATA}/v{version.lineage}-{version.step:08d}-{attempt}"


def attempt_prefix(path: str) -> str | None:
    """The folder of the attempt that an object of data belongs to; None for any other object."""
    found = _IN_ATTEMPT.fullmatch(path)
    return None if found is None else found[1]


def prefix_version(prefix: str) -> Version:
    """The version that an attempt's folder is of. ValueError for any other folder."""
    found = _IN_ATTEMPT.fullmatch(prefix + "/x")
    if found is None:
        raise ValueError(f"{prefix!r} is no attempt's folder")
    return Version(int(found[2]), int(found[3]))


def lineage_path(lineage: int) -> str:
    return f"{LINEAGES}/{lineage:06d}.json"


def lineage_number(path: str) -> int | None:
    """The lineage whose record `path` is; None for any other object."""
    digits = path.removeprefix(LINEAGES + "/").removesuffix(".json")
    return int(digits) if digits.isascii() and digits.isdigit() and lineage_path(int(digits)) == path else None


def chunk_key(array: str, number: int) -> str:
    """Zarr v3's default key of a 1-D array's chunk."""
    return f"{array}/c/{number}"


def file_key(sha256: str) -> str:
    """Where a file of a model's folder is, by its content: versions with equal files share one object."""
    return f"{FILES}/{sha256}"


def is_file(path: str) -> bool:
    """Whether an object is a file of a model's folder."""
    return _FILE.fullmatch(path) is not None


def tag_path(name: str) -> str:
    return f"{TAGS}/{name}.json"


def tag_name(path: str) -> str | None:
    """The tag whose object `path` is; None for any other object."""
    name = path.removeprefix(TAGS + "/").removesuffix(".json")
    return name if "/" not in name and tag_path(name) == path else None


def lease_path(version: Version, token: str) -> str:
    return f"{LEASES}/{version}-{token}.json"


def retired_path(version: Version) -> str:
    return f"{RETIRED}/{version}.json"


def retired_version(path: str) -> Version | None:
    """The version whose record of going `path` is; None for any other object."""
    return _version_at(path, RETIRED, retired_path)


def _version_at(path: str, folder: str, path_of: Callable[[Version], str]) -> Version | None:
    try:
        version = Version.parse(path.removeprefix(folder + "/").removesuffix(".json"))
    except ValueError:
        return None
    return version if path_of(version) == path else None
